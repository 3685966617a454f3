"""Files that expand without end, and documents without end, are refused at a stated size."""

import gzip
import json
import os

import numpy as np
import pytest

from hf_recurrent.data import decompression, readers
from hf_recurrent.data.decompression import read_chunks
from hf_recurrent.data.loading import load_corpus
from hf_recurrent.data.pixel_readers import read_idx


@pytest.fixture
def load(tmp_path):
    return lambda source, **options: load_corpus(source, cache_dir=tmp_path / "cache", **options)


@pytest.fixture
def small(monkeypatch):
    """Files may expand to a megabyte, or to 100 times their size."""
    monkeypatch.setattr(decompression, "_ALWAYS_ALLOWED", 1 << 20)
    monkeypatch.setattr(decompression, "_LARGEST_RATIO", 100)


def compressed(data, suffix):
    if suffix == ".gz":
        return gzip.compress(data)
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_expands_without_end_is_refused(load, small, tmp_path, suffix):
    bomb, text = tmp_path / f"bomb.txt{suffix}", tmp_path / f"log.txt{suffix}"
    bomb.write_bytes(compressed(b" " * (3 << 20), suffix))
    with pytest.raises(
        ValueError, match=rf"bomb\.txt\{suffix} is refused: its [\d,]+ bytes expand to more than 1,048,576"
    ):
        load(bomb)
    assert not list((tmp_path / "cache").glob("*.incomplete"))
    lines = b"".join(b"%d is a line of a log\n" % number for number in range(100_000))
    text.write_bytes(compressed(lines, suffix))
    assert load(text).num_bytes == len(lines) > 1 << 20
    with pytest.raises(ValueError, match="is refused"):
        list(read_chunks(bomb))


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_expands_needs_little_memory(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(decompression, "_ALWAYS_ALLOWED", 1 << 27)
    monkeypatch.setattr(decompression, "_LARGEST_RATIO", 50)
    path = tmp_path / f"bomb{suffix}"
    # For Zstandard, 13 kilobytes that one call could unpack to 400 MiB.
    with gzip.open(path, "wb", 1) if suffix == ".gz" else pytest.importorskip("zstandard").open(path, "wb") as file:
        for _ in range(400):
            file.write(bytes(1 << 20))
    before, most, largest = anonymous_memory(), 0, 0
    with pytest.raises(ValueError, match="expand to more than 134,217,728"):
        for chunk in read_chunks(path):
            most, largest = max(most, anonymous_memory() - before), max(largest, len(chunk))
    assert most < 100e6 and largest <= 1 << 20


def test_gzip_files_of_several_members(tmp_path):
    path = tmp_path / "members.gz"
    members = [gzip.compress(b"one"), gzip.compress(b""), gzip.compress(bytes(3 << 20)), gzip.compress(b"four")]
    content = b"one" + bytes(3 << 20) + b"four"
    path.write_bytes(b"".join(members))
    assert b"".join(read_chunks(path)) == content
    path.write_bytes((bytes(70_000)).join(members) + bytes(9))  # padded with zeros, as on tapes
    assert b"".join(read_chunks(path)) == content
    for damaged in (b"".join(members)[:-1], b"".join(members) + b"x", bytes(9) + members[0], members[0][:5]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged, not a whole gzip file"):
            list(read_chunks(path))


def anonymous_memory():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def test_a_json_line_without_end_is_refused(load, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LARGEST_DOCUMENT", 3 << 20)
    allowed = json.dumps({"text": "x" * (2 << 20)})
    (tmp_path / "a.jsonl").write_text(f"{allowed}\n{allowed}")
    assert load(tmp_path / "a.jsonl").num_bytes == 4 << 20
    (tmp_path / "a.jsonl").write_text(f'{allowed}\n{{"text": "{"x" * (4 << 20)}"}}')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2, is longer than 3,145,728 bytes; .* text files"):
        load(tmp_path / "a.jsonl")


def test_a_fasta_header_without_end_is_refused(load, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_LARGEST_HEADER", 1 << 21)
    (tmp_path / "a.fa").write_text(f">one\nACGT\n>{'x' * (1 << 20)}\nACGT\n")
    assert load(tmp_path / "a.fa").num_bytes == 8
    (tmp_path / "a.fa").write_text(f">one\nACGT\n>{'x' * (3 << 20)}\nACGT\n")
    with pytest.raises(ValueError, match=r"a\.fa is not FASTA: the header of record 2 is longer than 2,097,152 bytes"):
        load(tmp_path / "a.fa")
    # A sequence may be of any length, also in one line.
    (tmp_path / "a.fa").write_text(f">one\n{'ACGT' * (1 << 20)}\n")
    assert load(tmp_path / "a.fa").num_bytes == 4 << 20


def write_parquet(path, values, **options):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": values}), path, store_schema=False, **options)


def test_a_parquet_row_without_end_is_refused(load, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LARGEST_DOCUMENT", 1 << 20)
    write_parquet(tmp_path / "a.parquet", ["a", "b" * (2 << 20)], compression="zstd")
    with pytest.raises(ValueError, match=r"a\.parquet, row 1, is longer than 1,048,576 bytes"):
        load(tmp_path / "a.parquet")


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_equal_parquet_rows_are_read_a_few_at_a_time(tmp_path, monkeypatch, small):
    """A value of the dictionary that every row refers to."""
    arrow = pytest.importorskip("pyarrow")
    value = arrow.array(["x" * (8 << 20)])
    rows = arrow.DictionaryArray.from_arrays(arrow.array([0] * 100, arrow.int32()), value)
    write_parquet(tmp_path / "a.parquet", rows, compression="zstd")
    monkeypatch.setattr(readers, "_ROWS_AT_ONCE", 4)
    monkeypatch.setattr(decompression, "_ALWAYS_ALLOWED", 512 << 20)
    before, most, total = anonymous_memory(), 0, 0
    documents = readers.reader_of(tmp_path / "a.parquet", False)(tmp_path / "a.parquet", "text")
    with pytest.raises(ValueError, match="expand to more than 536,870,912"):
        for _, chunks in documents:
            total += sum(map(len, chunks))
            most = max(most, anonymous_memory() - before)
    assert total <= 512 << 20 and most < 200e6


def test_compressed_idx_files_are_bounded(small, tmp_path):
    def idx(array):
        header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
        return header + array.tobytes()

    digits = np.random.default_rng(0).integers(0, 256, (5, 28, 28), np.uint8)
    for content in (idx(digits), gzip.compress(idx(digits))):
        (tmp_path / "digits").write_bytes(content)
        assert np.array_equal(read_idx(tmp_path / "digits", 3), digits)
    (tmp_path / "digits").write_bytes(gzip.compress(idx(np.zeros((3000, 28, 28), np.uint8))))
    with pytest.raises(ValueError, match="expand to more than"):
        read_idx(tmp_path / "digits", 3)
    for content in (b"", b"\x1f\x8b", gzip.compress(b""), bytes([0, 0, 8, 3]), bytes([0, 0, 8, 3]) + b"\xff" * 12):
        (tmp_path / "digits").write_bytes(content)
        with pytest.raises(ValueError, match="digits"):
            read_idx(tmp_path / "digits", 3)
