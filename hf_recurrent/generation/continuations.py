"""Many continuations of one text, sampled side by side from one state.

Shape letters: B batch, T steps, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_recurrent.argument_checks import check_sampling
from hf_recurrent.generation.arguments import NEW_TEXT, NewText, check_prompt, end_tokens, given_state
from hf_recurrent.generation.constraints import Constraint
from hf_recurrent.generation.sampling import Sampling, draw
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, join_states, select_state, split_state
from hf_recurrent.modeling.contexts.counted_predictions import chosen_bytes
from hf_recurrent.stock_models.with_state import check_recurrent


@dataclass
class Continuation:
    """One continuation of a text.

    Args:
        tokens: the new ones, (T,) on the CPU, including the end token.
        log_probability: of all of them after the text, in nats, by the model itself: at temperature 1, without
            `top_k`, `top_p` and constraint.
        ended: the last token is an end token; otherwise `max_new_tokens` was reached.
        seed: of its random numbers.
        state: the state (1, …) after all tokens, as after `generate()`.
        pending_state: the state before the last token. To continue without new text, pass it with that token.
    """

    tokens: torch.Tensor
    log_probability: float
    ended: bool
    seed: int
    state: RecurrentState
    pending_state: RecurrentState


@torch.no_grad()
def sample_continuations(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    num_continuations: int,
    *,
    max_new_tokens: int = 200,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    state: RecurrentState | NewText = NEW_TEXT,
    eos_token_id: int | Sequence[int] | str | None = "model",
    constraint: Constraint | None = None,
    batch_size: int = 24,
) -> list[Continuation]:
    """Sample continuations of one text, which is read once: its state is copied for each of them.

    The first one draws its numbers from `seed`, the next from `seed` + 1, and so on; none depends on the others.
    In float32, the last bits of the logits may depend on the number of rows.

    Args:
        model: a recurrent language model.
        input_ids: (1, T), the prompt, T ≥ 1.
        num_continuations: how many.
        max_new_tokens: largest number of new tokens in each.
        seed: of the first continuation.
        temperature: divides the logits.
        top_k: sample from the k most likely tokens; 0 for all.
        top_p: sample from the most likely tokens that together have this probability; 1 for all.
        state: of the text before the prompt; by default, there is none.
        eos_token_id: the end token or tokens, by default from the model's generation configuration; None for none.
        constraint: a form that each continuation has to match.
        batch_size: number of continuations at a time; on a CPU, up to 24 of Memora and Hawk are one call of a kernel.

    Raises:
        TypeError: the model has no recurrent state.
        ValueError: there is more than one prompt, `state` is None, or an argument is out of range.
    """
    check_recurrent("model", model)
    counts = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    check_prompt(input_ids, num_continuations=num_continuations, **counts)
    check_sampling(temperature, top_k, top_p, instead_of_zero="`generate(do_sample=False)`")
    ends, state = end_tokens(model, eos_token_id, constraint), given_state("state", state)
    read = model(input_ids=input_ids, state=state, use_cache=True, logits_to_keep=1, return_dict=True)
    rows = [_Row(seed + number, max_new_tokens, ends, constraint) for number in range(num_continuations)]
    for first in range(0, num_continuations, batch_size):
        batch = rows[first : first + batch_size]
        _sample(model, read.logits[:, -1], read.state, batch, Sampling(temperature, top_k, top_p))
    return [row.result for row in rows]


class _Row:
    """One continuation while it is sampled."""

    def __init__(self, seed: int, max_new_tokens: int, ends: frozenset[int], constraint: Constraint | None):
        self.seed, self.tokens, self.log_probability = seed, [], 0.0
        self.position = None if constraint is None else constraint.begin()
        self.pending_state: RecurrentState = {}
        self.result: Continuation
        self._ends, self._max_new_tokens = ends, max_new_tokens

    def random_numbers(self) -> torch.Tensor:
        """One number in [0, 1) for each new token."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(self._max_new_tokens, dtype=torch.float64, generator=generator)

    def append(self, token: int, log_probability: float) -> None:
        self.tokens.append(token)
        self.log_probability += log_probability
        self.position = self.position and self.position.after(token)

    @property
    def ended(self) -> bool:
        return self.tokens[-1] in self._ends

    @property
    def is_complete(self) -> bool:
        return self.ended or len(self.tokens) == self._max_new_tokens


def _sample(
    model: PreTrainedModel, logits: torch.Tensor, state: RecurrentState, rows: Sequence[_Row], sampling: Sampling
) -> None:
    """Complete the rows after logits (1, V) and a state of one stream; rows that end leave the batch."""
    running, logits = list(rows), logits.expand(len(rows), -1).float().cpu()
    options = chosen_bytes(model) | getattr(model, "loop_of_steps", dict)()  # stock models have none
    state = select_state(state, [0] * len(rows))
    uniform = torch.stack([row.random_numbers() for row in rows], 1)  # (steps, B)
    while True:
        tokens = draw(sampling.probabilities(_restricted(logits, running)), uniform[len(running[0].tokens)])
        scores = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()
        for row, token, score in zip(running, tokens.tolist(), scores, strict=True):
            row.append(token, score)
        kept = [place for place, row in enumerate(running) if not row.is_complete]
        for place, row in enumerate(running):
            if row.is_complete:
                row.pending_state = select_state(state, place)
        if not kept:
            break
        if len(kept) < len(running):
            running, uniform, state = [running[place] for place in kept], uniform[:, kept], select_state(state, kept)
        logits, state = _read_last(model, running, state, options)
        logits = logits.float().cpu()
    _, state = _read_last(model, rows, join_states([row.pending_state for row in rows]), options)
    for row, after in zip(rows, split_state(state), strict=True):
        tokens = torch.tensor(row.tokens)
        row.result = Continuation(tokens, row.log_probability, row.ended, row.seed, after, row.pending_state)


def _read_last(
    model: PreTrainedModel, rows: Sequence[_Row], state: RecurrentState, options: dict[str, Any]
) -> tuple[torch.Tensor, RecurrentState]:
    """Logits (B, V) and state after reading the last token of every row."""
    input_ids = torch.tensor([row.tokens[-1:] for row in rows], device=model.device)
    output = model(input_ids=input_ids, state=state, use_cache=True, return_dict=True, **options)
    return output.logits[:, -1], output.state


def _restricted(logits: torch.Tensor, rows: Sequence[_Row]) -> torch.Tensor:
    """Logits (B, V), -inf where the constraint of a row forbids a token."""
    if rows[0].position is None:
        return logits
    return logits.masked_fill(~torch.stack([row.position.allowed() for row in rows]), -torch.inf)
