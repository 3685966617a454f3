"""Reading bytes of one stream with the logits and the state after each of them.

Shape letters: B streams, T steps, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from hf_recurrent.modeling.block.recurrent_causal_lm import RecurrentForCausalLM
from hf_recurrent.modeling.block.recurrent_state import RecurrentState
from hf_recurrent.modeling.contexts.count_memory import STATE_PART
from hf_recurrent.modeling.contexts.counted_predictions import take_counts
from hf_recurrent.modeling.step.compiled_step import CompiledStep
from hf_recurrent.modeling.step.single_step import find_single_step
from hf_recurrent.stock_models.with_state import check_recurrent

# Of drafts. Longer blocks may be read faster by `forward`, whose scan is parallel.
_MOST_CHAINED = 24


@dataclass
class Reading:
    """The result of reading T bytes."""

    logits: torch.Tensor  # (T, V), after each byte
    # By the number of bytes before them: of 0 and T at least, of all in between where they cost nothing.
    states: dict[int, RecurrentState]


class StateReader:
    """Reads bytes of one stream, a block in one forward pass. The model must not change meanwhile.

    On a CPU, a block of up to `longest_chain` bytes is rows of the compiled step, each of which starts from the state
    of the row before it: the results equal single steps bit for bit, and there is a state after every byte. Everywhere
    else it is `forward`, whose results may differ from single steps in the last bits.
    """

    def __init__(self, model: PreTrainedModel, name: str = "model", longest_chain: int = _MOST_CHAINED):
        check_recurrent(name, model)
        self.longest_chain = longest_chain
        # Looked up once: a property of the model goes through its parameters.
        self.model, self.device, self.forwards = model, model.device, 0
        with torch.no_grad():
            self._step = _compiled_step(model)

    def read_prompt(
        self, input_ids: torch.Tensor, state: RecurrentState | None
    ) -> tuple[torch.Tensor, RecurrentState]:
        """Logits (V,) and state after a prompt (1, T), read as `generate()` reads it."""
        self.forwards += 1
        input_ids = input_ids.to(self.device)
        output = self.model(input_ids=input_ids, state=state, use_cache=True, logits_to_keep=1, return_dict=True)
        return output.logits[0, -1], output.state

    def read(
        self,
        tokens: Sequence[int],
        state: RecurrentState,
        is_sampled: bool = True,
        change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Reading:
        """Read at least one byte after `state`.

        Args:
            tokens: the bytes.
            state: before them.
            is_sampled: the model itself has chosen them; a count memory does not learn from those.
            change: of the network's logits (T, V).
        """
        self.forwards += 1
        input_ids = torch.tensor([tokens], device=self.device)
        memory = None if self.model.training else getattr(self.model, "count_memory", None)
        rest, counts = take_counts(state, memory)
        reading = self._read_compiled(input_ids, rest) if len(tokens) <= self.longest_chain else None
        if reading is None:
            output = self.model(input_ids=input_ids, state=rest, use_cache=True, return_dict=True)
            reading = Reading(output.logits[0], {0: rest, len(tokens): output.state})
        if change is not None:
            reading.logits = change(reading.logits)
        if counts is None:
            return reading
        logits = reading.logits.unsqueeze(0)
        mixed, counts = self.model.mix_counts(input_ids, counts, logits, slice(None), sampled=is_sampled)
        # The memory has no states in between.
        return Reading(mixed[0], {0: state, len(tokens): reading.states[len(tokens)] | {STATE_PART: counts}})

    def step(self, input_ids: torch.Tensor, state: RecurrentState) -> tuple[torch.Tensor, RecurrentState] | None:
        """Logits (B, 1, V) and state after the next byte (B, 1) of each of B streams; None without a compiled step.

        The step was looked up once, so that no call looks at every weight.
        """
        if self._step is None or not self._step.accepts(input_ids):
            return None
        return self._step.run(self.model, input_ids, state)

    def _read_compiled(self, input_ids: torch.Tensor, state: RecurrentState) -> Reading | None:
        """Read (1, T) as rows of the compiled step; None where there is none."""
        if self._step is None:
            return None
        if (steps := input_ids.shape[1]) == 1:
            single = self._step.run(self.model, input_ids, state)
            return single and Reading(single[0][0], {0: state, 1: single[1]})
        chained = self._step.run_chain(self.model, input_ids, state)
        return chained and Reading(chained[0][0], _StatesOfSteps(chained[1], steps))


@dataclass
class UnreadText:
    """A text whose last tokens its model has not read, at least one once the first was chosen."""

    reader: StateReader
    state: RecurrentState | None  # before the unread tokens
    unread: list[int] = field(default_factory=list, init=False)

    def pending_state(self) -> RecurrentState | None:
        """The state after all tokens but the last."""
        if len(self.unread) > 1:
            self.state = self.reader.read(self.unread[:-1], self.state).states[len(self.unread) - 1]
            self.unread = self.unread[-1:]
        return self.state

    def final_state(self) -> RecurrentState | None:
        return self.reader.read(self.unread, self.state).states[len(self.unread)]


class _StatesOfSteps(dict):
    """Step → state, cut out of tensors (T + 1, …) on access."""

    def __init__(self, states: RecurrentState, steps: int):
        super().__init__((step, None) for step in range(steps + 1))
        self._states = states

    def __getitem__(self, step: int) -> RecurrentState:
        return {name: tensor[step : step + 1] for name, tensor in self._states.items()}


def _compiled_step(model: PreTrainedModel) -> CompiledStep | None:
    """The compiled step of a model whose `forward` is the usual one, without hooks."""
    if type(model).forward is not RecurrentForCausalLM.forward or "forward" in vars(model):
        return None
    if model._forward_hooks or model._forward_pre_hooks:
        return None
    step = find_single_step(model, torch.zeros(1, 1, dtype=torch.long, device=model.device))
    return step if isinstance(step, CompiledStep) else None
