"""Many continuations of one text, sampled side by side from one state.

Shape letters: B batch, T steps, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from hf_recurrent.generation.arguments import (
    NEW_TEXT,
    NewText,
    check_positive,
    check_prompt,
    end_tokens,
    given_state,
)
from hf_recurrent.generation.constraints import Constraint
from hf_recurrent.generation.token_choice import check_sampling, draw, sampling_probabilities
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, join_states, select_state, split_state
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
        top_p: sample from the most likely tokens of this probability; 1 for all.
        state: of the text before the prompt; by default, there is none.
        eos_token_id: the end token or tokens; those of the model's generation configuration by default; None for none.
        constraint: what each continuation has to match.
        batch_size: number of continuations at a time; on a CPU, up to 24 of Memora and Hawk are one call of a kernel.

    Raises:
        TypeError: the model has no recurrent state.
        ValueError: there is more than one prompt, `state` is None, or an argument is out of range.
    """
    check_recurrent("model", model)
    check_prompt(input_ids)
    for name, value in (
        ("num_continuations", num_continuations),
        ("max_new_tokens", max_new_tokens),
        ("batch_size", batch_size),
    ):
        check_positive(name, value)
    check_sampling(temperature, top_k, top_p)
    ends = end_tokens(model, eos_token_id, constraint)
    state = given_state("state", state)
    output = model(input_ids=input_ids, state=state, use_cache=True, logits_to_keep=1, return_dict=True)
    found: list[Continuation] = []
    for first in range(0, num_continuations, batch_size):
        seeds = range(seed + first, seed + min(first + batch_size, num_continuations))
        batch = _Batch(output.logits[:, -1], output.state, seeds, max_new_tokens, ends, constraint)
        for step in range(max_new_tokens):
            probabilities = sampling_probabilities(batch.restricted_logits(), temperature, top_k, top_p)
            batch.append(draw(probabilities, batch.uniform(step)))
            if not batch.places or step == max_new_tokens - 1:
                break
            batch.read(model)
        found += batch.finish(model)
    return found


class _Batch:
    """Continuations that are sampled side by side; those that have ended leave it."""

    def __init__(
        self,
        logits: torch.Tensor,
        state: RecurrentState,
        seeds: range,
        steps: int,
        ends: frozenset[int],
        constraint: Constraint | None,
    ):
        rows, self._ends, self._seeds = len(seeds), torch.tensor(sorted(ends), dtype=torch.long), seeds
        self._logits = logits.expand(rows, -1).float().cpu()
        self._state = select_state(state, torch.zeros(rows, dtype=torch.long))
        generators = (torch.Generator().manual_seed(seed) for seed in seeds)
        self._uniform = torch.stack([torch.rand(steps, dtype=torch.float64, generator=g) for g in generators])
        self._tokens = torch.zeros(rows, 0, dtype=torch.long)
        self._log_probabilities = torch.zeros(rows, dtype=torch.float64)
        self._positions = None if constraint is None else [constraint.begin()] * rows
        self.places = list(range(rows))  # numbers of the continuations that have not ended
        self._found: dict[int, tuple[torch.Tensor, float, bool, RecurrentState]] = {}

    def restricted_logits(self) -> torch.Tensor:
        """Logits (B, V) of the next tokens, -inf where the constraint forbids one."""
        if self._positions is None:
            return self._logits
        allowed = torch.stack([position.allowed() for position in self._positions])
        return self._logits.masked_fill(~allowed, -torch.inf)

    def uniform(self, step: int) -> torch.Tensor:
        """The random numbers (B,) of a step."""
        return self._uniform[self.places, step]

    def append(self, tokens: torch.Tensor) -> None:
        """Continue with these tokens (B,); continuations that end leave the batch."""
        chosen = self._logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        self._log_probabilities += chosen
        self._tokens = torch.cat([self._tokens, tokens[:, None]], 1)
        ended = torch.isin(tokens, self._ends)
        for row in ended.nonzero()[:, 0].tolist():
            self._take(row, ended=True)
        if ended.any():
            self._keep((~ended).nonzero()[:, 0])
        if self._positions is not None:
            last = self._tokens[:, -1].tolist()
            self._positions = [position.after(token) for position, token in zip(self._positions, last, strict=True)]

    def read(self, model: PreTrainedModel) -> None:
        """Read the last token of every continuation."""
        output = model(
            input_ids=self._tokens[:, -1:].to(model.device), state=self._state, use_cache=True, return_dict=True
        )
        self._logits, self._state = output.logits[:, -1].float().cpu(), output.state

    def finish(self, model: PreTrainedModel) -> list[Continuation]:
        """All continuations, in the order of their seeds, after reading the last token of each."""
        for row in range(len(self.places)):
            self._take(row, ended=False)
        found = [self._found[place] for place in sorted(self._found)]
        last = torch.stack([tokens[-1:] for tokens, *_ in found]).to(model.device)
        pending = join_states([state for *_, state in found])
        state = model(input_ids=last, state=pending, use_cache=True, logits_to_keep=1, return_dict=True).state
        return [
            Continuation(tokens, log_probability, ended, seed, after, before)
            for (tokens, log_probability, ended, before), seed, after in zip(
                found, self._seeds, split_state(state), strict=True
            )
        ]

    def _take(self, row: int, ended: bool) -> None:
        state = select_state(self._state, torch.tensor([row]))
        self._found[self.places[row]] = (self._tokens[row].clone(), float(self._log_probabilities[row]), ended, state)

    def _keep(self, rows: torch.Tensor) -> None:
        self._state = select_state(self._state, rows)
        self._tokens, self._log_probabilities = self._tokens[rows], self._log_probabilities[rows]
        self.places = [self.places[row] for row in rows.tolist()]
        if self._positions is not None:
            self._positions = [self._positions[row] for row in rows.tolist()]
