"""Following logs: rotation, truncation, incomplete and long lines, positions."""

import bz2
import gzip
import itertools
import lzma
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_recurrent.watch import log_sources
from hf_recurrent.watch.compressed_log import CompressedLog, RotatedLog, expand_logs, rotated_files
from hf_recurrent.watch.log_sources import LineSplitter, LogFile


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(log_sources, "_PATIENCE", 0.0)
    monkeypatch.setattr(log_sources, "_BETWEEN_LOOKS", 0.0)


def lines_of(source, polls=6, limit=1024):
    """The lines that are there now."""
    batches = [source.read_lines(limit) for _ in range(polls)]
    return [line for batch in batches if batch is not None for line in batch.contents]


def append(path, data):
    with open(path, "ab") as file:
        file.write(data)


def taken(splitter, limit):
    """(number, offset, content, full length of a cut line) of the lines that are there."""
    found = []
    while (batch := splitter.take(limit)) is not None:
        offset = batch.offset
        for index, content in enumerate(batch.contents):
            found.append((batch.number + index, offset, content, batch.cut.get(index)))
            offset += batch.lengths[index]
        assert (splitter.number, splitter.offset) == (batch.number + len(batch.contents), offset)
    return found


_PIECES = st.sampled_from([b"a", b"bc", b"\r", b"\n", b"\r\n", b"\x00\xff", b"long line", b"\n\n"])


