"""A predictor mixed with the counts of what followed the same contexts before in the data.

A model knows what its weights have learned; counts know what was just said. Logistic mixing of both is better than
either, most of all where the weights are new.
"""

from typing import Any

import numpy as np

from hf_recurrent.compression.predictors import Predictor
from hf_recurrent.learning_rules.compiled_program import Uncompilable

try:
    from hf_recurrent.kernels.context_mixture_cpu import ContextMixture
except ImportError:
    ContextMixture = None

# Lines of 64 bytes: a byte of data fills a few, and beyond some hundred megabytes of memory more hardly help.
_LEAST_LINE_BITS, _MOST_LINE_BITS = 8, 21


def can_mix() -> bool:
    """True where the kernel was built."""
    return ContextMixture is not None


class MixedPredictor:
    """Probabilities of a predictor, mixed; [`ContextMixture`].

    Args:
        predictor: the model.
        size: bytes of the data, for the memory.

    Raises:
        Uncompilable: the kernel was not built.
    """

    def __init__(self, predictor: Predictor, size: int):
        if ContextMixture is None:
            raise Uncompilable("the kernel that mixes predictions was not built when hf-recurrent was installed")
        self._predictor, self.streams = predictor, predictor.streams
        line_bits = min(max((4 * size).bit_length(), _LEAST_LINE_BITS), _MOST_LINE_BITS)
        self._mixture = ContextMixture(predictor.streams, line_bits)
        self._probabilities = self._mixture.predict(predictor.probabilities())

    def probabilities(self) -> np.ndarray:
        return self._probabilities

    def read(self, tokens: np.ndarray) -> None:
        self._mixture.read(tokens)
        self._predictor.read(tokens)
        self._probabilities = self._mixture.predict(self._predictor.probabilities())

    def state_dict(self) -> dict[str, Any]:
        return {"predictor": self._predictor.state_dict(), "mixture": self._mixture.memory}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._predictor.load_state_dict(values["predictor"])
        self._mixture.load(values["mixture"])
        self._probabilities = self._mixture.predict(self._predictor.probabilities())
