"""States of texts on disk: a SQLite database that may be lost, because every state can be computed again.

So a damaged file is replaced, a damaged row counts as missing, and a full disk costs no request.
"""

import hashlib
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from hf_recurrent.server.text_hashes import PrefixKey

_log = logging.getLogger(__name__)
_FORMAT = "1"
FILE = "prefixes.sqlite"
_ERRORS = (sqlite3.Error, UnicodeDecodeError)  # the latter where a damaged text is part of an error message
# States have a table of their own, so that the index is read without them.
_TABLES = """
create table if not exists properties (name text primary key, value text not null);
create table if not exists prefixes (
    number integer primary key, whole blob unique not null, block blob not null, length integer not null,
    parent blob, priority real not null
);
create table if not exists states (number integer primary key, checksum blob not null, state blob not null);
"""


class StoredPrefix(NamedTuple):
    """A row of the index."""

    key: PrefixKey
    parent: bytes | None  # `whole` of the longest stored beginning of this text; None without one
    priority: float  # the rows with the lowest one are deleted first
    nbytes: int  # of the state


class PrefixDatabase:
    """The database of a directory. One thread uses it. Raises an OSError if it cannot be written.

    `computation` names the weights and the arithmetic of the states; states of others are deleted.
    """

    def __init__(self, directory: Path, computation: str):
        self._path, self._has_failed = Path(directory, FILE), False
        # The scheduler's thread uses it; it is opened before that thread runs.
        options = {"isolation_level": None, "check_same_thread": False}
        try:
            self._connection = sqlite3.connect(self._path, **options)
            try:
                self._prepare(computation)
            except _ERRORS as error:
                _log.warning("%s is damaged (%s); its texts will be read again.", self._path, error)
                self._connection.close()
                for end in ("", "-wal", "-shm"):
                    self._path.with_name(FILE + end).unlink(missing_ok=True)
                self._connection = sqlite3.connect(self._path, **options)
                self._prepare(computation)
        except _ERRORS as error:
            raise OSError(f"The states in {str(self._path)!r} cannot be opened: {error}.") from error

    def _prepare(self, computation: str) -> None:
        self._connection.execute("pragma auto_vacuum = incremental")
        self._connection.execute("pragma journal_mode = wal")
        self._connection.execute("pragma synchronous = normal")
        self._connection.executescript(_TABLES)
        own = {("format", _FORMAT), ("computation", computation)}
        if set(self._connection.execute("select name, value from properties")) != own:
            for table in ("properties", "prefixes", "states"):
                self._connection.execute(f"delete from {table}")
            self._connection.executemany("insert into properties values (?, ?)", own)

    def close(self) -> None:
        self._connection.close()

    def index(self) -> Iterator[StoredPrefix]:
        """All valid rows, the oldest first."""
        query = (
            "select whole, block, length, parent, priority, coalesce(length(state), 0) "
            "from prefixes left join states using (number) order by number"
        )
        with suppress(*_ERRORS):
            for whole, block, length, parent, priority, nbytes in self._connection.execute(query):
                are_bytes = all(isinstance(each, bytes) for each in (whole, block, parent or b""))
                are_numbers = type(length) is int and length > 0 and type(priority) is float and isfinite(priority)
                if are_bytes and are_numbers:
                    yield StoredPrefix(PrefixKey(length, block, whole), parent, priority, nbytes)

    def write(self, row: StoredPrefix, state: bytes) -> None:
        key = row.key
        self._commit(
            ("insert or replace into prefixes (whole, block, length, parent, priority) values (?, ?, ?, ?, ?)",
             (key.whole, key.block, key.length, row.parent, row.priority)),
            ("insert or replace into states values (last_insert_rowid(), ?, ?)", (_checksum(key, state), state)),
        )  # fmt: skip

    def state(self, key: PrefixKey) -> bytes | None:
        """A state; None if its row is damaged or missing."""
        query = "select checksum, state from states join prefixes using (number) where whole = ?"
        try:
            row = self._connection.execute(query, (key.whole,)).fetchone()
        except _ERRORS:
            return None
        is_valid = row and isinstance(row[1], bytes) and row[0] == _checksum(key, row[1])
        return row[1] if is_valid else None

    def touch(self, key: PrefixKey, priority: float) -> None:
        """Change the priority of a state."""
        self._commit(("update prefixes set priority = ? where whole = ?", (priority, key.whole)))

    def delete(self, key: PrefixKey, parent: bytes | None, children: Sequence[bytes] = ()) -> None:
        """Delete a state, whose children get its parent."""
        self._commit(
            ("delete from states where number = (select number from prefixes where whole = ?)", (key.whole,)),
            ("delete from prefixes where whole = ?", (key.whole,)),
            *(("update prefixes set parent = ? where whole = ?", (parent, child)) for child in children),
        )

    def shrink(self) -> None:
        """Give the space of deleted rows back to the file system."""
        with suppress(*_ERRORS):
            self._connection.execute("pragma incremental_vacuum").fetchall()

    def _commit(self, *statements: tuple[str, tuple]) -> None:
        """Run statements in one commit, which survives the end of the process; log the first failure."""
        try:
            self._connection.execute("begin immediate")
            for statement, values in statements:
                self._connection.execute(statement, values)
            self._connection.execute("commit")
        except _ERRORS as error:
            with suppress(*_ERRORS):
                self._connection.execute("rollback")
            if not self._has_failed:
                self._has_failed = True
                _log.warning("%s cannot be written: %s. The server continues without it.", self._path, error)


def _checksum(key: PrefixKey, state: bytes) -> bytes:
    return hashlib.blake2b(state, digest_size=16, key=key.whole).digest()
