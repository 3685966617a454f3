"""Columns of text in Parquet files, and the encoding of bytes as token ids."""

import numpy as np
import pytest

from hf_recurrent.data.readers import reader_of
from hf_recurrent.data.token_encoding import TokenEncoding
from hf_recurrent.modeling.tokenizer.tokenization_byte import ByteTokenizer
from hf_recurrent.modeling.tokenizer.tokenization_dna import DNATokenizer

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
ROWS = ["one", "", "café", "naïve 🙂", "x" * 3000, "end"] * 50


def documents(path):
    return [b"".join(chunks) for _, chunks in reader_of(path, False)(path, "text")]


@pytest.mark.parametrize("kind", [arrow.string(), arrow.large_string(), arrow.binary()])
@pytest.mark.parametrize("options", [{}, {"use_dictionary": False}, {"row_group_size": 7}])
def test_rows_are_read_as_they_were_written(tmp_path, kind, options):
    rows = [row.encode() for row in ROWS] if kind == arrow.binary() else ROWS
    parquet.write_table(arrow.table({"text": arrow.array(rows, kind)}), tmp_path / "a.parquet", **options)
    assert documents(tmp_path / "a.parquet") == [row.encode() for row in ROWS]


def test_null_is_an_empty_document(tmp_path):
    parquet.write_table(arrow.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet") == [b"a", b"", b"b"]


@pytest.mark.parametrize("broken", [[b"caf\xc3", b"\xa9"], [b"fine", b"\xff"]])
def test_text_that_is_not_utf8_names_its_row(tmp_path, broken):
    # The first case is UTF-8 only if both rows are read as one.
    rows = arrow.array([b"first", *broken]).view(arrow.string())
    parquet.write_table(arrow.table({"text": rows}), tmp_path / "a.parquet", use_dictionary=False)
    with pytest.raises(ValueError, match=rf"a\.parquet, row {1 if broken[0] != b'fine' else 2}: column 'text' is not"):
        documents(tmp_path / "a.parquet")


class _Shifted:
    """Ids that need 16 bits."""

    vocab_size, eos_token_id = 300, 299

    def encode_bytes(self, data):
        return np.frombuffer(data, dtype=np.uint8).astype(np.int64) + 40


@pytest.mark.parametrize("tokenizer", [None, ByteTokenizer(), DNATokenizer(), _Shifted()])
def test_encoding_equals_the_tokenizer(tokenizer):
    encoding = TokenEncoding(tokenizer)
    data = b"ACGTNacgt" * 20 if isinstance(tokenizer, DNATokenizer) else bytes(range(1, 256))
    wanted = np.frombuffer(data, dtype=np.uint8) if tokenizer is None else tokenizer.encode_bytes(data)
    ids = encoding.encode(data, "text")
    assert ids.dtype == encoding.dtype and (ids == wanted).all()
    assert len(encoding.encode(b"", "text")) == 0


def test_bytes_that_have_no_id_or_that_of_the_end():
    for tokenizer in (None, ByteTokenizer()):
        with pytest.raises(ValueError, match="text holds token id 0"):
            TokenEncoding(tokenizer).encode(b"a\0b", "text")
        assert TokenEncoding(tokenizer, binary=True).encode(b"a\0b", "text").tolist() == [97, 0, 98]