@settings(max_examples=300, deadline=None)
@given(st.lists(_PIECES, max_size=40).map(b"".join), st.lists(st.integers(0, 80), max_size=6), st.integers(1, 5))
def test_lines_do_not_depend_on_the_chunks(data, cuts, limit):
    expected, offset = [], 0
    for number, line in enumerate(data.split(b"\n"), 1):
        content = line.removesuffix(b"\r")
        if line or offset + len(line) < len(data):
            expected.append((number, offset, content[:6], len(content) if len(content) > 6 else None))
        offset += len(line) + 1
    splitter, found, places = LineSplitter(6), [], [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(places):
        splitter.feed(data[begin:end])
        found += taken(splitter, limit)
    splitter.finish()
    assert found + taken(splitter, limit) == expected


def test_a_long_line_is_cut_and_counted():
    splitter = LineSplitter(4)
    for _ in range(1000):
        splitter.feed(b"x" * 1000)
    splitter.feed(b"\nnext\n")
    assert taken(splitter, 9) == [(1, 0, b"xxxx", 1_000_000), (2, 1_000_001, b"next", None)]


def test_a_line_waits_for_its_end(tmp_path):
    path = tmp_path / "a.log"
    append(path, b"one\ntw")
    source = LogFile(path, 100)
    assert lines_of(source) == [b"one"]
    append(path, b"o\n")
    assert lines_of(source) == [b"two"]
    assert source.lag() == 0 and not source.is_finished


def test_without_following_the_last_line_needs_no_end(tmp_path):
    path = tmp_path / "a.log"
    append(path, b"one\ntwo")
    source = LogFile(path, 100, follow=False)
    assert lines_of(source) == [b"one", b"two"]
    assert source.is_finished


def test_history_begins_with_a_whole_line(tmp_path):
    path = tmp_path / "a.log"
    append(path, b"".join(b"line %d\n" % number for number in range(1, 8)))
    source = LogFile(path, 100, history=17)
    batch = source.read_lines(1)
    assert (batch.contents, batch.number, batch.offset) == ([b"line 5"], 5, 28)


def test_rotation_by_renaming(tmp_path):
    path = tmp_path / "a.log"
    append(path, b"one\n")
    source = LogFile(path, 100)
    assert lines_of(source) == [b"one"]
    os.rename(path, tmp_path / "a.log.1")
    append(tmp_path / "a.log.1", b"written late\nno end")
    append(path, b"new\n")
    assert lines_of(source) == [b"written late", b"no end", b"new"]
    assert source.position()["offset"] == 4
    assert any("rotated" in notice for notice in source.notices)


@pytest.mark.parametrize("new", [b"new\n", b"something longer than before\n"])
def test_truncation(tmp_path, new):
    path = tmp_path / "a.log"
    append(path, b"one\ntwo\n")
    source = LogFile(path, 100)
    assert lines_of(source) == [b"one", b"two"]
    path.write_bytes(new)
    assert lines_of(source) == [new.rstrip()]
    assert source.notices == [
        f"{path} was truncated; lines that were not read yet are lost. Reading from its beginning"
    ]


def test_a_file_that_does_not_exist_yet_and_is_removed(tmp_path):
    path = tmp_path / "a.log"
    source = LogFile(path, 100)
    assert lines_of(source) == [] and source.notices == [f"{path} does not exist; waiting for it"]
    append(path, b"one\n")
    assert lines_of(source) == [b"one"]
    path.unlink()
    assert lines_of(source) == []
    append(path, b"two\n")
    assert lines_of(source) == [b"two"]


def test_a_file_that_must_exist(tmp_path):
    with pytest.raises(OSError, match=r"The log '.*b\.log' cannot be read: No such file"):
        LogFile(tmp_path / "b.log", 100, follow=False)


@pytest.mark.parametrize("is_rotated", [False, True])
def test_a_position_continues_after_the_line_given_last(tmp_path, is_rotated):
    path = tmp_path / "a.log"
    append(path, b"one\ntwo\nthree\n")
    source = LogFile(path, 100)
    source.read_lines(2)
    position = source.position()
    if is_rotated:
        os.rename(path, tmp_path / "a.log.1")
        append(path, b"four\n")
    continued = LogFile(path, 100, position=position)
    expected = [b"three", b"four"] if is_rotated else [b"three"]
    assert lines_of(continued) == expected
    assert position["line"] == 3


def test_a_position_in_a_file_that_is_gone(tmp_path):
    path = tmp_path / "a.log"
    append(path, b"one\ntwo\n")
    source = LogFile(path, 100)
    source.read_lines(1)
    position = source.position()
    path.write_bytes(b"ONE\nTWO\n")
    continued = LogFile(path, 100, position=position)
    assert lines_of(continued) == [b"ONE", b"TWO"]
    assert "not the file that was read before" in continued.notices[0]


TEXT = b"".join(b"line %d\n" % number for number in range(1, 1001))


@pytest.mark.parametrize(("ending", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_compressed_logs(tmp_path, ending, compress):
    path = str(tmp_path / f"a.log.{ending}")
    with open(path, "wb") as file:
        file.write(compress(TEXT))
    source = CompressedLog(path, 100)
    first = source.read_lines(300).contents
    rest = CompressedLog(path, 100, source.position())
    assert first + lines_of(rest) == TEXT.splitlines()
    assert rest.is_finished and not rest.notices
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) - 20)
    damaged = CompressedLog(path, 100)
    found = lines_of(damaged)
    assert TEXT.splitlines()[: len(found)] == found and damaged.is_finished
    assert "is damaged" in damaged.notices[0]


def test_patterns_name_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.log", "a.log", "c.txt"):
        append(name, b"x\n")
    assert expand_logs(["*.log", "c.txt", "-", "d.log"]) == ["a.log", "b.log", "c.txt", "-", "d.log"]
    with pytest.raises(ValueError, match=r"`LOG` is '\*\.none', which no file matches"):
        expand_logs(["*.none"])


def test_rotated_files_are_read_oldest_first(tmp_path):
    path = str(tmp_path / "a.log")
    with open(f"{path}.2.gz", "wb") as file:
        file.write(gzip.compress(b"one\ntwo\n"))
    append(f"{path}.1", b"three\nfour\n")
    append(f"{path}-20240501", b"zero\n")
    append(f"{path}.old", b"not this\n")
    append(path, b"five\n")
    assert [name.removeprefix(path) for name in rotated_files(path)] == ["-20240501", ".2.gz", ".1"]
    words = [b"zero", b"one", b"two", b"three", b"four", b"five"]
    assert lines_of(RotatedLog(path, 100, follow=False), 20) == words
    for count in range(1, 6):
        source, found = RotatedLog(path, 100, follow=False), []
        while len(found) < count:
            found += source.read_lines(1).contents
        continued = RotatedLog(path, 100, follow=False, position=source.position())
        assert found + lines_of(continued, 20) == words
        assert continued.is_finished


def test_a_rotated_log_is_followed(tmp_path):
    path = str(tmp_path / "a.log")
    append(f"{path}.1", b"one\n")
    append(path, b"two\n")
    source = RotatedLog(path, 100)
    assert lines_of(source) == [b"one", b"two"]
    append(path, b"three\n")
    assert lines_of(source) == [b"three"] and not source.is_finished
