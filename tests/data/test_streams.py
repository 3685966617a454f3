"""The streams against an oracle that goes byte by byte in plain Python."""

import itertools
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.document_order import DocumentOrder
from hf_recurrent.data.streams import EvaluationStreams, IIDDataset, MultiStreamDataset, unreached_documents

TINY = st.lists(st.binary(min_size=1, max_size=12).map(lambda b: b.replace(b"\0", b"x")), min_size=1, max_size=9)
BOTH = pytest.mark.parametrize("dataset_class", [MultiStreamDataset, IIDDataset])


def words_corpus(number=40, binary=False):
    random = np.random.default_rng(0)
    documents = [random.integers(1, 256, random.integers(1, 60)).astype(np.uint8).tobytes() for _ in range(number)]
    return Corpus.from_documents(documents, binary=binary)


def oracle(corpus, num_streams, seed, stream, length):
    """[(input, target, reset, position after)] of one stream, byte by byte."""
    order = DocumentOrder(len(corpus), seed)
    end = -100 if corpus.end_token_id is None else corpus.end_token_id
    offset = 0
    if len(corpus) < num_streams:
        document = int(order(np.array(stream)))
        sharing = [k for k in range(num_streams) if int(order(np.array(k))) == document]
        offset = sharing.index(stream) * len(corpus[document]) // len(sharing)
    rows, first, number = [], True, 0
    while len(rows) < length:
        episode = corpus[int(order(np.array(stream + number * num_streams)))].tolist()
        while offset < len(episode) and len(rows) < length:
            last = offset + 1 == len(episode)
            after = (number + 1, 0) if last else (number, offset + 1)
            rows.append((episode[offset], end if last else episode[offset + 1], first or offset == 0, after))
            first, offset = False, offset + 1
        number, offset = number + 1, 0
    return rows


def take(dataset, number, num_workers=0):
    if num_workers:
        dataset = DataLoader(dataset, batch_size=None, num_workers=num_workers, multiprocessing_context="fork")
    return list(itertools.islice(dataset, number))


def joined(batches):
    """stream → (inputs, targets, resets) over all batches."""
    parts = {}
    for batch in batches:
        for row, stream in enumerate(batch["stream_indices"].tolist()):
            columns = [batch[key][row].tolist() for key in ("input_ids", "shift_labels", "reset_mask")]
            parts.setdefault(stream, []).extend(zip(*columns, strict=True))
    return parts


def same(batches, others):
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        assert batch.keys() == other.keys()
        for key in batch:
            assert torch.equal(batch[key], other[key]), key


@settings(max_examples=60, deadline=None)
@given(
    documents=TINY,
    num_streams=st.integers(1, 6),
    block_size=st.integers(1, 9),
    seed=st.integers(0, 5),
    binary=st.booleans(),
)
def test_streams_are_what_the_oracle_says(documents, num_streams, block_size, seed, binary):
    corpus = Corpus.from_documents(documents, binary=binary)
    batches = take(MultiStreamDataset(corpus, num_streams, block_size, seed), 7)
    for stream, rows in joined(batches).items():
        expected = oracle(corpus, num_streams, seed, stream, 7 * block_size)
        assert rows == [row[:3] for row in expected]
        for number, batch in enumerate(batches):
            assert tuple(batch["stream_positions"][stream].tolist()) == expected[(number + 1) * block_size - 1][3]


def test_batch_types_and_shapes():
    batch = next(iter(MultiStreamDataset(words_corpus(), 6, 5, accumulation_groups=2)))
    assert {key: (tuple(value.shape), value.dtype) for key, value in batch.items()} == {
        "input_ids": ((3, 5), torch.int64),
        "shift_labels": ((3, 5), torch.int64),
        "reset_mask": ((3, 5), torch.bool),
        "stream_indices": ((3,), torch.int64),
        "stream_positions": ((3, 2), torch.int64),
    }


