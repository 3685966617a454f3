"""Sources of bytes: their chunks, and one clear sentence for each failure."""

import gzip
import itertools
import os
import socket
import threading

import pytest

from hf_recurrent import open_source
from hf_recurrent.online import sources
from hf_recurrent.online.sources import has_before

TEXT = bytes(range(256)) * 300


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(sources, "_MOMENT", 0.01)


def test_files_from_a_position_on(tmp_path):
    plain, packed = tmp_path / "a.bin", tmp_path / "a.bin.gz"
    plain.write_bytes(TEXT)
    packed.write_bytes(gzip.compress(TEXT))
    for path in (plain, packed):
        for start in (0, 1, 70_000, len(TEXT)):
            assert b"".join(open_source(path, start=start)) == TEXT[start:]
        with pytest.raises(OSError, match=f"has {len(TEXT):,} bytes, fewer than the {len(TEXT) + 1:,}"):
            open_source(path, start=len(TEXT) + 1)


def test_a_file_that_grows_is_followed(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one")
    source = open_source(path, follow=True, start=1)
    assert next(source) == b"ne"
    assert next(source) == b""
    with open(path, "ab") as file:
        file.write(b" two")
    assert next(source) == b" two"
    assert list(itertools.islice(source, 3)) == [b""] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(b"o"), "was truncated"),
        (lambda path: path.unlink(), "was removed"),
        (lambda path: os.replace(path.with_name("other"), path), "was replaced"),
    ],
)
def test_a_file_that_was_replaced_stops(change, message, tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one")
    (tmp_path / "other").write_bytes(b"another one")
    source = open_source(path, follow=True)
    assert next(source) == b"one"
    change(path)
    with pytest.raises(OSError, match=rf"{message}.*all of its data has been read.*tail -F"):
        next(source)


def test_what_was_appended_before_a_rotation_is_read(tmp_path, monkeypatch):
    path = tmp_path / "log"
    path.write_bytes(b"one")
    source = open_source(path, follow=True)
    assert next(source) == b"one"
    real = os.stat

    def rotate(name, *arguments, **options):  # between the end of the file and the question whether it was replaced
        if os.fspath(name) == os.fspath(path):
            monkeypatch.undo()
            monkeypatch.setattr(sources, "_MOMENT", 0.01)
            with open(path, "ab") as file:
                file.write(b" two")
            os.rename(path, tmp_path / "log.1")
            path.write_bytes(b"three")
        return real(name, *arguments, **options)

    monkeypatch.setattr(os, "stat", rotate)
    assert next(source) == b" two"
    with pytest.raises(OSError, match="was replaced"):
        next(source)


@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize("new", [b"other text " * 30_000, bytes(300_000)])
def test_a_file_that_was_truncated_and_grew_again_stops(new, follow, tmp_path):
    path = tmp_path / "log"
    path.write_bytes(TEXT)
    source = open_source(path, follow=follow)
    assert next(source) == TEXT[: 1 << 16]
    path.write_bytes(new)  # the same file, longer than what was read
    with pytest.raises(OSError, match=r"'.*log' was changed while it was read: .* before byte 65,536"):
        next(source)


# ---- Recognizing a file ----


@pytest.fixture(params=["", ".gz"])
def log(tmp_path, request):
    class Log:
        path = tmp_path / f"server.log{request.param}"

        def write(self, data):
            self.path.write_bytes(gzip.compress(data) if self.path.suffix == ".gz" else data)

    return Log()


@pytest.mark.parametrize("position", [1, 50, 4096, 5000, 70_000, len(TEXT)])
def test_a_file_is_recognized_by_what_was_read(log, position):
    log.write(TEXT)
    source = open_source(log.path)
    read = 0
    while read < position:
        read += len(next(source))
    identity = source.identity(position)
    assert identity.keys() == {"device", "inode", "digest"}
    for data in (TEXT, TEXT + b"more"):
        log.write(data)
        again = open_source(log.path, start=position, identity=identity)
        assert again.identity(position) == identity
        assert b"".join(again) == data[position:]
    for place in {0, position // 2 if position < 4096 else 4000, position - 1}:
        log.write(TEXT[:place] + bytes([TEXT[place] ^ 1]) + TEXT[place + 1 :])
        with pytest.raises(
            sources.ChangedSourceError, match=rf"other bytes before byte {position:,} .*it was changed"
        ):
            open_source(log.path, start=position, identity=identity)
    other = log.path.with_name("other")
    other.write_bytes(log.path.read_bytes())
    os.replace(other, log.path)
    with pytest.raises(sources.ChangedSourceError, match="was replaced by another file"):
        open_source(log.path, start=position, identity=identity)
    log.write(b"")
    with pytest.raises(sources.ChangedSourceError, match=f"has 0 bytes, fewer than the {position:,}"):
        open_source(log.path, start=position, identity=identity)


def test_a_copy_is_the_same_source(log, tmp_path):
    log.write(TEXT)
    source = open_source(log.path)
    next(source)
    identity = source.identity(100)
    os.replace(log.path, tmp_path / "old")
    log.path.write_bytes((tmp_path / "old").read_bytes())
    assert b"".join(open_source(log.path, start=100, identity=identity)) == TEXT[100:]


def test_only_files_have_an_identity(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert open_source(f"tcp://127.0.0.1:{server.getsockname()[1]}").identity(0) is None
    os.mkfifo(tmp_path / "pipe")
    assert open_source(tmp_path / "pipe").identity(0) is None


# ---- Other sources ----


def test_a_pipe_without_a_writer_can_time_out(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    source = open_source(tmp_path / "pipe", timeout=0.3)
    assert next(source) == b""
    with pytest.raises(TimeoutError, match="has stalled"):
        list(source)
    source = open_source(tmp_path / "pipe", follow=True)
    assert next(source) == b""
    for text in (b"one", b"two"):  # one writer after another
        (tmp_path / "pipe").write_bytes(text)
        assert next(chunk for chunk in source if chunk) == text


def test_no_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(OSError, match="standard input is closed"):
        open_source("-")


def test_a_named_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    thread = threading.Thread(target=lambda: path.write_bytes(b"through the pipe"))
    thread.start()
    assert b"".join(open_source(path)) == b"through the pipe"
    thread.join()


def test_a_socket_that_is_silent_and_breaks():
    with socket.create_server(("127.0.0.1", 0)) as server:
        name = f"tcp://localhost:{server.getsockname()[1]}"
        source = open_source(name)
        connection, _ = server.accept()
        assert next(source) == b""
        connection.sendall(b"hello")
        assert next(source) == b"hello"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close by a reset
        connection.close()
        with pytest.raises(OSError, match=r"The connection to the source .* broke"):
            list(source)
        source = open_source(name, timeout=0.03)
        connection, _ = server.accept()
        with pytest.raises(TimeoutError, match=r"has stalled: no byte arrived for 0\.03 seconds"):
            list(source)


def test_invalid_sources_are_rejected(tmp_path):
    (tmp_path / "a.gz").write_bytes(b"no gzip")
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(os.fspath(tmp_path / "socket"))
    for name, options, error, message in (
        (tmp_path / "none", {}, FileNotFoundError, "file not found"),
        (tmp_path, {}, IsADirectoryError, "a directory; it must be a file"),
        (tmp_path / "socket", {}, ValueError, "a Unix socket; it must be a file"),
        (tmp_path / "a.gz", {"follow": True}, ValueError, "must be a plain file"),
        ("udp://127.0.0.1:3", {}, ValueError, "it must be a file"),
        ("tcp://127.0.0.1:99999", {}, ValueError, "it must be a file"),
        ("tcp://192.0.2.1:80", {}, ValueError, "on another machine.*ssh -L 80"),
        ("-", {"start": 3}, ValueError, "`start` is 3"),
    ):
        with pytest.raises(error, match=message):
            open_source(name, **options)
    unix.close()
    with pytest.raises(ValueError, match="not a whole gzip file"):
        list(open_source(tmp_path / "a.gz"))


@pytest.mark.parametrize(("held", "expected"), [(b"abcd", True), (b"abcdef", True), (b"abc", False), (b"xxcy", False)])
def test_bytes_before_a_position(tmp_path, held, expected):
    path = tmp_path / "log"
    path.write_bytes(held)
    with path.open("rb") as file:
        assert has_before(file, 4, b"cd") is expected
        assert has_before(file, 4, b"") is (len(held) >= 4)  # nothing to compare: only truncation shows
