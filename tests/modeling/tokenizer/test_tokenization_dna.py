"""DNATokenizer: seven symbols, soft-masked bases, and anything else as one symbol."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_recurrent.modeling.tokenizer.tokenization_dna import DNATokenizer

TOKENIZER = DNATokenizer()


def test_symbols():
    assert TOKENIZER.vocab_size == len(TOKENIZER) == 7
    assert TOKENIZER.get_vocab() == {"\x00": 0, "A": 1, "C": 2, "G": 3, "T": 4, "N": 5, "?": 6}
    assert TOKENIZER("ACGTN?\x00")["input_ids"] == [1, 2, 3, 4, 5, 6, 0]
    assert TOKENIZER.eos_token_id == TOKENIZER.pad_token_id == 0


def test_soft_masked_bases_and_other_bytes():
    assert TOKENIZER.decode(TOKENIZER.encode("acgtnACGTN")) == "ACGTNACGTN"
    assert TOKENIZER.decode(TOKENIZER.encode("ARYKU>\né")) == "A????" + "?" * 4
    assert TOKENIZER.convert_tokens_to_ids(["A", "R"]) == [1, 6]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ACGTN?\x00", max_size=100))
def test_every_sequence_round_trips(sequence):
    ids = TOKENIZER.encode(sequence)
    assert TOKENIZER.decode(ids) == sequence
    assert TOKENIZER.decode_bytes(TOKENIZER.encode_bytes(sequence.encode())) == sequence.encode()
    assert len(ids) == len(sequence)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=100))
def test_any_bytes_give_one_symbol_each(data):
    ids = TOKENIZER.encode_bytes(data)
    assert len(ids) == len(data) and (ids < 7).all()
    upper = bytes(b - 32 if b in b"acgtn" else b for b in data)
    assert TOKENIZER.decode_bytes(ids) == bytes(b if b in b"\x00ACGTN" else ord("?") for b in upper)


def test_the_saved_file_holds_both_modules(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    text = (tmp_path / "tokenization_dna.py").read_text()
    assert "class AlphabetTokenizer" in text and not (tmp_path / "tokenization_byte.py").exists()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["auto_map"]["AutoTokenizer"][0] == "tokenization_dna.DNATokenizer"
    assert config["tokenizer_class"] == "DNATokenizer"
