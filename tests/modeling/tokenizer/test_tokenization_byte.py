"""ByteTokenizer: exactness on every byte string, printable text, offsets, errors; and strict smaller alphabets."""

import json

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from model_cases import tiny_model
from operation_counts import count_operations
from transformers import AutoTokenizer, pipeline

from hf_recurrent.modeling.tokenizer.tokenization_byte import AlphabetTokenizer, ByteTokenizer

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
    exact = TOKENIZER.decode(ids, errors="surrogateescape")
    assert TOKENIZER.encode(exact) == TOKENIZER.encode(data) == TOKENIZER(exact)["input_ids"] == ids
    for form in (np.array(ids, dtype=np.int64), torch.tensor(ids).long()):
        assert TOKENIZER.decode(form, errors="surrogateescape") == exact


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
@example(bytes(range(256)))
@example(b"\xed\xa0\x80\xf4\x90\x80\x80\xc0\x80")
def test_decoded_text_can_be_printed(data):
    ids = list(data)
    text = TOKENIZER.decode(ids)
    assert text == data.decode("utf-8", "replace") and text.encode("utf-8").decode("utf-8") == text
    assert TOKENIZER.batch_decode([ids]) == [text] == TOKENIZER.decode([ids])
    assert TOKENIZER.convert_tokens_to_string(TOKENIZER.convert_ids_to_tokens(ids)) == text
    assert json.loads(json.dumps({"text": text}, ensure_ascii=False).encode("utf-8")) == {"text": text}


def test_decoded_text_goes_where_text_goes(tmp_path, bare_python):
    pyarrow = pytest.importorskip("pyarrow")
    text = TOKENIZER.decode(list(range(256)))
    assert pyarrow.array([text]).to_pylist() == [text]
    code = """
import logging, sys
from transformers import AutoTokenizer
text = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True).decode(list(range(1, 256)))
print(text)
logging.basicConfig(stream=sys.stdout)
logging.warning(text)
"""
    TOKENIZER.save_pretrained(tmp_path)
    done = bare_python.python(["-c", code, str(tmp_path)], tmp_path, text=False)
    assert done.returncode == 0 and b"UnicodeEncodeError" not in done.stderr, done.stderr
    assert done.stdout.decode("utf-8").count("\ufffd") == 2 * 128  # every byte from 0x80 on, twice


def test_text_of_a_pipeline_can_be_sent():
    model = tiny_model("memora")
    model.generation_config.suppress_tokens = list(range(0x80))  # no byte is ASCII, so the text is hardly UTF-8
    generator = pipeline("text-generation", model=model, tokenizer=ByteTokenizer())
    (out,) = generator("café", max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert out["generated_text"].startswith("café") and "\ufffd" in out["generated_text"]
    assert json.loads(json.dumps(out, ensure_ascii=False).encode("utf-8")) == out


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=5), st.sampled_from(["left", "right"]))
def test_texts_round_trip_in_padded_batches(texts, side):
    batch = TOKENIZER(texts, padding=True, padding_side=side, return_tensors="np")
    for text, ids, mask in zip(texts, batch["input_ids"], batch["attention_mask"], strict=True):
        assert TOKENIZER.decode(ids[mask == 1]) == text
        assert ids[mask == 1].tolist() == list(text.encode())


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=60))
def test_offsets_are_the_characters_of_the_bytes(text):
    out = TOKENIZER(text, return_offsets_mapping=True)
    expected = []
    for position, character in enumerate(text):
        expected += [(position, position + 1)] * len(character.encode())
    assert out["offset_mapping"] == expected and out["input_ids"] == list(text.encode())


def test_offsets_of_pairs_and_other_inputs():
    pair = TOKENIZER("é", "ab", return_offsets_mapping=True)["offset_mapping"]
    assert pair == [(0, 1), (0, 1), (0, 1), (1, 2)]
    for text in ("\udc80", b"ab", [1, 2]):
        with pytest.raises(ValueError, match="text"):
            TOKENIZER(text, return_offsets_mapping=True)


def test_ids_are_byte_values():
    assert TOKENIZER.vocab_size == len(TOKENIZER) == 256
    assert TOKENIZER("A\x00é").input_ids == [65, 0, 0xC3, 0xA9]
    assert TOKENIZER.tokenize("A é\x00") == ["A", "Ġ", "Ã", "©", "\x00"]


def test_invalid_utf8_in_text():
    assert TOKENIZER.decode([0x61, 0xFF]) == "a\ufffd"
    assert TOKENIZER.decode([0x61, 0xFF], errors="surrogateescape") == "a\udcff"
    assert ByteTokenizer(errors="surrogateescape").batch_decode([[0x61, 0xFF]]) == ["a\udcff"]
    assert ByteTokenizer(errors="ignore").decode([0x61, 0xFF]) == "a"
    assert TOKENIZER.encode("\udcff") == [0xFF]
    with pytest.raises(ValueError, match="lone surrogate"):
        TOKENIZER.encode("ab\ud800")
    with pytest.raises(ValueError, match="at character 2"):
        TOKENIZER.encode("ab\udc7f")


def test_unknown_tokens():
    assert TOKENIZER.convert_tokens_to_ids("abc") is None
    with pytest.raises(ValueError, match="`tokens` holds 'abc'"):
        TOKENIZER.convert_tokens_to_string(["a", "abc"])


@pytest.mark.parametrize("bad", ["text", 5, [1, 2], np.zeros(3)])
def test_encode_bytes_takes_bytes_only(bad):
    with pytest.raises(ValueError, match=r"`data` is of type \w+; it must be bytes"):
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


def test_operations_do_not_grow_with_the_text():
    """A loop over bytes would run one operation or more for each."""

    def counts(repeats: int) -> list[int]:
        text = "The quick brown fox; naïve 中文. " * repeats
        ids = TOKENIZER(text, return_tensors="np")["input_ids"][0]
        numbers = ids.tolist()
        calls = [
            lambda: TOKENIZER(text)["input_ids"],
            lambda: TOKENIZER(text, return_tensors="pt")["input_ids"],
            lambda: TOKENIZER.decode(ids),
            lambda: TOKENIZER.decode(numbers),
            lambda: TOKENIZER.decode_bytes(ids),
            lambda: TOKENIZER.encode_bytes(text.encode()),
        ]
        return [count_operations(call) for call in calls]

    counts(1)  # the first calls fill caches
    assert counts(10_000) == counts(1)


def _saved_with_errors(directory, errors):
    """A tokenizer saved with this value of `errors`, as every checkpoint of the first versions holds one."""
    TOKENIZER.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"errors": errors}))


@pytest.mark.parametrize("load", [ByteTokenizer.from_pretrained, AutoTokenizer.from_pretrained])
def test_surrogateescape_is_not_loaded_from_a_file(tmp_path, load):
    _saved_with_errors(tmp_path, "surrogateescape")
    tokenizer = load(tmp_path)
    assert tokenizer.decode([0x61, 0xFF]) == "a\ufffd" and tokenizer.errors == "replace"
    tokenizer.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())["errors"] == "replace"
    assert load(tmp_path, errors="surrogateescape").decode([0x61, 0xFF]) == "a\udcff"
    assert load(tmp_path, errors="ignore").decode([0x61, 0xFF]) == "a"
    _saved_with_errors(tmp_path, "ignore")
    assert load(tmp_path).decode([0x61, 0xFF]) == "a"
