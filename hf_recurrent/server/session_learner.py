"""Learning from the text that sessions read: one model, one optimizer, and the sensitivities of each session."""

import logging
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from hf_recurrent.checkpoints.files import checkpoint_number, list_checkpoints, read_json, write_json
from hf_recurrent.checkpoints.weight_hashing import weights_hash
from hf_recurrent.checkpoints.weights import load_weights
from hf_recurrent.learning_rules.rules import NonFiniteLossError
from hf_recurrent.online.block_step import LearnerStream
from hf_recurrent.online.learner import OnlineLearner
from hf_recurrent.online.prequential import PrequentialRecord
from hf_recurrent.server.session import Snapshot

_log = logging.getLogger(__name__)
_WEIGHTS_FILE = "weights.json"
_KEPT = 10  # of the last checkpoints, besides the first
_MOST_STREAMS = 16  # sessions whose sensitivities are in memory


class SessionLearner:
    """Learns from the texts of many sessions; writes checkpoints in a directory. One thread uses it.

    A session that was on disk, forked or rewound, or that generated, begins again with sensitivities of zero.
    """

    def __init__(self, learner: OnlineLearner, directory: Path, *, save_every: int = 100_000):
        self._learner, self._directory, self._save_every = learner, Path(directory), save_every
        self._streams: OrderedDict[str, tuple[LearnerStream, int]] = OrderedDict()
        self.failures = 0  # texts whose loss or gradient was NaN or infinite; nothing was learned from them
        known = self._directory / _WEIGHTS_FILE
        # Hashes of the weights that the model had when states were saved; such states are still accepted.
        self.known_weights = set(read_json(known)) if known.is_file() else set()
        if not self.checkpoints():
            self.save()
        self._saved_at = learner.bytes_read
        self.remember_weights()

    @property
    def slice_length(self) -> int:
        """Bytes that are read and learned from at a time."""
        return self._learner.settings.stride * self._learner.settings.update_every

    def record(self) -> PrequentialRecord:
        """Bytes read, updates and prequential bits per byte."""
        return self._learner.record()

    def read(self, session_id: str, before: Snapshot, tokens: Sequence[int]) -> None:
        """Learn from the next tokens of a session, which was at `before`."""
        stream, position = self._streams.pop(session_id, (None, None))
        if position != before.bytes_read:
            stream = self._learner.new_stream(before.state, before.pending)
        own, self._learner.stream = self._learner.stream, stream
        try:
            with torch.enable_grad():
                self._learner.read(self._learner.tokenizer.decode_bytes(np.array(tokens)))
        except NonFiniteLossError as error:
            self.failures += 1
            _log.warning("Nothing was learned from a text: %s", error)
            return
        finally:
            self._learner.stream = own
        self._streams[session_id] = stream, before.bytes_read + len(tokens)
        if len(self._streams) > _MOST_STREAMS:
            self._streams.popitem(last=False)
        if self._learner.bytes_read - self._saved_at >= self._save_every:
            self.save()

    def checkpoints(self) -> list[str]:
        """Names of the checkpoints, the oldest first."""
        return [Path(path).name for path in list_checkpoints(self._directory)]

    def save(self) -> str:
        """Write a checkpoint; returns its name. If that fails, earlier ones are unchanged."""
        name = f"checkpoint-{self._learner.bytes_read}"
        self._saved_at = self._learner.bytes_read
        self._learner.save(self._directory / name)
        self.remember_weights()
        for old in self.checkpoints()[1:-_KEPT]:
            shutil.rmtree(self._directory / old)
        return name

    def unlearn(self, name: str) -> None:
        """Go back to the weights and the optimizer of a checkpoint. Sessions keep their states.

        Raises a ValueError if there is no such checkpoint, or it is damaged.
        """
        if name not in self.checkpoints():
            raise ValueError(f"`checkpoint` is {name!r:.80}; it must be one of {', '.join(self.checkpoints())}.")
        model, tokenizer = self._learner.model, self._learner.tokenizer
        with torch.enable_grad():
            load_weights(model, self._directory / name)
            self._learner = OnlineLearner.load(self._directory / name, model, tokenizer)
        self._streams.clear()
        self._saved_at = checkpoint_number(name)

    def remember_weights(self) -> None:
        """Accept states of the present weights later, when the model has learned more."""
        found = weights_hash(self._learner.model)
        if found not in self.known_weights:
            self.known_weights.add(found)
            write_json(sorted(self.known_weights), self._directory / _WEIGHTS_FILE)
