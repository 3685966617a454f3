"""`LearnerStream`: the part of an online learner that belongs to one stream of bytes."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_recurrent.learning_rules.compiled_block import Block
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, detach_state


@dataclass
class LearnerStream:
    """A stream and the bytes of it that wait for a full block; weights, optimizer and scores belong to the learner.

    Args:
        state: after the bytes that were learned from.
        carried: sensitivities, as the learning rule carries them.
        last: the last byte, whose successor is unknown, and True if it begins an episode; None between episodes.
        waiting: (byte, next byte, True if the first begins an episode) of an incomplete block.
    """

    state: RecurrentState
    carried: RecurrentState
    last: tuple[int, bool] | None = None
    waiting: list[tuple[int, int, bool]] = field(default_factory=list)

    def add(self, token: int, ends_episode: bool) -> None:
        """Add the next byte, the target of the last one."""
        last, self.last = self.last, None if ends_episode else (token, self.last is None)
        if last is not None:
            self.waiting.append((last[0], token, last[1]))

    def block(self, size: int, device: torch.device) -> Block:
        """Input ids, labels and resets of the first `size` waiting bytes, (1, T) each."""
        columns = zip(*self.waiting[:size], strict=True)
        return tuple(torch.tensor([column], device=device) for column in columns)

    def advance(self, size: int, state: RecurrentState) -> None:
        """Drop the first `size` waiting bytes, after which the state is `state`."""
        self.state = {name: aligned(tensor) for name, tensor in detach_state(state).items()}
        del self.waiting[:size]

    def context(self, model: PreTrainedModel) -> dict[str, Any]:
        """Arguments for `model.generate` to continue the stream.

        Raises:
            ValueError: the stream is at the beginning of an episode.
        """
        if self.last is None:
            raise ValueError("There is no text to continue: the stream is at the beginning of an episode.")
        tokens = [(token, begins) for token, _, begins in self.waiting] + [self.last]
        begin = max((index for index, (_, begins) in enumerate(tokens) if begins), default=None)
        state = self.state if begin is None else model.init_state(1)
        input_ids = torch.tensor([[token for token, _ in tokens[begin:]]], device=model.device)
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "state": state}


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy aligned like a new one: alignment decides how sums are rounded, and a resumed run has to
    round like an uninterrupted one."""
    is_aligned = tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
    return tensor if is_aligned else tensor.clone(memory_format=torch.contiguous_format)
