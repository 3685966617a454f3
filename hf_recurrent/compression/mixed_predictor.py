"""A predictor mixed with counts of the bytes that followed the same contexts earlier in the data.

The model's weights hold what was learned in training; the counts hold what this file repeats. Logistic mixing of both
compresses better than either, most of all with new weights.

Shape letters: B streams, V vocabulary.
"""

from typing import Any

import numpy as np

from hf_recurrent.compression.predictors import Predictor
from hf_recurrent.learning_rules.compiled_program import Uncompilable

try:
    from hf_recurrent.kernels.context_mixture_cpu import ContextMixture
except ImportError:
    ContextMixture = None

# Table lines of 64 bytes: one byte of data fills a few, and more than some hundred megabytes hardly help.
_LEAST_LINE_BITS, _MOST_LINE_BITS = 8, 21


def can_mix() -> bool:
    """True if the kernel was built."""
    return ContextMixture is not None


def build_mixture(streams: int, size: int) -> "ContextMixture":
    """An empty mixture for `size` bytes of data in B streams.

    Raises:
        Uncompilable: the kernel was not built.
    """
    if ContextMixture is None:
        raise Uncompilable("the kernel that mixes predictions was not built when hf-recurrent was installed")
    return ContextMixture(streams, min(max((4 * size).bit_length(), _LEAST_LINE_BITS), _MOST_LINE_BITS))


class MixedPredictor(Predictor):
    """A predictor whose probabilities are corrected by the counts of a mixture, as [`build_mixture`] makes."""

    def __init__(self, predictor: Predictor, mixture: "ContextMixture"):
        super().__init__(predictor.streams)
        self._predictor, self._mixture = predictor, mixture
        self._mix()

    def read(self, tokens: np.ndarray) -> None:
        self._mixture.read(tokens)
        self._predictor.read(tokens)
        self._mix()

    def _mix(self) -> None:
        self.probabilities = self._mixture.predict(self._predictor.probabilities)

    def state_dict(self) -> dict[str, Any]:
        return {"predictor": self._predictor.state_dict(), "mixture": self._mixture.memory}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._predictor.load_state_dict(values["predictor"])
        self._mixture.load(values["mixture"])
        self._mix()
