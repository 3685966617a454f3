"""States by the tokens before them: found by the longest beginning, bounded, evicted by value, kept on disk."""

import random
import sqlite3

import numpy as np
import pytest
import torch

from hf_recurrent.server import prefix_store
from hf_recurrent.server.prefix_database import FILE, PrefixDatabase
from hf_recurrent.server.prefix_store import PrefixStore
from hf_recurrent.server.text_hashes import TextHashes

ZERO = {"a": torch.zeros(1, 3), "b": torch.zeros(1, 2, dtype=torch.uint8)}


def state_of(number: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((1, 3), float(number)), "b": torch.full((1, 2), int(number) % 256, dtype=torch.uint8)}


def text_of(*parts: tuple[int, int]) -> np.ndarray:
    """Parts of equal tokens: (token, how many)."""
    return np.concatenate([np.full(count, token) for token, count in parts])


def store_of(states: int, database=None) -> PrefixStore:
    size = sum(part.nbytes for part in ZERO.values()) + prefix_store._OVERHEAD
    return PrefixStore(ZERO, states * size, database)


def put(store: PrefixStore, tokens, length: int | None = None, salt: bytes = b"") -> None:
    """Store a state that has the number of tokens in it."""
    text = TextHashes(tokens, salt)
    length = len(text) if length is None else length
    store.put(text, text.key(length), state_of(length))


def found(store: PrefixStore, tokens, salt: bytes = b"") -> int:
    """Length of the longest stored beginning; 0 without one."""
    result = store.find(TextHashes(tokens, salt), len(tokens))
    if result is None:
        return 0
    assert all(torch.equal(part, state_of(result[0])[name]) for name, part in result[1].items())
    return result[0]


def test_hashes_depend_on_every_token_and_on_the_salt_alone():
    chance, tokens = random.Random(0), np.random.default_rng(0).integers(0, 256, 700)
    text = TextHashes(tokens)
    keys = [text.key(length) for length in range(701)]
    assert len({key.whole for key in keys}) == 701
    for cut in (0, 1, 127, 128, 129, 256, 700):
        longer = TextHashes(tokens[:cut].astype(np.uint8)).followed_by(tokens[cut:].tolist())
        assert [longer.key(length) for length in range(701)] == keys
    for _ in range(50):
        place = chance.randrange(700)
        changed = tokens.copy()
        changed[place] ^= 1
        assert TextHashes(changed).key(place) == keys[place]
        assert all(TextHashes(changed).key(length).whole != keys[length].whole for length in (place + 1, 700))
    assert TextHashes(tokens, b"other").key(5).whole != keys[5].whole
    assert [*text.blocks(300)] == [keys[length].block for length in (300, 200, 10)]


def test_the_longest_beginning_is_found_as_in_a_search_of_all():
    chance = random.Random(1)
    store, stored = store_of(10_000), set()
    for _ in range(300):
        tokens = [chance.choice([0, 1]) for _ in range(2)] + [7] * chance.choice([0, 100, 125, 130, 300])
        tokens = tokens[: chance.randint(1, len(tokens))] + [chance.choice([0, 1])] * chance.choice([0, 3, 200])
        expected = max((len(each) for each in stored if list(each) == tokens[: len(each)]), default=0)
        assert found(store, tokens) == expected
        if chance.random() < 0.5:
            put(store, tokens)
            stored.add(tuple(tokens))
    assert len(store) == len(stored)


def test_other_salts_find_nothing():
    store = store_of(10)
    put(store, text_of((1, 50)), salt=b"one")
    assert found(store, text_of((1, 60)), b"one") == 50 and found(store, text_of((1, 60)), b"two") == 0


def test_a_state_that_saves_much_stays_longer_and_one_that_is_used_stays():
    store = store_of(3)
    put(store, text_of((1, 1000)))
    put(store, text_of((2, 100)))
    put(store, text_of((3, 40)))
    put(store, text_of((4, 60)))  # in place of 40 tokens
    assert [found(store, text_of((token, 2000))) for token in (1, 2, 3, 4)] == [1000, 100, 0, 60]
    for token in range(5, 15):  # each in place of the last one
        assert found(store, text_of((2, 2000))) == 100
        put(store, text_of((token, 60)))
    assert [found(store, text_of((token, 2000))) for token in (1, 2, 14)] == [1000, 100, 60]
    for token in range(100, 200):  # an old state goes, whatever it saved
        put(store, text_of((token, 50)))
    assert found(store, text_of((1, 2000))) == 0 and len(store) == 3


def test_what_an_evicted_state_saved_is_added_to_the_next_one_of_its_text(tmp_path):
    database = PrefixDatabase(tmp_path, "same")
    store = store_of(4, database)
    conversation = text_of((1, 900), (2, 20), (3, 30))
    for length in (900, 920, 950):
        put(store, conversation, length)
    for token in range(10, 20):
        put(store, text_of((token, 100)))
    # The states of 20 and 30 tokens more went first; the first one has kept its value.
    assert found(store, conversation) == 900
    store.close()

    store = store_of(4, PrefixDatabase(tmp_path, "same"))
    put(store, conversation, 950)
    assert found(store, conversation) == 950
    store.close()
    store = store_of(4, PrefixDatabase(tmp_path, "same"))
    assert found(store, conversation) == 950
    gains = {entry.key.length: entry.gain for entry in store._entries.values()}
    assert gains[900] == 900 and gains[950] == 50
    store.close()


