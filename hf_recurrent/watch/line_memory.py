"""`LineMemory`: similarity of a line to the recent lines, and to the lines that followed similar ones."""

import math
import re
from collections.abc import Mapping

import numpy as np
import torch

# Length of the pieces (byte n-grams) of a line; similar lines share many pieces.
_PIECE = 5
_WIDTH_BITS = 10
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
# Recent lines in which repetitions are counted, and the power of a similarity by which a line counts as repetition and
# as follower.
_NEAR, _SHARPNESS, _FOLLOWER_SHARPNESS = 8, 16, 12
# Pseudo-count of followers, so that a transition is not impossible after a few lines.
_PRIOR = 0.2
_DIGIT = re.compile(rb"\d")


class LineMemory:
    """The recent lines, each as the hashed set of its pieces: once as it is, and once with all digits replaced by 0.

    Time and memory per line are constant, and nothing is parsed.

    Args:
        size: lines that are kept.
    """

    def __init__(self, size: int):
        self._exact, self._kinds = _Rows(size), _Rows(size)

    def compare(self, line: bytes) -> dict[str, float]:
        """Compare a line with the recent ones, before it is added.

        Returns:
            Four measures, each higher for more unusual lines. `novelty`: -1 if an equal line is kept, 0 if none shares
            a piece with it. `order`: -1 if a line equal up to digits has followed a line equal to the last one.
            `transition`: -log2 of the share of similar lines among the followers of lines similar to the last one.
            `repetition`: number of nearly equal lines among the last eight.
        """
        exact, kinds = self._exact.rows, self._kinds.rows
        if len(exact) < 2:
            return {"novelty": 0.0, "order": 0.0, "transition": 0.0, "repetition": 0.0}
        # Cosine similarities: to every line, and, of kinds, to the followers of lines and to these lines.
        alike = exact @ _vector(line)
        following = (kinds @ _vector(_DIGIT.sub(b"0", line)))[1:]
        before = kinds[:-1] @ kinds[-1]
        weights = before**_FOLLOWER_SHARPNESS
        share = (float(weights @ following**_FOLLOWER_SHARPNESS) + _PRIOR) / (float(weights.sum()) + 1)
        return {
            "novelty": -float(alike.max()),
            "order": -float(np.minimum(following, before).max()),
            "transition": -math.log2(share),
            "repetition": float((alike[-_NEAR:] ** _SHARPNESS).sum()),
        }

    def add(self, line: bytes) -> None:
        """Keep a line, and forget the oldest one beyond the size."""
        self._exact.add(_vector(line))
        self._kinds.add(_vector(_DIGIT.sub(b"0", line)))

    def state(self) -> dict[str, torch.Tensor]:
        """The memory as bits, two tensors (lines, 128) uint8."""
        return {"exact": self._exact.state(), "kinds": self._kinds.state()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from the bits of [`state`]; a KeyError or ValueError if they are damaged."""
        if len(state["exact"]) != len(state["kinds"]):
            raise ValueError(f"the memory of lines has {len(state['exact'])} and {len(state['kinds'])} lines.")
        self._exact.load(state["exact"])
        self._kinds.load(state["kinds"])


class _Rows:
    """The last `size` vectors that were added."""

    def __init__(self, size: int):
        self._size = size
        # Twice as many rows as needed, so that rows move to the beginning only once in `size` lines.
        self._rows = np.zeros((2 * size, 1 << _WIDTH_BITS), np.float32)
        self._begin = self._end = 0

    @property
    def rows(self) -> np.ndarray:
        """The vectors, oldest first."""
        return self._rows[self._begin : self._end]

    def add(self, vector: np.ndarray) -> None:
        """Keep a vector, and forget the oldest one beyond the size."""
        if self._end == len(self._rows):
            self._set(self._rows[self._end - self._size + 1 :].copy())
        self._rows[self._end] = vector
        self._end += 1
        self._begin = max(self._begin, self._end - self._size)

    def _set(self, rows: np.ndarray) -> None:
        self._rows[: len(rows)] = rows
        self._begin, self._end = 0, len(rows)

    def state(self) -> torch.Tensor:
        """The vectors as bits."""
        return torch.from_numpy(np.packbits(self.rows > 0, axis=1))

    def load(self, state: torch.Tensor) -> None:
        """Continue from the bits of [`state`]."""
        if state.dtype != torch.uint8 or state.dim() != 2 or state.shape[1] * 8 != 1 << _WIDTH_BITS:
            raise ValueError(f"the memory of lines has shape {tuple(state.shape)} and type {state.dtype}.")
        bits = np.unpackbits(state[-self._size :].numpy(), axis=1).astype(np.float32)
        self._set(bits / np.sqrt(np.maximum(bits.sum(1, keepdims=True), 1)))


def _vector(line: bytes) -> np.ndarray:
    """The pieces of a line as a vector of length 1."""
    codes = np.frombuffer(b" " * (_PIECE - 1) + line + b"\n", np.uint8).astype(np.uint64)
    count = len(codes) - _PIECE + 1
    pieces = sum(codes[offset : offset + count] << np.uint64(8 * offset) for offset in range(_PIECE))
    buckets = (pieces * _MULTIPLIER) >> np.uint64(64 - _WIDTH_BITS)
    vector = np.zeros(1 << _WIDTH_BITS, np.float32)
    vector[buckets] = 1
    return vector / np.sqrt(vector.sum(dtype=np.float32))