@pytest.mark.parametrize("block_size", [1, 2, 7, 64, 700, 5000, 65536])
def test_every_block_size_shows_the_same_stream(block_size):
    corpus, length = words_corpus(), 65536 if block_size == 65536 else 7000
    reference = joined(take(MultiStreamDataset(corpus, 3, 10, 1), 700))
    rows = joined(take(MultiStreamDataset(corpus, 3, block_size, 1), -(-length // block_size)))
    for stream in range(3):
        assert rows[stream][:7000] == reference[stream][: len(rows[stream][:7000])]
        assert len(rows[stream]) >= 7000


def test_an_epoch_shows_every_episode_whole_with_its_end_and_one_reset():
    corpus = words_corpus(41)
    total = corpus.num_bytes
    (rows,) = joined(take(MultiStreamDataset(corpus, 1, 1, 3), total)).values()
    episodes = []
    for byte, target, reset in rows:
        if reset:
            episodes.append([])
        episodes[-1].append(byte)
        if target == 0:
            episodes.append(None)
    assert episodes[-1] is None and episodes[1::2] == [None] * 41
    assert Counter(map(bytes, episodes[::2])) == Counter(episode.tobytes() for episode in corpus)


def test_targets_are_the_next_inputs_also_across_blocks():
    for rows in joined(take(MultiStreamDataset(words_corpus(), 4, 8), 50)).values():
        for (_, target, _), (following, _, reset) in itertools.pairwise(rows):
            assert target == (0 if reset else following)


@settings(max_examples=60, deadline=None)
@given(
    documents=TINY,
    num_streams=st.integers(1, 6),
    length=st.integers(1, 30),
    seed=st.integers(0, 5),
    max_bytes=st.integers(0, 60),
)
def test_documents_that_no_stream_reaches(documents, num_streams, length, seed, max_bytes):
    corpus = Corpus.from_documents(documents)
    found = unreached_documents(corpus, num_streams, length, seed, max_bytes).tolist()
    order = DocumentOrder(len(corpus), seed)
    positions = [oracle(corpus, num_streams, seed, stream, length)[-1][3] for stream in range(num_streams)]
    reached = {
        int(order(np.array(stream + number * num_streams)))
        for stream, (read, offset) in enumerate(positions)
        for number in range(read + (offset > 0))
    }
    rest = [document for document in order(np.arange(len(corpus))).tolist() if document not in reached]
    sizes = list(itertools.accumulate(len(corpus[document]) for document in rest))
    assert found == rest[: sum(size <= max_bytes for size in sizes)]


def test_few_documents_are_spread_over_streams():
    book = Corpus.from_documents([bytes(range(1, 201))])
    batch = next(iter(MultiStreamDataset(book, 4, 3)))
    assert batch["input_ids"][:, 0].tolist() == [1, 51, 101, 151]
    assert batch["reset_mask"].tolist() == [[True, False, False]] * 4
    # Reading on, each comes to the beginning of the book again, and resets there.
    rows = joined(take(MultiStreamDataset(book, 4, 50), 8))
    assert [[place for place, row in enumerate(rows[k]) if row[2]] for k in range(4)] == [
        [0, 200],
        [0, 150, 350],
        [0, 100, 300],
        [0, 50, 250],
    ]


@BOTH
@pytest.mark.parametrize("block_size", [1, 6, 3000])
def test_processes_and_accumulation_groups_show_the_same_streams(dataset_class, block_size):
    corpus = words_corpus()
    steps = 600 if block_size == 1 else 3
    whole = joined(take(dataset_class(corpus, 8, block_size, 5), steps))
    # Two processes, two groups each: stream g·(W·b) + r·b + i.
    split = {}
    for rank in range(2):
        streams = [group * 4 + rank * 2 + row for group in range(2) for row in range(2)]
        dataset = dataset_class(corpus, 8, block_size, 5, stream_indices=streams, accumulation_groups=2)
        batches = take(dataset, 2 * steps)
        assert [batch["stream_indices"].tolist() for batch in batches[:3]] == [streams[:2], streams[2:], streams[:2]]
        split.update(joined(batches))
    assert split == whole
    assert dataset.step_bytes == 8 * block_size


@pytest.mark.sampled(4)
@BOTH
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("block_size", [2, 5000])
def test_workers_do_not_change_the_batches(dataset_class, num_workers, block_size):
    arguments = {"stream_indices": [4, 1, 0, 5], "accumulation_groups": 2}
    dataset = dataset_class(words_corpus(), 6, block_size, 2, **arguments)
    same(take(dataset, 11, num_workers), take(dataset, 11))


@BOTH
@settings(max_examples=25, deadline=None)
@given(
    documents=TINY,
    done=st.integers(1, 20),
    new_block=st.integers(1, 7),
    seed=st.integers(0, 3),
)
def test_restart_at_any_position_goes_on_exactly(dataset_class, documents, done, new_block, seed):
    corpus = Corpus.from_documents(documents)
    whole = take(dataset_class(corpus, 4, 3, seed, accumulation_groups=2), 2 * done + 8)
    positions = np.zeros((4, 2), dtype=np.int64)
    for batch in whole[: 2 * done]:
        positions[batch["stream_indices"]] = batch["stream_positions"]
    resumed = dataset_class(corpus, 4, 3, seed, accumulation_groups=2, positions=positions)
    same(take(resumed, 8), whole[2 * done :])
    if dataset_class is MultiStreamDataset:  # another T, and other processes
        other = dataset_class(corpus, 4, new_block, seed, positions=positions, stream_indices=[3, 1])
        rows, expected = joined(take(other, 2)), joined(whole[2 * done :])
        for stream in (3, 1):
            length = min(len(rows[stream]), len(expected[stream]))
            assert rows[stream][:length] == expected[stream][:length]


def test_restart_of_a_long_run_at_every_read_ahead_border():
    corpus = words_corpus()
    whole = take(MultiStreamDataset(corpus, 2, 1), 1300)
    for done in (1, 511, 512, 513, 1024):
        positions = whole[done - 1]["stream_positions"]
        same(take(MultiStreamDataset(corpus, 2, 1, positions=positions), 200), whole[done : done + 200])


def test_iterating_again_begins_again():
    dataset = MultiStreamDataset(words_corpus(), 2, 5)
    same(take(dataset, 4), take(dataset, 4))


@pytest.mark.parametrize("block_size", [1, 3, 64, 65, 400])
@pytest.mark.parametrize("binary", [False, True])
def test_iid_blocks_are_genuine(block_size, binary):
    corpus = words_corpus(binary=binary)
    row = list(itertools.chain.from_iterable(episode.tolist() for episode in corpus))
    starts = set(corpus.offsets[:-1].tolist())
    end = -100 if binary else 0
    length = len(row)
    places = {}
    for place in range(length):
        places.setdefault(tuple(row[(place + step) % length] for step in range(min(block_size, 6))), []).append(place)
    for batch in take(IIDDataset(corpus, 4, block_size), 30):
        for inputs, targets, resets in zip(
            batch["input_ids"].tolist(), batch["shift_labels"].tolist(), batch["reset_mask"].tolist(), strict=True
        ):

            def matches(place, inputs=inputs, targets=targets, resets=resets):
                span = [(place + step) % length for step in range(block_size + 1)]
                return (
                    inputs == [row[p] for p in span[:-1]]
                    and targets == [end if p in starts else row[p] for p in span[1:]]
                    and resets == [True] + [p in starts for p in span[1:-1]]
                )

            assert any(matches(place) for place in places[tuple(inputs[:6])])


def test_iid_blocks_begin_everywhere_and_differ_between_streams_and_seeds():
    corpus = Corpus.from_documents([bytes(range(1, 100)), bytes(range(100, 200))])
    first = [batch["input_ids"][:, 0] for batch in take(IIDDataset(corpus, 8, 1), 2000)]
    counts = np.bincount(torch.cat(first).numpy(), minlength=200)[1:]
    expected = 16000 / 199
    assert ((counts - expected) ** 2 / expected).sum() < 199 + 6 * np.sqrt(2 * 199)
    streams = torch.stack(first)
    assert len({tuple(column.tolist()) for column in streams.T}) == 8
    assert not torch.equal(streams[0], next(iter(IIDDataset(corpus, 8, 1, seed=1)))["input_ids"][:, 0])


@settings(max_examples=60, deadline=None)
@given(
    documents=TINY,
    num_streams=st.integers(1, 8),
    block_size=st.integers(1, 30),
    binary=st.booleans(),
)
def test_evaluation_covers_every_episode_exactly_once(documents, num_streams, block_size, binary):
    corpus = Corpus.from_documents(documents, binary=binary)
    dataset, found = EvaluationStreams(corpus, num_streams, block_size), Counter()
    batches = list(dataset)
    assert len(batches) == dataset.num_batches
    mask = {}
    for batch in batches:
        assert set(batch["attention_mask"].unique().tolist()) <= {0, 1}
        padding = batch["attention_mask"] == 0
        assert (batch["input_ids"][padding] == 0).all() and (batch["shift_labels"][padding] == -100).all()
        assert not batch["reset_mask"][padding].any()
        for row, stream in enumerate(batch["stream_indices"].tolist()):
            mask.setdefault(stream, []).extend(batch["attention_mask"][row].tolist())
    for stream, rows in joined(batches).items():
        assert mask[stream] == sorted(mask[stream], reverse=True)
        rows = rows[: sum(mask[stream])]
        episodes = []
        for byte, _, reset in rows:
            if reset:
                episodes.append([])
            episodes[-1].append(byte)
        found.update(map(bytes, episodes))
        following = [(0, True) if i + 1 == len(rows) else (rows[i + 1][0], rows[i + 1][2]) for i in range(len(rows))]
        end = -100 if binary else 0
        assert [row[1] for row in rows] == [end if reset else byte for byte, reset in following]
    assert found == Counter(episode.tobytes() for episode in corpus)


def test_evaluation_is_balanced():
    corpus = words_corpus(400)
    ideal = -(-corpus.num_bytes // (8 * 16))
    assert EvaluationStreams(corpus, 8, 16).num_batches <= ideal + 1


def test_streams_of_a_selection_show_only_its_episodes():
    corpus = words_corpus()
    part = corpus.select([7, 3, 30])
    lengths = sum(len(episode) for episode in part)
    (rows,) = joined(take(MultiStreamDataset(part, 1, 1), lengths)).values()
    assert sorted(row[0] for row in rows) == sorted(itertools.chain.from_iterable(map(bytes, part)))
    assert sum(row[2] for row in rows) == 3


def test_a_dataset_can_be_sent_to_a_worker_process():
    dataset = MultiStreamDataset(words_corpus(), 3, 4, accumulation_groups=3)
    same(take(pickle.loads(pickle.dumps(dataset)), 6), take(dataset, 6))


@BOTH
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "`block_size` is 0"),
        ({"num_streams": -1}, "`num_streams` is -1"),
        ({"block_size": 1.5}, "`block_size` is 1.5"),
        ({"accumulation_groups": 3}, "`accumulation_groups` is 3"),
        ({"stream_indices": [0, 4]}, "stream_indices"),
        ({"stream_indices": [1, 1]}, "stream_indices"),
        ({"stream_indices": []}, "stream_indices"),
        ({"positions": np.zeros((3, 2), dtype=int)}, r"\(3, 2\)"),
        ({"positions": -np.ones((4, 2), dtype=int)}, "positions"),
        ({"positions": np.full((4, 2), 1000)}, "positions"),
    ],
)
def test_arguments_that_are_not_allowed(dataset_class, arguments, message):
    with pytest.raises(ValueError, match=message):
        dataset_class(words_corpus(), **{"num_streams": 4, "block_size": 4, **arguments})
