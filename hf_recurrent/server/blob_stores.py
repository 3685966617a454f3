"""Named pieces of data that several processes or machines share: a directory, any address of fsspec, or Redis.

All of it can be lost without harm to an answer, so a store that fails costs what it had, and nothing else: the first
failure is logged, all are counted, and a store that is down is asked again only after a while. Pieces have checksums.
"""

import hashlib
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from hf_recurrent.argument_checks import import_optional

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 10.0
_REDIS_SECONDS = 1.0
_CHECKSUM_BYTES = 16
_KEPT = 0.9  # share of the bytes that is left when old pieces are deleted
_Result = TypeVar("_Result")


class MemoryBlobs:
    """Pieces in memory. The methods of all stores are used by several threads, and may raise any Exception."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self._bytes, self._lock = max_bytes, 0, threading.Lock()
        self._blobs: OrderedDict[str, bytes] = OrderedDict()

    def get(self, names: Sequence[str]) -> dict[str, bytes]:
        """The pieces of these names that are there."""
        with self._lock:
            found = {name: self._blobs[name] for name in names if name in self._blobs}
            for name in found:
                self._blobs.move_to_end(name)
            return found

    def put(self, name: str, data: bytes) -> None:
        """Write a piece; the oldest ones are deleted where there is no room."""
        self.delete(name)
        with self._lock:
            self._blobs[name] = data
            self._bytes += len(data)
            while self._bytes > self._max_bytes:
                self._bytes -= len(self._blobs.popitem(last=False)[1])

    def delete(self, name: str) -> bool:
        """Delete a piece; False if there was none."""
        with self._lock:
            data = self._blobs.pop(name, None)
            self._bytes -= len(data or b"")
            return data is not None


class FsspecBlobs:
    """Pieces as files of a file system of fsspec. Other processes may make them a little more than `max_bytes`."""

    def __init__(self, address: str, max_bytes: int):
        import fsspec

        self._files, root = fsspec.url_to_fs(address)
        self._root, self._max_bytes, self._bytes = root.rstrip("/"), max_bytes, None
        self._is_local = "file" in self._files.protocol
        self._lock = threading.Lock()
        if self._is_local:
            os.makedirs(self._root, exist_ok=True)

    def get(self, names: Sequence[str]) -> dict[str, bytes]:
        if self._is_local:
            return {name: data for name in names if (data := _content(self._path(name))) is not None}
        paths = {self._path(name): name for name in names}
        found = self._files.cat(list(paths), on_error="omit") if paths else {}
        return {paths[path]: data for path, data in found.items() if path in paths}

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        if self._is_local:
            _replace(path, data)
        else:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, data)
        with self._lock:
            if self._bytes is not None:
                self._bytes += len(data)
            if self._bytes is None or self._bytes > self._max_bytes:
                self._shrink()

    def delete(self, name: str) -> bool:
        try:
            self._files.rm_file(self._path(name))
        except FileNotFoundError:
            return False
        return True

    def _path(self, name: str) -> str:
        folder, _, last = name.partition("/")
        return f"{self._root}/{folder}/{last[-2:]}/{last.replace('/', '-')}"

    def _shrink(self) -> None:
        """Count the bytes; if they are too many, delete the oldest files."""
        self._files.invalidate_cache()
        found = [info for info in self._files.find(self._root, detail=True).values() if info["type"] == "file"]
        self._bytes = sum(info["size"] for info in found)
        if self._bytes <= self._max_bytes:
            return
        found.sort(key=_written)
        while found and self._bytes > _KEPT * self._max_bytes:
            info = found.pop(0)
            self._bytes -= info["size"]
            self._files.rm_file(info["name"])


def _replace(path: str, data: bytes) -> None:
    """Write a local file at once.

    `atomic_file` is for one writer, and waits for the disk; here several processes write the same file, each under a
    name of its own, and may lose it in a power failure. The transactions of fsspec move files from the directory of
    the system's temporary ones, which may be on another disk, so that readers would see a part.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    partial = f"{path}.{secrets.token_hex(8)}.partial"
    try:
        with open(partial, "xb") as file:
            file.write(data)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.remove(partial)
        raise


