"""The state that `generate()` returns: after the last byte of each row, and before it.

Shape letters: B batch, T steps.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from .recurrent_state import RecurrentState, select_state

# `past_key_values` until transformers 5.23.
CACHE_FIELD = next(name for name in ("cache", "past_key_values") if name in GenerateDecoderOnlyOutput.__annotations__)


@dataclass
class RecurrentGenerateOutput(GenerateDecoderOnlyOutput):
    """Output of `generate(return_dict_in_generate=True)`; fields that are not listed are those of transformers.

    Args:
        state: the state after all bytes of each row of `sequences`, the end byte included and padding not. To continue
            with new text, `generate(new_text, state=output.state)`. None with `use_cache=False`.
        cache: the state before the last byte of each row, as `pending_state`. To continue without new text, pass it
            with the last byte of each row. Until transformers 5.23 its name is `past_key_values`.
    """

    state: RecurrentState | None = None

    @property
    def pending_state(self) -> RecurrentState | None:
        """The state before the last byte of each row."""
        return self.get(CACHE_FIELD)


@dataclass
class RecurrentGenerateBeamOutput(GenerateBeamDecoderOnlyOutput):
    """As [`RecurrentGenerateOutput`], for beam search."""

    state: RecurrentState | None = None

    @property
    def pending_state(self) -> RecurrentState | None:
        """The state before the last byte of each row."""
        return self.get(CACHE_FIELD)


class StateRecorder:
    """The states that a decoding loop has after the prompt and after the latest byte that it has read."""

    def __init__(self):
        self.after_prompt: RecurrentState | None = None
        self.latest: RecurrentState | None = None

    def record(self, state: RecurrentState | None) -> None:
        if self.after_prompt is None:
            self.after_prompt = state
        self.latest = state


class RowEnds(StoppingCriteriaList):
    """Stopping criteria that keep the state and the length of each row that they end.

    The loop goes on reading padding for such a row until all rows have ended.
    """

    def __init__(self, criteria: StoppingCriteriaList, recorder: StateRecorder):
        super().__init__(criteria)
        self.recorder = recorder
        self.found: dict[int, tuple[int, RecurrentState]] = {}  # row → length, state before its last byte

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        ended = super().__call__(input_ids, scores, **options)
        latest = self.recorder.latest
        if len(ended) > 1 and latest is not None:
            for row in ended.nonzero()[:, 0].tolist():
                if row not in self.found:
                    self.found[row] = input_ids.shape[1], select_state(latest, torch.tensor([row]))
        return ended

    def last_bytes(self, sequences: torch.Tensor) -> tuple[torch.Tensor, RecurrentState | None]:
        """The last byte (B, 1) of each row that is not padding, and the state before it."""
        last, latest = sequences[:, -1:].clone(), self.recorder.latest
        state = latest if latest is None else {name: tensor.clone() for name, tensor in latest.items()}
        for row, (length, found) in self.found.items():
            last[row] = sequences[row, length - 1]
            for name, tensor in found.items():
                state[name][row] = tensor[0]
        return last, state


class GeneratedStateMixin:
    """For a generation mixin of models whose `forward` takes and returns a `state`: `generate()` returns it."""

    def generate(self, *arguments: Any, **kwargs: Any) -> Any:
        """As `transformers.GenerationMixin.generate`.

        Raises:
            ValueError: `state` is None.
        """
        if "state" in kwargs and kwargs["state"] is None:
            raise ValueError(
                "`state` is None; to begin a new text, leave it out or pass `model.init_state(batch_size)`."
            )
        return super().generate(*arguments, **kwargs)

    def prepare_inputs_for_generation(self, input_ids, state_recorder=None, **kwargs):
        return super().prepare_inputs_for_generation(input_ids, **kwargs)

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **options):
        if (recorder := model_kwargs.get("state_recorder")) is not None:
            recorder.record(outputs.get("state"))
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, **options)

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        if not generation_config.return_dict_in_generate:
            return super()._sample(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
        kwargs["state_recorder"] = recorder = StateRecorder()
        ends = RowEnds(stopping_criteria, recorder)
        output = super()._sample(input_ids, logits_processor, ends, generation_config, **kwargs)
        if recorder.latest is None:
            return RecurrentGenerateOutput(**output)
        last, pending = ends.last_bytes(output.sequences)
        fields = {**output, CACHE_FIELD: pending, "state": self._read_new(last, pending)}
        return RecurrentGenerateOutput(**fields)

    def _beam_search(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        if not generation_config.return_dict_in_generate:
            return super()._beam_search(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
        kwargs["state_recorder"] = recorder = StateRecorder()
        output = super()._beam_search(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
        if recorder.after_prompt is None:
            return RecurrentGenerateBeamOutput(**output)
        # The states of the loop are those of the beams that still run: read the new bytes of the best ones again.
        new, steps = output.sequences[:, input_ids.shape[1] :], (output.beam_indices >= 0).sum(1, keepdim=True)
        prompts = torch.arange(len(input_ids) // generation_config.num_beams) * generation_config.num_beams
        pending = select_state(
            recorder.after_prompt, prompts.repeat_interleave(generation_config.num_return_sequences)
        )
        if new.shape[1] > 1:
            mask = torch.arange(new.shape[1] - 1, device=new.device) < steps - 1
            pending = self._read_new(new[:, :-1], pending, mask.long())
        state = self._read_new(new.gather(1, steps - 1), pending)
        return RecurrentGenerateBeamOutput(**{**output, CACHE_FIELD: pending, "state": state})

    def _read_new(
        self, new: torch.Tensor, state: RecurrentState, attention_mask: torch.Tensor | None = None
    ) -> RecurrentState:
        """The state after reading (B, T) more bytes."""
        return self(
            input_ids=new,
            attention_mask=attention_mask,
            state=state,
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
        ).state
