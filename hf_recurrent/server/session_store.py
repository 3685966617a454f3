"""All sessions of a server: on disk if there is a directory, and the most recently used ones in memory."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from hf_recurrent.modeling.block.recurrent_state import RecurrentState
from hf_recurrent.server.session import Session, Snapshot
from hf_recurrent.server.session_database import SessionDatabase

# Tokens that are fed again, at most, when a session of a killed process is used.
_LONGEST_JOURNAL = 256


class SessionError(ValueError):
    """A request that cannot be met."""


class UnknownSession(SessionError):
    """There is no session or mark of that name."""


class SessionBusy(SessionError):
    """The session reads or generates at the moment."""


class Stopped(SessionError):
    """The read was cancelled."""


class NothingToContinue(SessionError):
    """The text is empty, and the model has no byte to begin it with."""


class TooMany(SessionError):
    """A limit of the server is reached."""


@dataclass(eq=False)
class SessionStore:
    """Sessions by id. One thread uses it.

    A method that takes an id or the name of a mark raises UnknownSession if there is none, and SessionBusy if it would
    change or copy a session that reads or generates.
    """

    zero: RecurrentState  # the state of a new session
    database: SessionDatabase | None = None  # where sessions are kept; None to keep them in memory only
    # Feeds tokens to a snapshot, for sessions whose journal a killed process left.
    replay: Callable[[Snapshot, Sequence[int]], Snapshot] | None = None
    max_states: int = field(default=20_000, kw_only=True)  # how many sessions and marks there may be together
    # With a database, how many sessions stay in memory; the least recently used leave first.
    max_resident: int = field(default=1000, kw_only=True)
    # Where there is no room, delete the least recently used idle session; needs no database.
    forgets: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self._resident: OrderedDict[str, Session] = OrderedDict()
        self._busy: set[str] = set()
        self._journaled: dict[str, int] = {}
        # Ids in the order of creation.
        self._ids: dict[str, None] = dict.fromkeys(self.database.ids() if self.database else ())
        self._marks = self.database.count_marks() if self.database else 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def resident(self) -> int:
        """Number of sessions in memory."""
        return len(self._resident)

    def ids(self, after: str | None = None, limit: int = 100) -> list[str]:
        """Ids of sessions that follow `after`, the oldest first."""
        found = iter(self._ids)
        if after is not None:
            if after not in self._ids:
                raise UnknownSession("There is no such session.")
            next(each for each in found if each == after)
        return list(islice(found, limit))

    def add(self, session: Session) -> Session:
        """Keep a new session; raises TooMany if the limit of sessions and marks is reached."""
        self._check_room(1 + len(session.marks))
        if self.database:
            self.database.write(session)
            self.database.write_marks(session, session.marks)
        self._marks += len(session.marks)
        self._ids[session.id] = None
        self._resident[session.id] = session
        self._evict(session.id)
        return session

    def get(self, session_id: str) -> Session:
        """A session, from memory or disk."""
        if session_id not in self._ids:
            raise UnknownSession("There is no such session.")
        session = self._resident.get(session_id)
        if session is None:
            session, journal = self.database.read(session_id)
            if journal:
                session.snapshot = self.replay(session.snapshot, journal)
            if journal or session.snapshot.is_generating:
                session.snapshot = replace(session.snapshot, is_generating=False)
                self.database.write(session)
            self._resident[session_id] = session
            self._evict(session_id)
        self._resident.move_to_end(session_id)
        return session

    def fork(self, session_id: str) -> Session:
        """A copy of a session with its marks; TooMany as in [`add`]."""
        return self.add(self._idle(session_id).fork())

    def set_mark(self, session_id: str, name: str) -> Session:
        """Mark the present place of a session; a mark of the same name moves there. TooMany as in [`add`]."""
        session = self._idle(session_id)
        is_new = name not in session.marks
        self._check_room(is_new, session_id)
        if self.database:
            self.database.write_marks(session, {name: session.snapshot})
        session.marks[name] = session.snapshot
        self._marks += is_new
        return session

    def delete_mark(self, session_id: str, name: str) -> Session:
        session = self._idle(session_id)
        self._mark(session, name)
        if self.database:
            self.database.delete_mark(session, name)
        del session.marks[name]
        self._marks -= 1
        return session

    def rewind(self, session_id: str, name: str) -> Session:
        """Go back to a mark, as if nothing had been read since."""
        session = self._idle(session_id)
        self._replace(session, self._mark(session, name))
        return session

    def set_learns(self, session_id: str, learns: bool) -> Session:
        session = self._idle(session_id)
        session.learns = learns
        self._replace(session, session.snapshot)
        return session

    def delete(self, session_id: str) -> None:
        """Forget a session with its marks."""
        session = self._idle(session_id)
        if self.database:
            self.database.delete(session_id)
        self._resident.pop(session_id, None)
        del self._ids[session_id]
        self._marks -= len(session.marks)

    def acquire(self, session_id: str) -> Session:
        """A session for one reader or generator, until [`release`]."""
        session = self._idle(session_id)
        self._busy.add(session_id)
        return session

    def release(self, session: Session, snapshot: Snapshot) -> None:
        """The session is idle again, at another place; it is on disk when this returns."""
        try:
            self._replace(session, snapshot)
        finally:
            self._busy.discard(session.id)
            self._evict()

    def journal(self, generated: Iterable[tuple[Session, list[int], Callable[[], Snapshot]]]) -> None:
        """Make durable, for each session, the tokens generated since the last call; with the snapshot after them."""
        if not self.database:
            return
        short = []
        for session, tokens, snapshot in generated:
            length = self._journaled.get(session.id, 0) + len(tokens)
            if length > _LONGEST_JOURNAL:
                self._replace(session, replace(snapshot(), is_generating=True))
            else:
                self._journaled[session.id] = length
                short.append((session.id, tokens))
        if short:
            self.database.append(short)

    def close(self) -> None:
        if self.database:
            self.database.close()

    def _replace(self, session: Session, snapshot: Snapshot) -> None:
        before, session.snapshot = session.snapshot, snapshot
        if not self.database:
            return
        try:
            self.database.write(session)
        except BaseException:
            session.snapshot = before
            raise
        self._journaled.pop(session.id, None)

    def _check_room(self, more: int, keep: str | None = None) -> None:
        if self.forgets:
            idle = [each for each in self._resident if each not in self._busy and each != keep]
            while idle and len(self) + self._marks + more > self.max_states:
                self.delete(idle.pop(0))
        count = len(self) + self._marks
        if more and count + more > self.max_states:
            raise TooMany(f"There are {count} sessions and marks; this server allows {self.max_states}; delete some.")

    def _idle(self, session_id: str) -> Session:
        if session_id in self._busy:
            raise SessionBusy("The session is busy: it reads or generates; wait for that to end.")
        return self.get(session_id)

    @staticmethod
    def _mark(session: Session, name: str) -> Snapshot:
        try:
            return session.marks[name]
        except KeyError:
            raise UnknownSession(f"The session has no mark {name!r:.80}.") from None

    def _evict(self, keep: str | None = None) -> None:
        """Forget the least recently used idle sessions, which are on disk."""
        excess = len(self._resident) - self.max_resident if self.database else 0
        if excess > 0:
            idle = (each for each in self._resident if each not in self._busy and each != keep)
            for session_id in list(islice(idle, excess)):
                del self._resident[session_id]
