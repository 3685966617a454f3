"""States as plain bytes, for databases."""

from math import prod

import numpy as np
import torch

from hf_recurrent.modeling.block.recurrent_state import RecurrentState

_SIZE = "<u4"


class StatePacking:
    """States of one model as plain bytes, without names and shapes; the sizes of growing parts come first.

    A part of `zero`, a state of one stream, grows along its dimension of size 0 if it has no elements.
    """

    def __init__(self, zero: RecurrentState):
        self._zero = zero
        self._growing = {name: part.shape.index(0) for name, part in zero.items() if not part.numel()}
        self.grows = bool(self._growing)
        self.nbytes = len(self.pack(zero))  # of the smallest state; of every one if no part grows

    def pack(self, state: RecurrentState) -> bytes:
        """The elements of a state; a part that grows may be missing."""
        parts = {
            name: state.get(name, like) if name in self._growing else state[name] for name, like in self._zero.items()
        }
        sizes = np.array([parts[name].shape[axis] for name, axis in self._growing.items()], _SIZE).tobytes()
        return sizes + b"".join(map(_bytes_of, parts.values()))

    def unpack(self, data: bytes) -> RecurrentState:
        """The inverse of [`pack`]; raises a ValueError if the size differs from the states of this model."""
        begin, needed = np.dtype(_SIZE).itemsize * len(self._growing), self.nbytes
        shapes = {name: list(part.shape) for name, part in self._zero.items()}
        if len(data) >= begin:
            for (name, axis), size in zip(self._growing.items(), np.frombuffer(data[:begin], _SIZE), strict=True):
                shapes[name][axis] = int(size)
            needed = begin + sum(part.itemsize * prod(shapes[name]) for name, part in self._zero.items())
        if len(data) != needed:
            raise ValueError(f"A stored state has {len(data)} bytes; this model needs {needed}.")
        state = {}
        for name, like in self._zero.items():
            # Copied, so that the memory is aligned as in a new tensor.
            part = torch.empty(shapes[name], dtype=like.dtype)
            _array_of(part)[:] = np.frombuffer(data, np.uint8, part.nbytes, begin)
            state[name] = part.to(like.device)
            begin += part.nbytes
        return state


def _array_of(part: torch.Tensor) -> np.ndarray:
    """The memory of a contiguous tensor of any type, as bytes."""
    return part.view(-1).view(torch.uint8).numpy()


def _bytes_of(part: torch.Tensor) -> bytes:
    return _array_of(part.cpu().contiguous()).tobytes()
