"""Generation with a recurrent state, and the state that `generate()` returns, after and before each row's last byte.

`transformers.GenerationMixin` keeps attention caches, so its hooks are overridden where a state is carried instead.

Shape letters: B batch, T steps, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from ..contexts.counted_predictions import chosen_bytes
from .recurrent_state import RecurrentState, check_state, select_state
from .tensor_checks import check_tensor, has_values

# `past_key_values` until transformers 5.23.
_CACHE_FIELD = next(name for name in ("cache", "past_key_values") if name in GenerateDecoderOnlyOutput.__annotations__)
CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")  # of stock models, by release and family


class _GeneratedState:
    @property
    def pending_state(self) -> RecurrentState | None:
        """The state before the last byte of each row."""
        return self.get(_CACHE_FIELD)


@dataclass
class RecurrentGenerateOutput(_GeneratedState, GenerateDecoderOnlyOutput):
    """Output of `generate(return_dict_in_generate=True)`; the other fields are transformers'.

    Args:
        state: the state after all bytes of each row of `sequences`, the end byte included and padding not. To continue
            with new text, `generate(new_text, state=output.state)`. None with `use_cache=False`.
        cache: the state before the last byte of each row, as `pending_state`. To continue without new text, pass it
            with the last byte of each row. Until transformers 5.23 its name is `past_key_values`.
    """

    state: RecurrentState | None = None


@dataclass
class RecurrentGenerateBeamOutput(_GeneratedState, GenerateBeamDecoderOnlyOutput):
    """As [`RecurrentGenerateOutput`], for beam search."""

    state: RecurrentState | None = None


class GeneratedStates(StoppingCriteriaList):
    """Stopping criteria that keep the states of a decoding loop: after the prompt, after the latest byte that it has
    read, and at the end of each row, where the loop continues with padding until all rows have ended.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        super().__init__(criteria)
        self.after_prompt: RecurrentState | None = None
        self.latest: RecurrentState | None = None
        self.found: dict[int, tuple[int, RecurrentState]] = {}  # row → length, state before its last byte

    def record(self, state: RecurrentState | None) -> None:
        if self.after_prompt is None:
            self.after_prompt = state
        self.latest = state

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        ended = super().__call__(input_ids, scores, **options)
        if len(ended) > 1 and self.latest is not None:
            for row in ended.nonzero()[:, 0].tolist():
                if row not in self.found:
                    self.found[row] = input_ids.shape[1], select_state(self.latest, torch.tensor([row]))
        return ended

    def last_bytes(self, sequences: Tensor) -> tuple[Tensor, RecurrentState]:
        """The last byte (B, 1) of each row that is not padding, and the state before it."""
        last = sequences[:, -1:].clone()
        state = {name: tensor.clone() for name, tensor in self.latest.items()}
        for row, (length, found) in self.found.items():
            last[row] = sequences[row, length - 1]
            for name, tensor in found.items():
                state[name][row] = tensor[0]
        return last, state


def _check_drafts(options: dict[str, Any]) -> None:
    """Raise a ValueError if text is to be drafted: transformers then cuts a cache back, which a state forbids."""
    config = options.get("generation_config")
    looked_up = options.get("prompt_lookup_num_tokens") or getattr(config, "prompt_lookup_num_tokens", None)
    for name, given, draft in (
        ("assistant_model", options.get("assistant_model") is not None, "draft=assistant_model"),
        ("assistant_model", getattr(config, "is_assistant", False), "draft=..."),
        ("prompt_lookup_num_tokens", looked_up, "draft='prompt-lookup'"),
    ):
        if given:
            raise ValueError(
                f"`{name}` of `generate` cannot be used with a recurrent model, whose state cannot be cut back to the "
                f"accepted tokens; use `hf_recurrent.generate_speculative(model, input_ids, {draft})`."
            )