class RedisBlobs:
    """Pieces in Redis, with an index of when each was last used. A piece and the index change together."""

    _PUT = """
    local before = redis.call('STRLEN', KEYS[1])
    redis.call('SET', KEYS[1], ARGV[1])
    redis.call('ZADD', KEYS[2], ARGV[2], KEYS[1])
    local bytes = redis.call('INCRBY', KEYS[3], #ARGV[1] - before)
    while bytes > tonumber(ARGV[3]) do
      local oldest = redis.call('ZPOPMIN', KEYS[2])
      if #oldest == 0 then break end
      bytes = redis.call('DECRBY', KEYS[3], redis.call('STRLEN', oldest[1]))
      redis.call('DEL', oldest[1])
    end"""
    _DELETE = """
    redis.call('DECRBY', KEYS[3], redis.call('STRLEN', KEYS[1]))
    redis.call('ZREM', KEYS[2], KEYS[1])
    return redis.call('DEL', KEYS[1])"""

    def __init__(self, address: str, max_bytes: int):
        place = address.partition("@")[2] or repr(address)
        redis = import_optional("redis", f'A store at {place} needs redis: pip install "hf-recurrent[redis]".')
        options = {"socket_timeout": _REDIS_SECONDS, "socket_connect_timeout": _REDIS_SECONDS}
        self._redis, self._max_bytes = redis.Redis.from_url(address, **options), max_bytes
        # One slot of a cluster has all keys.
        self._prefix, self._index, self._size = "{hf-recurrent}:", "{hf-recurrent}:index", "{hf-recurrent}:bytes"
        self._put = self._redis.register_script(self._PUT)
        self._delete = self._redis.register_script(self._DELETE)

    def get(self, names: Sequence[str]) -> dict[str, bytes]:
        if not names:
            return {}
        values = self._redis.mget([self._prefix + name for name in names])
        found = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        if found:
            self._redis.zadd(self._index, dict.fromkeys((self._prefix + name for name in found), time.time()), xx=True)
        return found

    def put(self, name: str, data: bytes) -> None:
        keys = [self._prefix + name, self._index, self._size]
        self._put(keys=keys, args=[data, time.time(), self._max_bytes])

    def delete(self, name: str) -> bool:
        return bool(self._delete(keys=[self._prefix + name, self._index, self._size]))


class SafeBlobs:
    """A store whose failures are counted, not raised, with a checksum for each piece."""

    def __init__(self, store: MemoryBlobs | FsspecBlobs | RedisBlobs):
        self._store, self._down_until = store, 0.0
        self.failures = 0  # calls that failed, or were left out because the store was down, and damaged pieces

    def get(self, names: Sequence[str]) -> dict[str, bytes]:
        """The pieces that are there and undamaged."""
        found: dict[str, bytes] = {}
        for name, data in (self._tried(self._store.get, names) or {}).items():
            checksum, content = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
            if checksum == _checksum(name, content):
                found[name] = content
            else:
                self.failures += 1
        return found

    def put(self, name: str, data: bytes) -> bool:
        """Write a piece; False if that failed."""
        return self._tried(lambda: self._store.put(name, _checksum(name, data) + data) or True) or False

    def delete(self, name: str) -> bool:
        """Delete a piece; False if there was none, or the store failed."""
        return self._tried(self._store.delete, name) or False

    def _tried(self, function: Callable[..., _Result], *arguments: Any) -> _Result | None:
        if time.monotonic() < self._down_until:
            self.failures += 1
            return None
        try:
            return function(*arguments)
        except Exception as error:
            if not self.failures:
                kind = type(error).__name__
                _log.warning("The store failed: %s: %.200s. The server continues without it.", kind, error)
            self.failures += 1
            self._down_until = time.monotonic() + _RETRY_SECONDS
            return None


def open_blobs(address: str | None, max_bytes: int) -> SafeBlobs:
    """The store of an address: `redis://…`, or any of fsspec; None for memory."""
    if address is None:
        return SafeBlobs(MemoryBlobs(max_bytes))
    if address.startswith(("redis://", "rediss://", "unix://")):
        return SafeBlobs(RedisBlobs(address, max_bytes))
    return SafeBlobs(FsspecBlobs(address, max_bytes))


def _written(info: dict[str, Any]) -> str:
    """Time at which a file was written, for sorting the files of one file system."""
    return str(next((info[key] for key in ("mtime", "created", "LastModified") if key in info), ""))


def _checksum(name: str, data: bytes) -> bytes:
    """Checksum of a piece and its name, so that pieces are not confused."""
    return hashlib.blake2b(data, digest_size=_CHECKSUM_BYTES, key=hashlib.sha256(name.encode()).digest()).digest()


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
