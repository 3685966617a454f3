"""The probabilities of the next byte, computed alike by the compressor and the decompressor.

Shape letters: B streams, V vocabulary.
"""

import hashlib
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_recurrent.modeling.block.recurrent_state import supports_recurrent_state
from hf_recurrent.modeling.step.single_step import run_single_step

_BYTES = 256
_PROBE = b"def main():\n    print('0')\n"


class Predictor(Protocol):
    """Predicts the next byte of each of B streams, and then reads it."""

    streams: int

    def probabilities(self) -> np.ndarray:
        """(B, V), float64, each row with the sum 1 up to rounding."""

    def read(self, tokens: np.ndarray) -> None:
        """Read the next byte (B,) of every stream."""

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs to continue here, as JSON values and tensors."""

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""


def check_model(model: PreTrainedModel) -> None:
    """Raise a ValueError unless the model is recurrent and reads bytes."""
    if not supports_recurrent_state(model):
        raise ValueError(f"`model` is a {type(model).__name__}, which carries no state; it must be a recurrent model.")
    if model.config.vocab_size != _BYTES:
        raise ValueError(f"`model` has {model.config.vocab_size} token ids; it must have one for each of 256 bytes.")


def softmax(logits: torch.Tensor) -> np.ndarray:
    """Probabilities (B, V) in float64 from logits (B, V); uniform where a logit is NaN or infinite."""
    values = logits.double().numpy()
    if not np.isfinite(values).all():
        values = np.where(np.isfinite(values).all(-1, keepdims=True), values, 0.0)
    values = np.exp(values - values.max(-1, keepdims=True))
    return values / values.sum(-1, keepdims=True)


def uniform(streams: int) -> np.ndarray:
    """Probabilities (B, V) of the first byte of a stream, before which there is nothing to predict it from."""
    return np.full((streams, _BYTES), 1 / _BYTES)


def arithmetic_fingerprint(predictor: Predictor) -> str:
    """A hash (8 hexadecimal digits) of the probabilities for a short text: equal where the arithmetic is equal.

    Args:
        predictor: a new one; it has read the text afterwards.
    """
    digest = hashlib.sha256()
    for byte in _PROBE:
        digest.update(predictor.probabilities().astype("<f8").tobytes())
        predictor.read(np.full(predictor.streams, byte))
    return digest.hexdigest()[:8]


class FrozenPredictor:
    """A model with fixed weights, one byte of every stream at a time.

    Args:
        model: a recurrent byte-level model.
        streams: B.
    """

    def __init__(self, model: PreTrainedModel, streams: int = 1):
        check_model(model)
        self.streams = streams
        self._model = model.eval()
        self._state = model.init_state(streams)
        self._probabilities = uniform(streams)

    def probabilities(self) -> np.ndarray:
        return self._probabilities

    @torch.inference_mode()
    def read(self, tokens: np.ndarray) -> None:
        input_ids = torch.from_numpy(tokens.astype(np.int64)).to(self._model.device).unsqueeze(1)
        found = run_single_step(self._model, input_ids, self._state)  # without the checks of `forward`
        if found is None:
            output = self._model(input_ids, state=self._state, use_cache=True)
            found = output.logits, output.state
        logits, self._state = found
        self._probabilities = softmax(logits[:, -1].cpu())

    def state_dict(self) -> dict[str, Any]:
        return {"state": dict(self._state), "probabilities": torch.from_numpy(self._probabilities)}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._state = {name: values["state"][name].to(tensor) for name, tensor in self._state.items()}
        self._probabilities = values["probabilities"].numpy()
