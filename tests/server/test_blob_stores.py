"""Stores that processes share: each backend alike, bounded, damaged, and dead; a real Redis where there is one."""

import errno
import os
import shutil
import socket
import subprocess
import threading
import time

import fsspec
import pytest
from running_server import Client, running_server

from hf_recurrent.server import blob_stores
from hf_recurrent.server.blob_stores import FsspecBlobs, MemoryBlobs, SafeBlobs, open_blobs

_REDIS = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(not _REDIS, reason="redis-server is not installed")


def start_redis(port: int) -> subprocess.Popen:
    redis = pytest.importorskip("redis")
    command = [_REDIS, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port)
    for _ in range(500):
        try:
            client.ping()
            return process
        except redis.ConnectionError:
            time.sleep(0.02)
    process.kill()
    raise AssertionError("redis-server did not start")


@pytest.fixture(scope="module")
def redis_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = start_redis(port)
    yield port
    process.kill()
    process.wait()


@pytest.fixture(params=["memory", "directory", "fsspec", pytest.param("redis", marks=needs_redis)])
def address(request, tmp_path):
    if request.param == "redis":
        redis = pytest.importorskip("redis")

        port = request.getfixturevalue("redis_port")
        redis.Redis(port=port).flushall()
        return f"redis://127.0.0.1:{port}/0"
    fsspec.filesystem("memory").store.clear()
    return {"memory": None, "directory": str(tmp_path / "a" / "b"), "fsspec": "memory://states"}[request.param]


def test_pieces_come_back(address):
    blobs = open_blobs(address, 1 << 20)
    assert blobs.get(["responses/a"]) == {} and blobs.get([]) == {} and not blobs.delete("responses/a")
    assert blobs.put("responses/a", b"1") and blobs.put("responses/b", b"") and blobs.put("prefixes/a", b"\0\xff")
    assert blobs.put("responses/a", b"2")
    names = ["responses/a", "responses/b", "responses/c", "prefixes/a"]
    assert blobs.get(names) == {"responses/a": b"2", "responses/b": b"", "prefixes/a": b"\0\xff"}
    assert blobs.delete("responses/a") and blobs.get(names).keys() == {"responses/b", "prefixes/a"}
    if address is not None:  # another process
        assert open_blobs(address, 1 << 20).get(["prefixes/a"]) == {"prefixes/a": b"\0\xff"}
    assert blobs.failures == 0


def test_the_oldest_pieces_leave(address):
    blobs = open_blobs(address, 20_000)
    for number in range(60):
        assert blobs.put(f"states/{number:02}", bytes(1000))
        if address and "redis" not in address:
            time.sleep(0.002)  # files have times
    found = blobs.get([f"states/{number:02}" for number in range(60)])
    assert 8 <= len(found) <= 20 and "states/59" in found and "states/00" not in found


def test_several_threads_write_the_same_pieces(address):
    blobs = open_blobs(address, 1 << 20)

    def work(number: int) -> None:
        for name in range(10):
            blobs.put(f"states/{name}", bytes([number]) * 500)
            assert all(len({*data}) == 1 and len(data) == 500 for data in blobs.get([f"states/{name}"]).values())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(blobs.get([f"states/{name}" for name in range(10)])) == 10 and blobs.failures == 0


def test_a_piece_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def fail(*paths):
        raise OSError(errno.ENOSPC, "No space left on device")

    store = FsspecBlobs(str(tmp_path), 1 << 20)
    store.put("states/a", b"1")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(blob_stores.os, "replace", fail)
        store.put("states/a", b"2")
    assert store.get(["states/a"]) == {"states/a": b"1"}
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a"]


