"""Streamers: whole characters, as soon as they are complete, in constant memory."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operation_counts import count_operations
from transformers import TextStreamer

from hf_recurrent.modeling.tokenizer.byte_streamer import ByteIteratorStreamer, ByteStreamer
from hf_recurrent.modeling.tokenizer.tokenization_byte import ByteTokenizer
from hf_recurrent.modeling.tokenizer.tokenization_dna import DNATokenizer

TOKENIZER = ByteTokenizer()
TEXT = "né 中文\n😀 ok"


class _Collect(ByteStreamer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.pieces, self.ends = [], 0

    def on_finalized_text(self, text, stream_end=False):
        self.pieces.append(text)
        self.ends += stream_end


class _CollectStock(TextStreamer):
    on_finalized_text = _Collect.on_finalized_text
    ends = 0


def _feed(streamer, data: bytes, prompt: bytes = b"") -> None:
    if prompt:
        streamer.put(torch.tensor([list(prompt)]))
    for byte in data:
        streamer.put(torch.tensor([byte]))
    streamer.end()


def test_each_character_comes_with_its_last_byte():
    streamer = _Collect(TOKENIZER)
    _feed(streamer, TEXT.encode())
    assert streamer.pieces == [*TEXT, ""] and streamer.ends == 1


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 20))
def test_stream_is_the_text_whatever_the_bytes(data, cut):
    streamer = _Collect(TOKENIZER)
    _feed(streamer, data[cut:], data[:cut])
    text = "".join(streamer.pieces)
    assert text == data.decode("utf-8", "replace")
    text.encode()  # can be printed


def test_prompt_may_end_inside_a_character():
    streamer = _Collect(TOKENIZER)
    _feed(streamer, "中!".encode()[2:], "中!".encode()[:2])
    assert streamer.pieces == ["中", "!", ""]


def test_prompt_can_be_left_out():
    streamer = _Collect(TOKENIZER, skip_prompt=True)
    for _ in range(2):  # a streamer can be used again
        _feed(streamer, b"cd", b"ab")
    assert streamer.pieces == ["c", "d", ""] * 2


def test_cut_character_does_not_leak_into_the_next_stream():
    streamer = _Collect(TOKENIZER)
    _feed(streamer, b"a\xe4\xb8")
    assert streamer.pieces == ["a", "\ufffd"]
    _feed(streamer, b"b")
    assert streamer.pieces[2:] == ["b", ""]


def test_options():
    streamer = _Collect(TOKENIZER, skip_special_tokens=True, errors="ignore")
    _feed(streamer, b"a\x00\xffb")
    assert "".join(streamer.pieces) == "ab"
    streamer = _Collect(DNATokenizer(), skip_special_tokens=True)
    _feed(streamer, bytes([1, 2, 3, 0]))
    assert streamer.pieces == ["A", "C", "G", ""]


def test_bad_input():
    with pytest.raises(ValueError, match="`value` has 2 rows; it must be a batch of 1"):
        ByteStreamer(TOKENIZER).put(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="`tokenizer` is of type object; it must have `decode_bytes`"):
        ByteStreamer(object())


def test_prints(capsys):
    _feed(ByteStreamer(TOKENIZER), TEXT.encode() + b"\xff")
    assert capsys.readouterr().out == TEXT + "\ufffd\n"


def test_iterator():
    streamer = ByteIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=10)
    thread = threading.Thread(target=_feed, args=(streamer, TEXT.encode(), b"prompt"))
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert [piece for piece in pieces if piece] == list(TEXT)


def test_memory_and_work_do_not_grow():
    class Counting(ByteTokenizer):
        decoded = 0

        def decode_bytes(self, ids, **kwargs):
            self.decoded += ids.numel()
            return super().decode_bytes(ids, **kwargs)

    tokenizer = Counting()
    streamer = _Collect(tokenizer)
    one = torch.tensor([97])
    streamer.put(one)  # the prompt
    first = count_operations(lambda: streamer.put(one))
    for _ in range(20_000):
        streamer.put(one)
    assert count_operations(lambda: streamer.put(one)) == first
    assert tokenizer.decoded == 20_003  # each byte once, and no more than that since the last line end
    assert not streamer.token_cache and streamer._decoder.getstate() == (b"", 0)


def test_stock_streamer_prints_no_half_character_either():
    streamer = _CollectStock(TOKENIZER)
    streamer.pieces = []
    _feed(streamer, TEXT.encode() * 3)
    assert "".join(streamer.pieces) == TEXT * 3
