"""Tokens of words as bytes, for three kinds of tokenizers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from word_tokenizers import SPECIAL, TEXT, byte_level_tokenizer, sentence_piece_tokenizer, word_piece_tokenizer

from hf_recurrent.server.text_tokenizer import TextTokenizer

BYTE_LEVEL = TextTokenizer(byte_level_tokenizer(), 310)
PIECES = TextTokenizer(sentence_piece_tokenizer(), 400)


@settings(deadline=None, max_examples=100)
@given(st.text())
def test_every_text_is_the_bytes_of_its_tokens(text):
    if not any(name in text for name in SPECIAL):
        assert BYTE_LEVEL.decode_bytes(BYTE_LEVEL.encode_bytes(text.encode())) == text.encode()
    if not any(name in text for name in ("<s>", "</s>", "<unk>", "\u2581")):
        assert PIECES.decode_bytes(PIECES.encode_bytes(text.encode())) == text.encode()


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PIECES])
def test_bytes_are_those_of_the_tokenizer_itself(tokenizer):
    tokens = tokenizer.encode_bytes((TEXT[:300] + "你好 😀 ñ").encode())
    for begin in range(0, len(tokens), 7):
        piece = tokens[begin : begin + 40]
        text = tokenizer.decode(piece, clean_up_tokenization_spaces=False)
        # A cut character has one or several replacement characters.
        assert tokenizer.decode_bytes(piece).decode(errors="replace").strip("\ufffd") == text.strip("\ufffd")


def test_words_of_a_tokenizer_without_bytes_are_what_they_add():
    tokenizer = TextTokenizer(word_piece_tokenizer(), 120)
    tokens = tokenizer.encode_bytes(b"The memory of the text")
    assert tokenizer.decode_bytes(tokens) == b" The memory of the text"


def test_special_tokens_have_names_and_no_bytes():
    assert BYTE_LEVEL.decode_bytes([0, 1, 2, 305]) == b""
    assert [BYTE_LEVEL.name(token) for token in (0, 2, 305)] == ["<|end|>", "<|end_of_turn|>", "<305>"]
    assert PIECES.name(3 + 0xE4) == "bytes:\\xe4"
    assert PIECES.name(3 + 0x41) == "A"


def test_only_the_beginning_of_a_text_has_a_begin_token():
    assert PIECES.encode_bytes(b"the", begins=True).tolist()[0] == 1
    assert 1 not in PIECES.encode_bytes(b"the").tolist()


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(ValueError, match="it is not UTF-8"):
        BYTE_LEVEL.encode_bytes(b"\xff")
