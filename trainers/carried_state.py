"""`CarriedState`: the tensors that streams pass from block to block, such as model states and sensitivities."""

from collections.abc import Callable

import torch

from hf_recurrent.modeling.block.recurrent_state import RecurrentState, check_state, join_states, select_state


class CarriedState:
    """Carried tensors, batch first, of each group of streams (one micro-batch of one process).

    A group is identified by the global number of its first stream. `zero` maps batch size and device to the tensors
    that new streams start from.
    """

    def __init__(self, zero: Callable[[int, torch.device | str], RecurrentState], device: torch.device):
        self.zero, self.device = zero, device
        self._groups: dict[int, RecurrentState] = {}

    @property
    def groups(self) -> list[int]:
        """Groups that carry tensors, sorted."""
        return sorted(self._groups)

    def get(self, group: int, batch_size: int) -> RecurrentState:
        """Tensors of a group; zero before its first block."""
        if group not in self._groups:
            self._groups[group] = self.zero(batch_size, self.device)
        return self._groups[group]

    def set(self, group: int, state: RecurrentState) -> None:
        """Replace the tensors of a group."""
        self._groups[group] = state

    def clear(self) -> None:
        """Drop all groups, so that every stream starts from zero."""
        self._groups.clear()

    def save(self, groups: list[int]) -> RecurrentState:
        """Concatenate the tensors of several groups, in the given order."""
        return join_states([self._groups[group] for group in groups])

    def load(self, state: RecurrentState, streams: torch.Tensor, group_size: int) -> None:
        """Restore tensors of [`save`] for the streams (B,) of this process, `group_size` of them in a group.

        Raises:
            ValueError: a tensor is missing, unknown or has another shape.
        """
        zero = self.zero(len(streams), "meta")
        check_state(state, {name: tensor.shape for name, tensor in zero.items()}, integer_parts=None)
        for rows in torch.arange(len(streams)).split(group_size):
            part = select_state(state, rows).items()
            self.set(int(streams[rows[0]]), {name: value.to(self.device, zero[name].dtype) for name, value in part})
