"""A session: a text that is read and continued piece by piece, and marks in it to go back to."""

import secrets
import time
from dataclasses import dataclass, field

from hf_recurrent.modeling.block.recurrent_state import RecurrentState


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A text at one moment. It never changes, so that sessions, forks and marks share it."""

    state: RecurrentState  # of one stream, after everything but the pending token
    pending: int | None = None  # the last token, not yet fed to the model; None at the beginning and after the end
    bytes_read: int = 0  # and generated so far
    is_generating: bool = False  # the model has chosen the pending token, in a running generation


@dataclass(eq=False)
class Session:
    """One text of one user."""

    snapshot: Snapshot
    id: str = field(default_factory=lambda: f"sess_{secrets.token_urlsafe(18)}")  # unguessable
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970
    learns: bool = False  # the model learns from the text that the session reads
    marks: dict[str, Snapshot] = field(default_factory=dict)  # to go back to

    def fork(self) -> "Session":
        """Another session with the same snapshot and marks; copies no state."""
        return Session(self.snapshot, learns=self.learns, marks=dict(self.marks))
