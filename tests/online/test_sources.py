"""Sources of bytes: their chunks, and one clear sentence for each failure."""

import gzip
import itertools
import os
import socket
import threading

import pytest

from hf_recurrent import open_source
from hf_recurrent.online import sources

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
        with pytest.raises(OSError, match=f"has {len(TEXT)} bytes, fewer than the {len(TEXT) + 1}"):
            list(open_source(path, start=len(TEXT) + 1))


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
        (lambda path: path.unlink(), "was replaced or removed"),
        (lambda path: os.replace(path.with_name("other"), path), "was replaced or removed"),
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
    for name, options, error, message in (
        (tmp_path, {}, FileNotFoundError, "file not found"),
        (tmp_path / "a.gz", {"follow": True}, ValueError, "must be a plain file"),
        ("udp://127.0.0.1:3", {}, ValueError, "it must be a file"),
        ("tcp://127.0.0.1:99999", {}, ValueError, "it must be a file"),
        ("tcp://192.0.2.1:80", {}, ValueError, "on another machine.*ssh -L 80"),
        ("-", {"start": 3}, ValueError, "`start` is 3"),
    ):
        with pytest.raises(error, match=message):
            open_source(name, **options)
    with pytest.raises(ValueError, match="not a whole gzip file"):
        list(open_source(tmp_path / "a.gz"))
