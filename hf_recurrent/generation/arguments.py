"""Checks of arguments that all ways of generation share."""

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final

import torch
from transformers import PreTrainedModel

from hf_recurrent.modeling.block.recurrent_state import RecurrentState

if TYPE_CHECKING:
    from hf_recurrent.generation.constraints import Constraint


class NewText(Enum):
    """Default of `state`: no text before the prompt. None is refused, as a variable that was not set."""

    NEW_TEXT = "new text"

    def __repr__(self) -> str:
        return self.name


NEW_TEXT: Final = NewText.NEW_TEXT


def given_state(name: str, state: RecurrentState | NewText) -> RecurrentState | None:
    """`state` as `forward` takes it, None for a new text; raise a ValueError if it is None."""
    if state is None:
        raise ValueError(f"`{name}` is None; to begin a new text, leave it out or pass `model.init_state(1)`.")
    return None if state is NEW_TEXT else state


def check_prompt(input_ids: torch.Tensor, **counts: int) -> None:
    """Raise an error unless `input_ids` is one prompt (1, T) of at least one token, and each count is at least 1."""
    if not isinstance(input_ids, torch.Tensor):
        raise TypeError(f"`input_ids` is of type {type(input_ids).__name__}; it must be a torch.Tensor.")
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
        raise ValueError(f"`input_ids` has shape {tuple(input_ids.shape)}; it must be (1, T), one prompt with T ≥ 1.")
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"`{name}` is {value}; it must be at least 1.")


def end_token_list(eos_token_id: int | Sequence[int] | None) -> list[int]:
    """An `eos_token_id`, which may be one number or None, as a list in its order."""
    given = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id
    return [int(token) for token in given]


def end_tokens(
    model: PreTrainedModel, eos_token_id: int | Sequence[int] | str | None, constraint: "Constraint | None"
) -> frozenset[int]:
    """The tokens that end a text; for "model", as in the model's generation configuration.

    Raises a ValueError if the constraint's end token is not one of them, so that a complete text could not end.
    """
    if eos_token_id == "model":
        eos_token_id = model.generation_config.eos_token_id
    ends = frozenset(end_token_list(eos_token_id))
    if constraint is not None and constraint.end_token_id not in ends:
        raise ValueError(f"`eos_token_id` is {sorted(ends)}; it must have {constraint.end_token_id}, as `constraint`.")
    return ends
