"""`LearnerRecord`: the provenance of the weights of an `OnlineLearner`, recorded while it learns."""

import os
import zlib
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_recurrent.checkpoints.fingerprints import weights_fingerprint
from hf_recurrent.checkpoints.privacy import public_name
from hf_recurrent.checkpoints.provenance_files import base_of, find_provenance, read_provenance, remember_provenance
from hf_recurrent.checkpoints.recorder import PhaseRecorder
from hf_recurrent.checkpoints.records import Data, Phase, Provenance, thin_out
from hf_recurrent.online.prequential import PrequentialRecord
from hf_recurrent.online.settings import LearnerSettings

_UNNAMED = "a stream of bytes"
_CRC = "crc32:"


class LearnerRecord:
    """Records a phase of learning: the streams with bytes and checksum, settings, rates and results.

    Without an optimizer, nothing is learned, and only results are recorded.
    """

    def __init__(
        self, model: PreTrainedModel, settings: LearnerSettings, optimizer: torch.optim.Optimizer | None = None
    ):
        self._model, self._settings, self._optimizer = model, settings, optimizer
        self.provenance = find_provenance(model)
        self._phase = Phase(
            method=settings.rule, data=[_data(_UNNAMED)], base=base_of(model), parameters=model.num_parameters()
        )
        self._recorder: PhaseRecorder | None = None
        self._record_updates(0)

    def _record_updates(self, updates: int) -> None:
        if self._optimizer is None:
            return
        if self._recorder is not None:
            self._recorder.close()
        device = next(self._model.parameters()).device.type
        self._recorder = PhaseRecorder(self.provenance, self._phase, self._optimizer, updates, 1, device)
        self._read = 0  # bytes since the recorder was made

    def resume(self, directory: str | os.PathLike, updates: int) -> None:
        """Extend the phase of a saved learner, which has made `updates`."""
        self.provenance = read_provenance(directory) or self.provenance
        phases = self.provenance.phases
        if updates and phases and phases[-1].method == self._settings.rule:
            self._phase = phases[-1]
        self._record_updates(updates)

    def read_rates(self) -> None:
        """Note the learning rates of an update, which may bypass the optimizer's `step`."""
        self._recorder.read_rates()

    def name_source(self, name: str) -> None:
        """Name the stream that is read from now on; of a path, only the last part is kept."""
        name = public_name(name)
        last = self._phase.data[-1]
        if last.name == name:
            return
        if last.read:
            self._phase.data.append(_data(name))
        else:
            last.name = name

    def add(self, data: bytes | bytearray | memoryview) -> None:
        """Count bytes that were read and learned from."""
        if self._recorder is None:
            return
        last = self._phase.data[-1]
        crc = zlib.crc32(data, int(last.fingerprint.removeprefix(_CRC), 16))
        last.fingerprint, last.read = f"{_CRC}{crc:08x}", last.read + len(data)
        self._read += len(data)

    def update(self, record: PrequentialRecord) -> Provenance:
        """Bring the provenance up to date with the learner's `record`, and return it."""
        weights, phase = weights_fingerprint(self._model), self._phase
        if self._recorder is not None:
            self._recorder.update(record.updates, self._read, self._acting_settings())
            phases = self.provenance.phases
            if phases and phases[-1] is phase and record.bits_per_byte is not None:
                if not phase.curve or phase.curve[-1][0] < phase.read:
                    phase.curve = thin_out([*phase.curve, [phase.read, round(record.windowed_bits_per_byte, 4)]])
                # Of the stream as a whole: one result for all of its files.
                metrics = {"prequential_bits_per_byte": record.bits_per_byte}
                self.add_result(Data(phase.data[-1].name, "stream"), metrics, weights, split="stream")
        self.provenance.weights = weights
        remember_provenance(self._model, self.provenance)
        return self.provenance

    def add_result(self, data: Data, metrics: dict[str, float], weights: str | None = None, **settings: Any) -> None:
        """Add an evaluation of the current weights, which have this fingerprint."""
        weights = weights or weights_fingerprint(self._model)
        settings |= {"precision": self._precision}
        self.provenance.add_metrics(weights, data, metrics, settings)

    def _acting_settings(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "optimizer": self._recorder.optimizer_name,
            "schedule": {"name": "constant", "base_rates": [settings.learning_rate]},
            "max_grad_norm": settings.max_grad_norm or None,
            "precision": self._precision,
            "streams": 1,
            "block_size": settings.stride * settings.update_every,
            "stride": settings.stride,
            "state_carried": True,
        }

    @property
    def _precision(self) -> str:
        return str(next(self._model.parameters()).dtype).removeprefix("torch.")


def _data(name: str) -> Data:
    return Data(name, f"{_CRC}{0:08x}")
