"""A session: a text that is read and continued piece by piece, and marks in it to go back to."""

import secrets
import time
from dataclasses import dataclass, field

from hf_recurrent.modeling.block.recurrent_state import RecurrentState


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A text at one moment. It never changes, so that sessions, forks and marks share it.

    Args:
        state: of one stream, after everything but the pending token.
        pending: the last token, not yet fed to the model; None at the beginning and after the end token.
        bytes_read: bytes read and generated so far.
        is_generating: the model has chosen the pending token, in a running generation.
    """

    state: RecurrentState
    pending: int | None = None
    bytes_read: int = 0
    is_generating: bool = False


@dataclass(eq=False)
class Session:
    """One text of one user.

    Args:
        snapshot: its present state.
        id: unguessable, chosen by the server.
        created: seconds since 1970.
        learns: the model learns from the text that the session reads.
        marks: name → snapshot to go back to.
    """

    snapshot: Snapshot
    id: str = field(default_factory=lambda: f"sess_{secrets.token_urlsafe(18)}")
    created: int = field(default_factory=lambda: int(time.time()))
    learns: bool = False
    marks: dict[str, Snapshot] = field(default_factory=dict)

    def fork(self) -> "Session":
        """Another session with the same snapshot and marks; copies no state."""
        return Session(self.snapshot, learns=self.learns, marks=dict(self.marks))
