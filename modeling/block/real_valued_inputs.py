"""Real values instead of tokens, for the families whose papers read pixels, bits and measurements.

Shape letters: B streams or batch, T steps.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig

from .recurrent_causal_lm import RecurrentModelOutput
from .recurrent_sequence_classification import RecurrentSequenceClassifierOutput
from .recurrent_state import RecurrentState


def check_reads_tokens(config: PreTrainedConfig) -> None:
    """Raise a ValueError if `config.input_size` is set: a language model reads tokens."""
    if config.input_size is not None:
        raise ValueError(
            f"`input_size` is {config.input_size}, but a language model reads tokens; it must be None here."
        )


class RealValuedInputs:
    """For a `RecurrentModel`: where `config.input_size` is set, a linear encoder replaces the embedding."""

    encoder_bias = False

    def __init__(self, config):
        super().__init__(config)
        if config.input_size is not None:
            self.embed_tokens = nn.Linear(config.input_size, config.hidden_size, bias=self.encoder_bias)
            self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        state: RecurrentState | None = None,
        reset_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs,
    ) -> RecurrentModelOutput | tuple:
        """Read a block. `input_values` are real, (B, T, `config.input_size`), in place of `input_ids`.

        See [`RecurrentForCausalLM.forward`] for the other arguments.

        Raises:
            ValueError: the inputs are not those of the encoder, or a shape does not match.
        """
        if input_values is not None:
            if input_ids is not None or inputs_embeds is not None:
                raise ValueError("Give exactly one of `input_ids`, `inputs_embeds` and `input_values`.")
            inputs_embeds = self._encode(input_values)
        elif input_ids is not None and self.config.input_size is not None:
            raise ValueError(
                f"This model reads real values (`config.input_size` is {self.config.input_size}); "
                "give `input_values` in place of `input_ids`."
            )
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            state=state,
            reset_mask=reset_mask,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            **kwargs,
        )

    def _encode(self, input_values: torch.Tensor) -> torch.Tensor:
        size = self.config.input_size
        if size is None:
            raise ValueError("`input_values` are given, but this model reads tokens: `config.input_size` is None.")
        if input_values.dim() != 3 or input_values.shape[-1] != size:
            raise ValueError(f"`input_values` has shape {tuple(input_values.shape)}; it must be (B, T, {size}).")
        return self.embed_tokens(input_values.to(self.embed_tokens.weight.dtype))


class RealValuedSequences:
    """For a `RecurrentForSequenceClassification` over such a model: names the argument, which trainers look for."""

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs,
    ) -> RecurrentSequenceClassifierOutput | tuple:
        """Read whole sequences; `input_values` are real, (B, T, `config.input_size`), in place of `input_ids`.

        See [`RecurrentForSequenceClassification.forward`] for the other arguments.
        """
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            input_values=input_values,
            labels=labels,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            **kwargs,
        )
