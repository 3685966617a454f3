"""Damage of a packed corpus is noticed, and the corpus is packed again."""

import errno
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil

import pytest

from hf_recurrent.data import packing
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.loading import load_corpus

DOCUMENTS = ["Once upon a time.", "The cat sat.", "End"]


@pytest.fixture
def load(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return lambda: load_corpus(tmp_path / "a.jsonl", cache_dir=tmp_path / "cache")


@pytest.fixture
def packed(load, tmp_path):
    load()
    (directory,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    return directory


@pytest.fixture
def runs(monkeypatch):
    real, runs = packing._pack, []
    monkeypatch.setattr(packing, "_pack", lambda *arguments: runs.append(1) or real(*arguments))
    return runs


def contents(corpus):
    return [episode.tobytes().decode() for episode in corpus]


def flip(path, byte, bit):
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.npy", "corpus.json"])
def test_no_flipped_bit_is_used(load, packed, name):
    original, source = (packed / name).read_bytes(), random.Random(0)
    for place in source.sample(range(len(original)), min(len(original), 40)):
        flip(packed / name, place, source.randrange(8))
        assert contents(load()) == DOCUMENTS


def test_a_flipped_bit_is_reported_once(load, packed, runs, caplog):
    caplog.set_level(logging.WARNING)
    flip(packed / "tokens.bin", 20, 0)
    assert contents(load()) == DOCUMENTS and runs == [1]
    (record,) = caplog.records
    assert "is damaged and packed again" in record.message and "tokens.bin" in record.message
    assert contents(load()) == DOCUMENTS and runs == [1] and len(caplog.records) == 1


def test_a_flipped_bit_with_the_same_time_is_noticed(load, packed, runs):
    before = os.stat(packed / "tokens.bin")
    flip(packed / "tokens.bin", 3, 1)
    os.utime(packed / "tokens.bin", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert contents(load()) == DOCUMENTS and runs == [1]


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.npy", "corpus.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "longer", "a directory"])
def test_incomplete_files_are_replaced(load, packed, runs, name, damage):
    path = packed / name
    data = path.read_bytes()
    path.unlink()
    if damage == "a directory":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes({"empty": b"", "truncated": data[:-3], "longer": data + b"\0" * 8}[damage])
    assert contents(load()) == DOCUMENTS
    assert len(runs) == 1


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "7",
        '"corpus"',
        "null",
        "{}",
        "[" * 100_000,
        '{"format": 1e400}',
        "9" * 5000,
        '{"format": 1, "dtype": "O", "num_bytes": 3, "num_episodes": 1, "vocab_size": 256, "end_token_id": 0}',
    ],
)
def test_hostile_metadata_is_replaced(load, packed, runs, text):
    (packed / "corpus.json").write_text(text)
    assert contents(load()) == DOCUMENTS and len(runs) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 7),
        ("vocab_size", -256),
        ("vocab_size", "256"),
        ("vocab_size", True),
        ("end_token_id", None),
        ("end_token_id", 256),
        ("end_token_id", 1.5),
        ("num_bytes", -1),
        ("num_bytes", 2**70),
        ("num_episodes", 0),
        ("num_episodes", float("nan")),
        ("dtype", "<u2"),
        ("dtype", "|O"),
        ("dtype", ["a", 1]),
        ("format", 2),
        ("fingerprint", None),
        ("fingerprint", "0" * 32),
    ],
)
def test_wrong_metadata_is_replaced(load, packed, runs, name, value):
    metadata = json.loads((packed / "corpus.json").read_text())
    (packed / "corpus.json").write_text(json.dumps(metadata | {name: value}))
    corpus = load()
    assert (contents(corpus), corpus.vocab_size, corpus.end_token_id) == (DOCUMENTS, 256, 0)
    assert len(runs) == 1


