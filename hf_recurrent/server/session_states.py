"""Sessions as state files. Both functions run in the scheduler's thread."""

from hf_recurrent.server.scheduler import Scheduler
from hf_recurrent.server.session import Session
from hf_recurrent.server.session_store import SessionError


def state_of_session(scheduler: Scheduler, session_id: str) -> bytes:
    """The content of a state file with the present text of a session.

    Raises:
        UnknownSession: there is none with that id.
        SessionError: the state has NaN or infinite values.
    """
    snapshot = scheduler.store.get(session_id).snapshot
    if scheduler.learner is not None:
        scheduler.learner.remember_weights()
    try:
        return scheduler.steps.pack(snapshot)
    except ValueError as error:
        raise SessionError(f"The session cannot be saved: {error}") from error


def session_of_state(scheduler: Scheduler, data: bytes) -> Session:
    """A new session from the content of a state file.

    Raises:
        SessionError: the content is damaged, has several texts, or belongs to other weights.
        TooMany: the limit of sessions is reached.
    """
    known = () if scheduler.learner is None else scheduler.learner.known_weights
    try:
        snapshot = scheduler.steps.unpack(data, known)
    except ValueError as error:
        raise SessionError(str(error)) from error
    return scheduler.store.add(Session(snapshot))
