"""ByteTokenizer: exactness on every byte string, spans, errors, speed; and strict smaller alphabets."""

import time

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_recurrent.modeling.tokenization_byte import AlphabetTokenizer, ByteTokenizer

TOKENIZER = ByteTokenizer()


class DigitTokenizer(AlphabetTokenizer):
    """A strict alphabet, without byte 0."""

    symbols = b"0123456789"

    def __init__(self, **kwargs):
        super().__init__(**{"eos_token": None, "pad_token": None, **kwargs})


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
@example(bytes(range(256)))
@example("é".encode()[:1])
@example(b"\xed\xa0\x80\xf4\x90\x80\x80\xc0\x80")
def test_every_byte_string_round_trips(data):
    ids = list(data)
    assert TOKENIZER.encode_bytes(data).tolist() == ids
    assert TOKENIZER.decode_bytes(ids) == data
    text = TOKENIZER.decode(ids)
    assert TOKENIZER.encode(text) == TOKENIZER.encode(data) == TOKENIZER(text)["input_ids"] == ids
    assert text == TOKENIZER.decode(np.array(ids, dtype=np.int64)) == TOKENIZER.decode(torch.tensor(ids).long())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=5), st.sampled_from(["left", "right"]))
def test_texts_round_trip_in_padded_batches(texts, side):
    batch = TOKENIZER(texts, padding=True, padding_side=side, return_tensors="np")
    for text, ids, mask in zip(texts, batch["input_ids"], batch["attention_mask"], strict=True):
        assert TOKENIZER.decode(ids[mask == 1]) == text
        assert ids[mask == 1].tolist() == list(text.encode())


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_spans_are_the_characters_of_the_bytes(data):
    text = data.decode("utf-8", "surrogateescape")
    out = TOKENIZER(text, return_offsets_mapping=True)
    expected = []
    for position, character in enumerate(text):
        expected += [(position, position + 1)] * len(character.encode("utf-8", "surrogateescape"))
    assert out["offset_mapping"] == expected
    assert len(out["input_ids"]) == len(expected)


def test_spans_of_bytes_pairs_and_ids():
    assert TOKENIZER("aé😀", return_offsets_mapping=True)["offset_mapping"] == [(0, 1)] + [(1, 2)] * 2 + [(2, 3)] * 4
    assert TOKENIZER("é".encode(), return_offsets_mapping=True)["offset_mapping"] == [(0, 1), (1, 2)]
    pair = TOKENIZER("é", "ab", return_offsets_mapping=True)["offset_mapping"]
    assert pair == [(0, 1), (0, 1), (0, 1), (1, 2)]
    with pytest.raises(ValueError, match="return_offsets_mapping needs text"):
        TOKENIZER([1, 2], return_offsets_mapping=True)


def test_ids_are_byte_values():
    assert TOKENIZER.vocab_size == len(TOKENIZER) == 256
    assert TOKENIZER("A\x00é").input_ids == [65, 0, 0xC3, 0xA9]
    assert TOKENIZER.tokenize("A é\x00") == ["A", "Ġ", "Ã", "©", "\x00"]


def test_invalid_utf8_in_text():
    assert TOKENIZER.decode([0x61, 0xFF]) == "a\udcff"
    assert TOKENIZER.decode([0x61, 0xFF], errors="replace") == "a\ufffd"
    assert ByteTokenizer(errors="ignore").decode([0x61, 0xFF]) == "a"
    assert TOKENIZER.encode("\udcff") == [0xFF]
    with pytest.raises(ValueError, match="lone surrogate"):
        TOKENIZER.encode("ab\ud800")
    with pytest.raises(ValueError, match="at character 2"):
        TOKENIZER.encode("ab\udc7f")


def test_unknown_tokens():
    assert TOKENIZER.convert_tokens_to_ids("abc") is None
    with pytest.raises(ValueError, match="'abc'"):
        TOKENIZER.convert_tokens_to_string(["a", "abc"])


@pytest.mark.parametrize("bad", ["text", 5, [1, 2], np.zeros(3)])
def test_encode_bytes_takes_bytes_only(bad):
    with pytest.raises(ValueError, match="data must be bytes"):
        TOKENIZER.encode_bytes(bad)


def test_encode_bytes_takes_any_buffer_and_gives_own_memory():
    data = bytearray(b"abc")
    ids = TOKENIZER.encode_bytes(data)
    data[0] = 0
    ids[1] = 9
    assert ids.tolist() == [97, 9, 99] and data == b"\x00bc"
    assert TOKENIZER.encode_bytes(memoryview(b"ab")).tolist() == [97, 98]
    assert TOKENIZER.encode_bytes(np.array([1, 2], dtype=np.uint8)).tolist() == [1, 2]


def test_strict_alphabet(tmp_path):
    digits = DigitTokenizer()
    assert digits.vocab_size == len(digits) == 10 and digits.eos_token_id is None
    assert digits("0429")["input_ids"] == [0, 4, 2, 9]
    assert digits.decode([9, 0]) == "90"
    with pytest.raises(ValueError, match=r"byte b'x' at position 2 is not in the alphabet of DigitTokenizer"):
        digits("01x2")
    with pytest.raises(ValueError, match="token id 10"):
        digits.decode([10])
    assert digits.to_tokenizers().encode("0429").ids == [0, 4, 2, 9]


def test_encoding_is_fast():
    # The documented bar is 50 MB/s on 10 MB; a busy machine gets some slack, a loop over bytes (1 MB/s) does not.
    text = "The quick brown fox; naïve 中文. " * 280_000
    size = len(text.encode()) / 1e6
    assert size > 10

    def speed(call) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return size / min(times)

    ids = TOKENIZER(text, return_tensors="np")["input_ids"][0]
    assert speed(lambda: TOKENIZER(text)["input_ids"]) > 15
    assert speed(lambda: TOKENIZER(text, return_tensors="pt")["input_ids"]) > 25
    assert speed(lambda: TOKENIZER.decode(ids)) > 25