def test_the_checksum_is_computed_once_for_unchanged_files(load, packed, runs, monkeypatch):
    real, reads = packing.content_fingerprint, []
    monkeypatch.setattr(packing, "content_fingerprint", lambda *given: reads.append(1) or real(*given))
    load()
    assert not reads  # packing computed it
    (packed / "verified.json").unlink()  # as in a corpus of an earlier version
    load()
    load()
    assert len(reads) == 1 and not runs
    for text in ("[" * 100_000, "{", "[]", json.dumps({"tokens.bin": "old"})):
        (packed / "verified.json").write_text(text)
        assert contents(load()) == DOCUMENTS
    assert len(reads) == 5 and not runs
    shutil.copytree(packed, packed.with_name("copy"))
    Corpus.open(packed.with_name("copy"), "copy")
    assert len(reads) == 6


def test_a_corpus_that_cannot_be_written_to_is_verified_and_used(load, packed, monkeypatch):
    (packed / "verified.json").unlink()

    def refuse(*arguments):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(packing, "write_json", refuse)
    assert contents(load()) == DOCUMENTS


def test_fingerprints_are_those_of_earlier_versions(load):
    assert load().fingerprint == "7a96f6e41fad7eac39584bd7735b44a4"


def test_a_damaged_corpus_whose_source_fails_is_kept(load, packed, tmp_path):
    flip(packed / "tokens.bin", 0, 0)
    damaged = (packed / "tokens.bin").read_bytes()
    before = os.stat(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(b"x" * before.st_size)
    os.utime(tmp_path / "a.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        load()
    assert (packed / "tokens.bin").read_bytes() == damaged
    assert not list(tmp_path.rglob("*.incomplete"))


# ---- Links ----


def test_nothing_is_written_through_links(load, packed, tmp_path, runs):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "tokens.bin").write_bytes(b"mine")
    shutil.rmtree(packed)
    packed.symlink_to(outside)
    assert contents(load()) == DOCUMENTS and runs == [1]
    assert not packed.is_symlink() and [path.name for path in outside.iterdir()] == ["tokens.bin"]
    assert (outside / "tokens.bin").read_bytes() == b"mine"


def test_a_link_instead_of_the_lock_is_refused(load, packed, tmp_path):
    (tmp_path / "letter").write_text("dear")
    lock = packed.with_name(f"{packed.name}.lock")
    lock.unlink()
    lock.symlink_to(tmp_path / "letter")
    with pytest.raises(ValueError, match=r"\.lock is a link; remove it"):
        load()
    assert (tmp_path / "letter").read_text() == "dear"


def test_a_corpus_moved_to_another_disk_is_used(load, packed, tmp_path, runs):
    shutil.move(packed, tmp_path / "moved")
    packed.symlink_to(tmp_path / "moved")
    assert contents(load()) == DOCUMENTS and not runs


# ---- Full disks ----


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_a_full_disk_is_one_sentence(load, tmp_path, monkeypatch, code):
    def fail(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(packing, "_write_offsets", fail)
    with pytest.raises(OSError, match=rf"cannot be packed in '.*cache': {os.strerror(code)}; .*`cache_dir`\.$"):
        load()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def _pack_limited(path, cache, limit, queue):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        load_corpus(path, cache_dir=cache)
    except OSError as error:
        queue.put(str(error))


@pytest.mark.parametrize("limit", [1000, 100_000])
def test_a_limited_file_size_is_one_sentence(tmp_path, limit):
    """The smaller limit stops the tokens, the larger the offsets, which are larger than the tokens here."""
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' * 20_000)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_pack_limited, args=(tmp_path / "a.jsonl", tmp_path / "cache", limit, queue))
    process.start()
    assert "cannot be packed in" in queue.get(timeout=60)
    process.join()
    assert process.exitcode == 0
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_leftovers_are_removed(load, packed):
    """The lock is held here, so no living process writes to them."""
    leftovers = [packed.with_name(f"{packed.name}.{name}.incomplete") for name in ("empty", "full")]
    for leftover in leftovers:
        leftover.mkdir()
    (leftovers[1] / "tokens.bin").write_bytes(b"x")
    (packed / "corpus.json").unlink()
    load()
    assert not any(leftover.exists() for leftover in leftovers)
