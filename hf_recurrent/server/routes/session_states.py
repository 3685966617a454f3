"""Sessions as state files. Both functions run in the scheduler's thread."""

from hf_recurrent.generation.text_state import TextState, pack_text_state, unpack_text_state
from hf_recurrent.server.routes.errors import ApiError
from hf_recurrent.server.routes.served_model import ServedModel
from hf_recurrent.server.session import Session, Snapshot


def state_of_session(served: ServedModel, session_id: str) -> bytes:
    """The content of a state file with a session as it is now.

    Raises:
        UnknownSession: there is none of that id.
    """
    scheduler = served.scheduler
    snapshot = scheduler.store.get(session_id).snapshot
    if scheduler.learner is not None:
        scheduler.learner.remember_weights()
    return pack_text_state(scheduler.steps.model, TextState(snapshot.state, [snapshot.pending]))


def session_of_state(served: ServedModel, data: bytes, is_private: bool = False, name: str = "body") -> Session:
    """A new session from the content of a state file.

    Args:
        served: the model.
        data: the content.
        is_private: of the session.
        name: of the content, for errors.

    Raises:
        ApiError: the content is damaged, has several texts, or belongs to other weights.
        TooMany: the limit of sessions is reached.
    """
    scheduler = served.scheduler
    known = () if scheduler.learner is None else scheduler.learner.known_weights
    try:
        text = unpack_text_state(scheduler.steps.model, data, name, known)
    except ValueError as error:
        raise ApiError(400, str(error)) from error
    if len(text.pending) != 1:
        raise ApiError(400, f"The {name} has the states of {len(text.pending)} texts; it must have one.")
    state = {name: tensor.to(scheduler.store.zero[name]) for name, tensor in text.state.items()}
    return scheduler.store.add(Session(Snapshot(state, text.pending[0]), is_private=is_private))
