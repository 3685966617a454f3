"""Generation with a recurrent state: what `transformers.GenerationMixin` does otherwise with attention caches.

Shape letters: B batch, T steps, V vocabulary.
"""

import torch
from transformers import GenerationMixin, LogitsProcessorList
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from .generated_state import GeneratedStateMixin
from .recurrent_state import RecurrentState, check_state, check_state_memory, select_state
from .tensor_checks import check_tensor, has_values

# Decoding that transformers refuses for stateful models, by its argument.
_DRAFTS = ("assistant_model", "prompt_lookup_num_tokens")


class RecurrentGuidance(UnbatchedClassifierFreeGuidanceLogitsProcessor):
    """Classifier-free guidance that carries the state of the unconditional text, in place of an attention cache."""

    def __init__(self, stock: UnbatchedClassifierFreeGuidanceLogitsProcessor):
        context = stock.unconditional_context
        super().__init__(stock.guidance_scale, stock.model, context["input_ids"], context["attention_mask"])
        self.state: RecurrentState | None = None

    def get_unconditional_logits(self, input_ids: torch.LongTensor) -> torch.Tensor:
        """Logits (B, 1, V) after the negative prompt, by default the last byte of the prompt, and the new bytes."""
        mask = None
        if self.state is None and self.unconditional_context["input_ids"] is not None:
            input_ids, mask = (self.unconditional_context[name] for name in ("input_ids", "attention_mask"))
        else:
            input_ids = input_ids[:, -1:]
        output = self.model(input_ids, attention_mask=mask, state=self.state, use_cache=True, logits_to_keep=1)
        self.state = output.state
        return output.logits


class RecurrentGenerationMixin(GeneratedStateMixin, GenerationMixin):
    """For a language model with a base model in `model` whose `forward` takes and returns a `state`."""

    def generate(self, inputs: torch.Tensor | None = None, *arguments, **kwargs):
        """As `transformers.GenerationMixin.generate`.

        An empty prompt is a new episode: the end byte is read from the zero state, and is the first of the result.
        `state` is that of the text before the prompt. With `return_dict_in_generate=True`, the result is a
        [`RecurrentGenerateOutput`] with the state after all bytes of each row.

        Raises:
            ValueError: a tensor cannot be read, `state` is None, an empty prompt has a state or no end byte, or
                decoding with drafts is asked for.
        """
        for name in _DRAFTS:
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"`{name}` is given, but transformers drafts only for models without a state; use "
                    "`hf_recurrent.generate_speculative`."
                )
        for name, tensor in {"inputs": inputs, **kwargs}.items():
            if isinstance(tensor, torch.Tensor):
                check_tensor(name, tensor)
        if kwargs.get("inputs_embeds") is None:
            name = "inputs" if inputs is not None or kwargs.get("input_ids") is None else "input_ids"
            prompt, mask = self._begin_empty_prompts(
                inputs if name == "inputs" else kwargs[name], kwargs.get("attention_mask"), kwargs
            )
            inputs = prompt if name == "inputs" else None
            kwargs |= {"attention_mask": mask} if name == "inputs" else {"attention_mask": mask, name: prompt}
        return super().generate(inputs, *arguments, **kwargs)

    def _begin_empty_prompts(
        self, prompt: torch.Tensor | None, mask: torch.Tensor | None, options: dict
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The prompt (B, T) and its mask, with the end byte in rows without a byte."""
        for name, tensor in (("inputs", prompt), ("attention_mask", mask)):
            if tensor is not None:
                check_tensor(name, tensor)
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
        inputs = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        inputs["logits_to_keep"] = 1
        return inputs

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, is_encoder_decoder=False, num_new_tokens=1):
        # The state has read the padding; a mask that grows with every byte would only cost memory.
        if (state := outputs.get("state")) is not None:
            model_kwargs["attention_mask"], model_kwargs["state"] = None, state
        return super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, is_encoder_decoder=is_encoder_decoder, num_new_tokens=num_new_tokens
        )

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs):
        state = model_kwargs.pop("state", None)
        if state is not None:
            check_state(state, self.model.state_shapes(len(input_ids)))
            check_state_memory(state, input_ids.device)
        input_ids, model_kwargs = super()._expand_inputs_for_generation(
            expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **model_kwargs
        )
        if state is not None:
            model_kwargs["state"] = {name: row.repeat_interleave(expand_size, 0) for name, row in state.items()}
        return input_ids, model_kwargs

    @staticmethod
    def _reorder_cache(state: RecurrentState, beam_idx: torch.Tensor) -> RecurrentState:
        return select_state(state, beam_idx)
