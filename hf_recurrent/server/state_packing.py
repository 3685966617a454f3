"""States as plain bytes, for databases."""

import torch

from hf_recurrent.modeling.block.recurrent_state import RecurrentState


class StatePacking:
    """States of one model as plain bytes, without names and shapes.

    Args:
        zero: a state of one stream.
    """

    def __init__(self, zero: RecurrentState):
        self._zero = zero
        self.nbytes = sum(part.nbytes for part in zero.values())

    def pack(self, state: RecurrentState) -> bytes:
        """The elements of a state."""
        return b"".join(state[name].cpu().numpy().tobytes() for name in self._zero)

    def unpack(self, data: bytes) -> RecurrentState:
        """The inverse of [`pack`].

        Raises:
            ValueError: the size differs from the states of this model.
        """
        if len(data) != self.nbytes:
            raise ValueError(f"A stored state has {len(data)} bytes; this model needs {self.nbytes}.")
        state, begin = {}, 0
        for name, like in self._zero.items():
            # Copied, so that the memory is aligned as in a new tensor.
            piece = bytearray(data[begin : begin + like.nbytes])
            state[name] = torch.frombuffer(piece, dtype=like.dtype).view(like.shape).clone().to(like.device)
            begin += like.nbytes
        return state
