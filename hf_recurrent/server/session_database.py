"""Sessions on disk: one SQLite database, which stays consistent when the process is killed.

A session's record is its state at some moment and a journal of the tokens that it has generated since. Reading them
again gives the state bit for bit, because a token is fed in the same way whatever is read together with it. A journal
that begins with an empty row belongs to a record that was written in the middle of a generation.

Every commit survives the end of the process. After a power failure the last ones may be missing.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from hf_recurrent.modeling.block.recurrent_state import RecurrentState
from hf_recurrent.server.session import Session, Snapshot
from hf_recurrent.server.state_packing import StatePacking

_FORMAT = 1
_FILE = "sessions.sqlite"
_TABLES = """
create table if not exists properties (name text primary key, value text not null);
create table if not exists sessions (
    id text primary key, created integer not null, learns integer not null,
    bytes_read integer not null, pending integer, state blob not null
);
create table if not exists marks (
    session text not null, name text not null, bytes_read integer not null, pending integer, state blob not null,
    primary key (session, name)
);
create table if not exists journal (number integer primary key, session text not null, tokens blob not null);
create index if not exists journal_sessions on journal (session);
"""


class SessionDatabase:
    """The database of a directory. One thread uses it.

    Raises a ValueError if the file is damaged or of a later version, and an OSError if it cannot be written.
    """

    def __init__(self, directory: Path, zero: RecurrentState):
        self._packing = StatePacking(zero)
        path = Path(directory, _FILE)
        try:
            # The scheduler's thread uses it; it is opened before that thread runs.
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._connection.execute("pragma journal_mode = wal")
            self._connection.execute("pragma synchronous = normal")
            self._connection.executescript(_TABLES)
        except sqlite3.OperationalError as error:
            raise OSError(f"The sessions in {str(path)!r} cannot be opened: {error}.") from error
        except sqlite3.DatabaseError as error:
            raise ValueError(f"The file {str(path)!r} is damaged or not a database of sessions: {error}.") from error
        known = self.get_property("format") or self.set_property("format", str(_FORMAT)) or str(_FORMAT)
        if known != str(_FORMAT):
            raise ValueError(f"The file {str(path)!r} has the format {known:.40}; this version reads {_FORMAT}.")

    def close(self) -> None:
        self._connection.close()

    def get_property(self, name: str) -> str | None:
        """A property of the whole database; None if it was never set."""
        row = self._connection.execute("select value from properties where name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def set_property(self, name: str, value: str) -> None:
        self._connection.execute("insert or replace into properties values (?, ?)", (name, value))

    def ids(self) -> Iterator[str]:
        """The ids of all sessions, the oldest first."""
        return (row[0] for row in self._connection.execute("select id from sessions order by created, rowid"))

    def count_marks(self) -> int:
        return self._connection.execute("select count(*) from marks").fetchone()[0]

    def write(self, session: Session) -> None:
        """Write a session, with its state, in place of its former record and journal."""
        place = self._place(session.snapshot)
        with self._transaction():
            self._connection.execute(
                "insert into sessions values (?, ?, ?, ?, ?, ?) on conflict (id) do update set "
                "learns = excluded.learns, bytes_read = excluded.bytes_read, pending = excluded.pending, "
                "state = excluded.state",
                (session.id, session.created, session.learns, *place),
            )
            self._connection.execute("delete from journal where session = ?", (session.id,))
            if session.snapshot.is_generating:
                self._connection.execute("insert into journal (session, tokens) values (?, ?)", (session.id, b""))

    def write_marks(self, session: Session, marks: Mapping[str, Snapshot]) -> None:
        """Write marks of a session, each in place of one of the same name."""
        rows = [(session.id, name, *self._place(snapshot)) for name, snapshot in marks.items()]
        with self._transaction():
            self._connection.executemany("insert or replace into marks values (?, ?, ?, ?, ?)", rows)

    def delete_mark(self, session: Session, name: str) -> None:
        self._connection.execute("delete from marks where session = ? and name = ?", (session.id, name))

    def delete(self, session_id: str) -> None:
        """Delete a session with its marks and journal."""
        with self._transaction():
            for table, column in (("sessions", "id"), ("marks", "session"), ("journal", "session")):
                self._connection.execute(f"delete from {table} where {column} = ?", (session_id,))

    def append(self, tokens: Iterable[tuple[str, list[int]]]) -> None:
        """Add tokens to the journals of sessions, in one commit."""
        rows = [(session_id, np.array(ids, dtype=np.int32).tobytes()) for session_id, ids in tokens]
        with self._transaction():
            self._connection.executemany("insert into journal (session, tokens) values (?, ?)", rows)

    def read(self, session_id: str) -> tuple[Session, list[int]]:
        """A session as its record has it, and the tokens of its journal; raises a ValueError for a damaged record."""
        query = "select created, learns, state, pending, bytes_read from sessions where id = ?"
        created, learns, *place = self._connection.execute(query, (session_id,)).fetchone()
        query = "select name, state, pending, bytes_read from marks where session = ?"
        marks = self._connection.execute(query, (session_id,))
        snapshots = {name: self._snapshot(*of_mark) for name, *of_mark in marks}
        query = "select tokens from journal where session = ? order by number"
        journal = [row[0] for row in self._connection.execute(query, (session_id,))]
        snapshot = replace(self._snapshot(*place), is_generating=journal[:1] == [b""])
        session = Session(snapshot, session_id, created, bool(learns), snapshots)
        return session, [token for data in journal for token in np.frombuffer(data, np.int32).tolist()]

    def _place(self, snapshot: Snapshot) -> tuple[int, int | None, bytes]:
        return snapshot.bytes_read, snapshot.pending, self._packing.pack(snapshot.state)

    def _snapshot(self, state: bytes, pending: int | None, bytes_read: int) -> Snapshot:
        return Snapshot(self._packing.unpack(state), pending, bytes_read)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """One commit, or none of it after an exception."""
        self._connection.execute("begin immediate")
        try:
            yield
        except BaseException:
            self._connection.execute("rollback")
            raise
        self._connection.execute("commit")