def test_memory_is_flat_under_many_different_texts(tmp_path):
    """In entries, in the index, in the queue and on disk; also where one state is used all the time."""
    store = store_of(50, PrefixDatabase(tmp_path, "same"))
    put(store, text_of((1, 5000)))
    sizes = set()
    for number in range(10_000):
        put(store, [*divmod(number, 256), *[number % 7] * (30 + number % 200)])
        if number % 20 == 0:
            assert found(store, text_of((1, 5000))) == 5000
        if number >= 1000 and number % 1000 == 0:
            sizes.add((len(store._entries), sum(len(each) for each in store._lengths.values()) <= 50))
            assert len(store._heap) <= 2 * 50 + 65
            assert sum(len(entry.children) for entry in store._entries.values()) <= 50
            assert (tmp_path / FILE).stat().st_size < 200_000
    assert sizes == {(50, True)}
    connection = sqlite3.connect(tmp_path / FILE)
    for table in ("prefixes", "states"):
        assert connection.execute(f"select count(*) from {table}").fetchone() == (50,)
    connection.close()
    store.close()


def test_a_bound_below_one_state_stores_nothing():
    store = PrefixStore(ZERO, 10)
    put(store, text_of((1, 50)))
    assert len(store) == 0 and found(store, text_of((1, 50))) == 0


def test_states_are_found_after_a_restart_and_a_smaller_bound_evicts(tmp_path):
    store = store_of(30, PrefixDatabase(tmp_path, "same"))
    for token in range(30):
        put(store, text_of((token, 40 + token)))
    store.close()
    store = store_of(30, PrefixDatabase(tmp_path, "same"))
    assert [found(store, text_of((token, 100))) for token in range(30)] == [40 + token for token in range(30)]
    store.close()
    store = store_of(5, PrefixDatabase(tmp_path, "same"))
    assert [found(store, text_of((token, 100))) for token in range(25, 30)] == [65, 66, 67, 68, 69]
    assert len(store) == 5
    store.close()


def test_states_of_another_computation_are_deleted(tmp_path):
    for computation, expected in (("one", 0), ("one", 50), ("two", 0), ("one", 0)):
        store = store_of(5, PrefixDatabase(tmp_path, computation))
        assert found(store, text_of((1, 60))) == expected
        put(store, text_of((1, 50)))
        store.close()


@pytest.mark.parametrize(
    "damage",
    [
        "update states set state = zeroblob(length(state))",
        "update states set state = substr(state, 2)",
        "update states set state = 'text', checksum = 5",
        "delete from states",
        "update prefixes set length = -3",
        "update prefixes set length = 'x', priority = 'y'",
        "update prefixes set length = length + 1",
        "update prefixes set block = 7",
        "update prefixes set parent = whole",
        "update prefixes set priority = 9e999",
        "drop table states",
    ],
)
def test_damaged_rows_are_ignored(tmp_path, damage):
    store = store_of(8, PrefixDatabase(tmp_path, "same"))
    for length in (40, 50, 60):
        put(store, text_of((1, 60)), length)
    store.close()
    connection = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    where = " where rowid > 2" if "table" not in damage else ""
    connection.execute(damage + where)
    connection.close()
    store = store_of(8, PrefixDatabase(tmp_path, "same"))
    result = found(store, text_of((1, 100)))
    assert result in ((60, 50) if "parent" in damage else (0,) if "table" in damage else (50,))
    put(store, text_of((1, 60)))
    assert found(store, text_of((1, 100))) == 60
    for token in range(2, 40):
        put(store, text_of((token, 50)))
    assert len(store) <= 8
    store.close()


def test_a_damaged_file_is_replaced(tmp_path, caplog):
    for data in (b"not a database at all" * 100, b""):
        (tmp_path / FILE).write_bytes(data)
        store = store_of(8, PrefixDatabase(tmp_path, "same"))
        put(store, text_of((1, 50)))
        store.close()
        store = store_of(8, PrefixDatabase(tmp_path, "same"))
        assert found(store, text_of((1, 60))) == 50
        store.close()
    assert "its texts will be read again" in caplog.text


def test_bytes_of_the_file_that_are_flipped_never_give_a_wrong_state(tmp_path):
    store = store_of(40, PrefixDatabase(tmp_path, "same"))
    for token in range(30):
        put(store, text_of((token, 40 + token)))
    store.close()
    whole, chance, outcomes = (tmp_path / FILE).read_bytes(), random.Random(0), set()
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 20, 300])):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (tmp_path / FILE).write_bytes(data)
        store = store_of(40, PrefixDatabase(tmp_path, "same"))
        outcomes.add(sum(found(store, text_of((token, 100))) > 0 for token in range(30)))  # `found` compares states
        put(store, text_of((200, 50)))
        assert found(store, text_of((200, 50))) == 50
        store.close()
    assert max(outcomes) > 15


def test_a_full_disk_is_logged_once_and_states_stay_in_memory(tmp_path, caplog):
    database = PrefixDatabase(tmp_path, "same")
    store = store_of(5, database)
    database._connection.execute("pragma query_only = 1")
    for token in range(10):
        put(store, text_of((token, 50)))
    assert found(store, text_of((9, 60))) == 50 and len(store) == 5
    assert caplog.text.count("cannot be written") == 1
    store.close()