class StatefulGeneration:
    """For a model with a `GenerationMixin` whose `forward` takes and returns a `state`: `generate()` does so too."""

    def generate(self, *arguments: Any, **kwargs: Any) -> Any:
        """As `transformers.GenerationMixin.generate`.

        Raises:
            ValueError: `state` is None, or another model or prompt lookup is to propose text.
        """
        _check_drafts(kwargs)
        if "state" in kwargs and kwargs["state"] is None:
            raise ValueError(
                "`state` is None; to begin a new text, leave it out or pass `model.init_state(batch_size)`."
            )
        return super().generate(*arguments, **kwargs)

    def prepare_inputs_for_generation(self, input_ids, state_recorder=None, **kwargs):
        return super().prepare_inputs_for_generation(input_ids, **kwargs)

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **options):
        state = outputs.get("state")
        if (recorder := model_kwargs.get("state_recorder")) is not None:
            recorder.record(state)
        if state is not None:
            # The state has read the padding, and no other cache is filled.
            model_kwargs = {name: value for name, value in model_kwargs.items() if name not in CACHE_ARGUMENTS}
            model_kwargs |= {"attention_mask": None, "state": state}
        model_kwargs |= chosen_bytes(self)
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, **options)

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs):
        state = model_kwargs.pop("state", None)
        if state is not None:
            check_state(
                state, self.state_shapes(len(input_ids)), input_ids.device, integer_parts=self.integer_state_parts
            )
        input_ids, model_kwargs = super()._expand_inputs_for_generation(
            expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **model_kwargs
        )
        if state is not None:
            model_kwargs["state"] = {name: row.repeat_interleave(expand_size, 0) for name, row in state.items()}
        return input_ids, model_kwargs

    @staticmethod
    def _reorder_cache(cache: Any, beam_idx: Tensor) -> Any:
        if isinstance(cache, dict):
            return select_state(cache, beam_idx)
        cache.reorder_cache(beam_idx)  # of a stock model without a state
        return cache

    def _sample(self, input_ids, *, stopping_criteria, generation_config, **options):
        options["generation_config"] = generation_config
        if not generation_config.return_dict_in_generate:
            return super()._sample(input_ids, stopping_criteria=stopping_criteria, **options)
        recorder = GeneratedStates(stopping_criteria)
        output = super()._sample(input_ids, stopping_criteria=recorder, state_recorder=recorder, **options)
        if recorder.latest is None:
            return RecurrentGenerateOutput(**output)
        last, pending = recorder.last_bytes(output.sequences)
        state = self._read_new(last, pending)
        return RecurrentGenerateOutput(**{**output, _CACHE_FIELD: pending, "state": state})

    def _beam_search(self, input_ids, *, stopping_criteria, generation_config, **options):
        options |= {"stopping_criteria": stopping_criteria, "generation_config": generation_config}
        if not generation_config.return_dict_in_generate:
            return super()._beam_search(input_ids, **options)
        recorder = GeneratedStates(stopping_criteria)
        output = super()._beam_search(input_ids, state_recorder=recorder, **options)
        if recorder.after_prompt is None:
            return RecurrentGenerateBeamOutput(**output)
        # The loop's states belong to the beams that still run: read the new bytes of the best ones again.
        new, steps = output.sequences[:, input_ids.shape[1] :], (output.beam_indices >= 0).sum(1, keepdim=True)
        prompts = torch.arange(len(input_ids) // generation_config.num_beams) * generation_config.num_beams
        pending = select_state(
            recorder.after_prompt, prompts.repeat_interleave(generation_config.num_return_sequences)
        )
        if new.shape[1] > 1:
            mask = torch.arange(new.shape[1] - 1, device=new.device) < steps - 1
            pending = self._read_new(new[:, :-1], pending, mask.long())
        state = self._read_new(new.gather(1, steps - 1), pending)
        return RecurrentGenerateBeamOutput(**{**output, _CACHE_FIELD: pending, "state": state})

    def _read_new(self, new: Tensor, state: RecurrentState, attention_mask: Tensor | None = None) -> RecurrentState:
        """The state after reading (B, T) more bytes, chosen by this model."""
        options = {"use_cache": True, "logits_to_keep": 1, "return_dict": True, **chosen_bytes(self)}
        return self(input_ids=new, attention_mask=attention_mask, state=state, **options).state


class RecurrentGuidance(UnbatchedClassifierFreeGuidanceLogitsProcessor):
    """Classifier-free guidance that carries the state of the unconditional text, in place of an attention cache."""

    def __init__(self, stock: UnbatchedClassifierFreeGuidanceLogitsProcessor):
        context = stock.unconditional_context
        super().__init__(stock.guidance_scale, stock.model, context["input_ids"], context["attention_mask"])
        self.state: RecurrentState | None = None
        self.loop = getattr(self.model, "loop_of_steps", dict)()  # stock models have none

    def get_unconditional_logits(self, input_ids: torch.LongTensor) -> Tensor:
        """Logits (B, 1, V) after the negative prompt, by default the last byte of the prompt, and the new bytes."""
        mask, options = None, {"use_cache": True, "logits_to_keep": 1}
        if self.state is None and self.unconditional_context["input_ids"] is not None:
            input_ids, mask = (self.unconditional_context[name] for name in ("input_ids", "attention_mask"))
        else:
            input_ids = input_ids[:, -1:]
        if self.state is not None:
            options |= chosen_bytes(self.model) | self.loop
        output = self.model(input_ids, attention_mask=mask, state=self.state, **options)
        self.state = output.state
        return output.logits


class RecurrentGenerationMixin(StatefulGeneration, GenerationMixin):
    """Generation by our own models: also from empty prompts, with guidance, and without an attention cache."""

    def generate(self, inputs: Tensor | None = None, *arguments, **kwargs):
        """As `transformers.GenerationMixin.generate`.

        An empty prompt is a new episode: the end byte is read from the zero state, and is the first of the result.
        `state` has read the text before the prompt. With `return_dict_in_generate=True`, the result is a
        [`RecurrentGenerateOutput`] with the state after all bytes of each row.

        A processor, criterion or streamer may change the model. Values of weights that are changed in place, and new
        hooks, act at the next byte, some other changes up to 64 bytes later ([`StepLoop`]).

        Raises:
            ValueError: `state` is None, or an empty prompt has a state or no end byte.
        """
        if kwargs.get("inputs_embeds") is None:
            prompt = inputs if inputs is not None else kwargs.pop("input_ids", None)
            if prompt is not None:
                check_tensor("inputs", prompt)
            inputs, kwargs["attention_mask"] = self._begin_empty_prompts(prompt, kwargs.get("attention_mask"), kwargs)
        return super().generate(inputs, *arguments, **kwargs)

    def _begin_empty_prompts(
        self, prompt: Tensor | None, mask: Tensor | None, options: dict
    ) -> tuple[Tensor | None, Tensor | None]:
        """The prompt (B, T) and its mask, with the end byte in rows without a byte."""
        config = options.get("generation_config") or self.generation_config
        end = next((value for value in (config.bos_token_id, config.eos_token_id) if value is not None), None)
        end = end[0] if isinstance(end, list) else end
        if prompt is None or (prompt.dim() == 2 and prompt.shape[1] == 0):
            if options.get("state") is not None:
                raise ValueError("The prompt is empty; after a `state` it must have the byte to read next.")
            if end is None:
                raise ValueError("The prompt is empty; this model has no end byte, so it must have at least one byte.")
            prompt = torch.full((1 if prompt is None else len(prompt), 1), int(end), device=self.device)
            return prompt, torch.ones_like(prompt)  # without a mask, the end byte may be taken for padding
        if mask is None or mask.shape != prompt.shape or not has_values(mask) or end is None:
            return prompt, mask
        empty = ~(mask != 0).any(1)
        if options.get("state") is not None or not bool(empty.any()):
            return prompt, mask
        prompt, mask = prompt.clone(), mask.clone()
        prompt[empty, -1], mask[empty, -1] = int(end), 1
        return prompt, mask

    def _get_logits_processor(self, *arguments, **kwargs) -> LogitsProcessorList:
        processors = super()._get_logits_processor(*arguments, **kwargs)
        stock = UnbatchedClassifierFreeGuidanceLogitsProcessor
        return LogitsProcessorList(RecurrentGuidance(p) if type(p) is stock else p for p in processors)

    def _sample(self, input_ids, **options):
        return super()._sample(input_ids, **options, **self.loop_of_steps())

    def _beam_search(self, input_ids, **options):
        return super()._beam_search(input_ids, **options, **self.loop_of_steps())

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def prepare_inputs_for_generation(self, input_ids, inputs_embeds=None, **kwargs):
        """A given state has read everything before the prompt: first the whole prompt is read, then single bytes."""
        reads_one_byte = kwargs.get("state") is not None and kwargs.get("next_sequence_length") == 1
        if reads_one_byte and not kwargs.get("is_first_iteration"):
            # Only the byte changes: the general way costs as much as a small model.
            left_out = ("next_sequence_length", "is_first_iteration", "position_ids", "labels", "state_recorder")
            inputs = {name: value for name, value in kwargs.items() if name not in left_out}
            return {**inputs, "input_ids": input_ids[:, -1:], "logits_to_keep": 1}
        kwargs.pop("step_loop", None)
        inputs = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        inputs["logits_to_keep"] = 1
        return inputs
