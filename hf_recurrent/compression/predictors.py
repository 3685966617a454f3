"""A network's logits of the next byte, computed identically by the compressor and the decompressor.

Shape letters: B streams, V vocabulary.
"""

import hashlib
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_recurrent.modeling.block.recurrent_state import supports_recurrent_state
from hf_recurrent.modeling.step.module_watch import StepLoop
from hf_recurrent.modeling.step.single_step import run_single_step

_BYTES = 256
_PROBE = b"def main():\n    print('0')\n"


class Predictor:
    """Predicts the next byte of each of B streams, then reads it.

    A subclass has `read(tokens)`, which reads the next byte (B,) of every stream and predicts the one after it, and
    `state_dict()` and `load_state_dict(values)` with JSON values and tensors.

    Attributes:
        streams: B.
        logits: of the next byte, (B, V) float32; zeros before the first byte, and where one is NaN or infinite.
    """

    def __init__(self, streams: int):
        self.streams = streams
        self.logits = np.zeros((streams, _BYTES), np.float32)


class FrozenPredictor(Predictor):
    """A recurrent byte-level model with fixed weights."""

    def __init__(self, model: PreTrainedModel, streams: int = 1):
        check_model(model)
        super().__init__(streams)
        self._model = model.eval()
        self._state = model.init_state(streams)
        self._loop = StepLoop()

    @torch.inference_mode()
    def read(self, tokens: np.ndarray) -> None:
        input_ids = torch.from_numpy(tokens.astype(np.int64)).to(self._model.device).unsqueeze(1)
        found = run_single_step(self._model, input_ids, self._state, self._loop)  # without the checks of `forward`
        if found is None:
            output = self._model(input_ids, state=self._state, use_cache=True)
            found = output.logits, output.state
        logits, self._state = found
        self.logits = finite(logits[:, -1].float().cpu().numpy())

    def state_dict(self) -> dict[str, Any]:
        return {"state": dict(self._state), "logits": torch.from_numpy(self.logits)}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._state = {name: values["state"][name].to(tensor) for name, tensor in self._state.items()}
        self.logits = values["logits"].numpy()


def check_model(model: PreTrainedModel) -> None:
    """Raise a ValueError unless the model is recurrent and reads bytes."""
    if not supports_recurrent_state(model):
        raise ValueError(f"`model` is a {type(model).__name__}, which carries no state; it must be a recurrent model.")
    if model.config.vocab_size != _BYTES:
        raise ValueError(f"`model` has {model.config.vocab_size} token ids; it must have one for each of 256 bytes.")


def finite(logits: np.ndarray) -> np.ndarray:
    """Logits (B, V) in float32; zeros in rows where one is NaN or infinite."""
    values = logits.astype(np.float32, copy=False)
    if np.isfinite(values).all():
        return values
    return np.where(np.isfinite(values).all(-1, keepdims=True), values, np.float32(0))


def arithmetic_fingerprint(predictor: Predictor) -> str:
    """Hash (8 hexadecimal digits) of a new predictor's logits for a short text, which it reads."""
    digest = hashlib.sha256()
    for byte in _PROBE:
        digest.update(predictor.logits.astype("<f4").tobytes())
        predictor.read(np.full(predictor.streams, byte))
    return digest.hexdigest()[:8]
