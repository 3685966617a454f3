"""Following logs: rotation, truncation, incomplete and long lines, positions."""

import os

import pytest

from hf_recurrent.watch import log_sources
from hf_recurrent.watch.journal import journal_text
from hf_recurrent.watch.log_lines import LineSplitter
from hf_recurrent.watch.log_sources import LogFile


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(log_sources, "_PATIENCE", 0.0)
    monkeypatch.setattr(log_sources, "_BETWEEN_LOOKS", 0.0)


def lines_of(source, polls=6):
    """The lines that are there now."""
    found = [source.next_line() for _ in range(polls)]
    return [line.content for line in found if line is not None]


def append(path, data):
    with open(path, "ab") as file:
        file.write(data)


def split(splitter, chunk):
    splitter.feed(chunk)
    return list(iter(splitter.next_line, None))


def test_lines_do_not_depend_on_the_chunks():
    data = b"first\n\nthird \xff\x00\r\nlast"
    whole = split(LineSplitter(100), data)
    splitter, pieces = LineSplitter(100), []
    for byte in data:
        pieces += split(splitter, bytes([byte]))
    assert pieces == whole
    assert [line.content for line in whole] == [b"first", b"", b"third \xff\x00\r"]
    assert [(line.number, line.offset) for line in whole] == [(1, 0), (2, 6), (3, 7)]
    assert (splitter.number, splitter.offset) == (4, 17)
    assert splitter.finish() and splitter.next_line().content == b"last"
    assert (splitter.number, splitter.offset) == (5, 21)
    assert splitter.next_line() is None and not splitter.finish()


def test_a_long_line_is_cut_and_counted():
    splitter = LineSplitter(4)
    lines = [line for _ in range(1000) for line in split(splitter, b"x" * 1000)] + split(splitter, b"\nnext\n")
    assert [(line.content, line.length) for line in lines] == [(b"xxxx", 1_000_000), (b"next", 4)]
    assert lines[1].offset == 1_000_001


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
    line = source.next_line()
    assert (line.content, line.number, line.offset) == (b"line 5", 5, 28)


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
    assert source.notices == [f"{path} was truncated; reading from its beginning"]


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
    source.next_line(), source.next_line()
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
    source.next_line()
    position = source.position()
    path.write_bytes(b"ONE\nTWO\n")
    continued = LogFile(path, 100, position=position)
    assert lines_of(continued) == [b"ONE", b"TWO"]
    assert "not the file that was read before" in continued.notices[0]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"MESSAGE":"a","__CURSOR":"1","_COMM":"sh"}', b"sh: a"),
        (b'{"MESSAGE":[104,105,255],"__CURSOR":"1"}', b"hi\xff"),
        (b'{"MESSAGE":null,"__CURSOR":"1","_COMM":"sh"}', b"sh"),
        (b'{"MESSAGE":["a","b"],"__CURSOR":"1"}', b"a"),
        (b'{"message": "of another program"}', None),
        (b'{"MESSAGE": "cut', None),
        (b"plain text", None),
    ],
)
def test_entries_of_the_journal(line, text):
    assert journal_text(line) == text
