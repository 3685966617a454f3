"""Carried state: tensors that every stream hands from block to block, such as a model's state and sensitivities."""

from collections.abc import Callable

import torch

from hf_recurrent.modeling.recurrent_state import RecurrentState, check_state, concatenate_states, select_state


class CarriedState:
    """The carried tensors of each group of streams (one micro-batch of one process), batch first.

    A group is known by the global number of its first stream.

    Args:
        zero: batch size and device → the tensors that new streams start from.
        device: device of the carried tensors.
    """

    def __init__(self, zero: Callable[[int, torch.device | str], RecurrentState], device: torch.device):
        self.zero, self.device = zero, device
        self._groups: dict[int, RecurrentState] = {}

    @property
    def groups(self) -> list[int]:
        """The groups that carry something, in order."""
        return sorted(self._groups)

    def get(self, group: int, batch_size: int) -> RecurrentState:
        """The tensors of a group; zero before its first block."""
        if group not in self._groups:
            self._groups[group] = self.zero(batch_size, self.device)
        return self._groups[group]

    def set(self, group: int, state: RecurrentState) -> None:
        """Replace the tensors of a group."""
        self._groups[group] = state

    def clear(self) -> None:
        """Forget all groups: every stream starts from zero again."""
        self._groups.clear()

    def save(self, groups: list[int]) -> RecurrentState:
        """The tensors of several groups as one, in the order given."""
        return concatenate_states([self._groups[group] for group in groups])

    def load(self, state: RecurrentState, streams: torch.Tensor, group_size: int) -> None:
        """Take over tensors that [`save`] returned.

        Args:
            state: tensors of all `streams`, batch first.
            streams: (B,) global numbers of this process's streams.
            group_size: streams of a group.

        Raises:
            ValueError: a tensor is missing, unknown or of another shape.
        """
        zero = self.zero(len(streams), "meta")
        check_state(state, {name: tensor.shape for name, tensor in zero.items()})
        for rows in torch.arange(len(streams)).split(group_size):
            part = select_state(state, rows)
            self.set(
                int(streams[rows[0]]),
                {name: tensor.to(self.device, zero[name].dtype) for name, tensor in part.items()},
            )