def test_damaged_pieces_count_as_none(tmp_path):
    store = MemoryBlobs(1 << 20)
    blobs = SafeBlobs(store)
    blobs.put("a", b"content")
    data = store.get(["a"])["a"]
    damaged = [
        data[:-1],
        data + b"x",
        b"",
        *(data[:k] + bytes([data[k] ^ 1]) + data[k + 1 :] for k in range(len(data))),
    ]
    for wrong in damaged:
        store.put("a", wrong)
        assert blobs.get(["a"]) == {}
    store.put("b", data)  # of another name
    assert blobs.get(["b"]) == {} and blobs.failures == len(damaged) + 1
    folder = FsspecBlobs(str(tmp_path), 1 << 20)
    SafeBlobs(folder).put("states/a", b"content")
    (path,) = tmp_path.glob("states/*/*")
    path.write_bytes(path.read_bytes()[:10])  # as after a power failure
    assert SafeBlobs(folder).get(["states/a"]) == {}


class Dead:
    def __getattr__(self, name):
        def fail(*arguments):
            raise ConnectionError("gone")

        return fail


def test_a_dead_store_is_asked_again_after_a_while(monkeypatch, caplog):
    now = [1000.0]
    monkeypatch.setattr(blob_stores.time, "monotonic", lambda: now[0])
    store = MemoryBlobs(1 << 20)
    blobs = SafeBlobs(Dead())
    assert (blobs.get(["a"]), blobs.put("a", b""), blobs.delete("a"), blobs.failures) == ({}, False, False, 3)
    assert len(caplog.records) == 1
    blobs._store = store
    assert not blobs.put("a", b"")  # too early
    now[0] += 11
    assert blobs.put("a", b"") and blobs.get(["a"]) == {"a": b""}


def test_unknown_addresses_and_missing_libraries(monkeypatch):
    with pytest.raises(ValueError, match="nosuch"):
        open_blobs("nosuch://x", 1)
    import sys

    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ImportError, match=r"hf-recurrent\[redis\]"):
        open_blobs("redis://user:secret@host", 1)


# ---- Servers


def turn(client: Client, prompt: str, **arguments) -> tuple[str, int]:
    found = client.complete(prompt=prompt, max_tokens=20, temperature=0, **arguments)
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def shared(address: str):
    return running_server(options={"store": address, "prefix_bytes": 1 << 20})


def wait_for_writer(server: Client) -> None:
    while not server.scheduler.reuse.shared._waiting.empty():
        time.sleep(0.01)
    time.sleep(0.1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("address", ["directory", "fsspec", pytest.param("redis", marks=needs_redis)], indirect=True)
def test_servers_start_from_each_others_states(address):
    text = "It was a dark night, and the rain fell in torrents. " * 8
    with shared(address) as first, shared(address) as second:
        answer, cached = turn(first, text)
        assert cached == 0
        wait_for_writer(first)
        assert turn(second, text) == (answer, len(text) - 1)
        longer = text + "And then?"
        found, cached = turn(second, longer)
        assert cached >= len(text) - 1
        assert turn(second, text, cache_salt="other")[1] == 0  # of another client
    with running_server(options={"prefix_bytes": 0}) as cold:
        assert turn(cold, longer)[0] == found


@needs_redis
def test_answers_do_not_need_the_store():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = start_redis(port)
    text = "It was a dark night, and the rain fell in torrents. " * 3
    try:
        with shared(f"redis://127.0.0.1:{port}/0") as server:
            answer, _ = turn(server, text)
            process.kill()
            process.wait()
            assert turn(server, text, cache_salt="other")[0] == answer
            assert turn(server, text)[0] == answer
            wait_for_writer(server)
            metrics = server.request("GET", "/metrics").body.decode()
            (line,) = (line for line in metrics.splitlines() if line.startswith("hf_recurrent_store_failures_total"))
            assert float(line.split()[1]) > 0
    finally:
        process.kill()
        process.wait()


def test_a_directory_that_cannot_be_written_costs_no_answer(tmp_path):
    with shared(str(tmp_path / "store")) as server:
        shutil.rmtree(tmp_path / "store")
        (tmp_path / "store").touch()
        assert turn(server, "It was a dark night. " * 5)[0]
        wait_for_writer(server)
        assert server.scheduler.responses.blobs.failures > 0
    assert os.path.isfile(tmp_path / "store")
