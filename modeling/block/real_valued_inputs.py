"""Real values instead of tokens, for the families whose papers read pixels, bits and measurements.

Shape letters: B streams or batch, T steps.
"""

import torch
from torch import Tensor, nn

from .recurrent_backbone import RecurrentModelOutput


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
        *arguments,
        inputs_embeds: Tensor | None = None,
        input_values: Tensor | None = None,
        **kwargs,
    ) -> RecurrentModelOutput | tuple:
        """As [`RecurrentBackbone.forward`]; `input_values` are real, (B, T, `config.input_size`), and replace ids.

        Raises:
            ValueError: the encoder does not read these inputs, or a shape does not match.
        """
        size = self.config.input_size
        if input_ids is not None and size is not None:
            raise ValueError("`input_ids` are given, but this model reads real values; give `input_values`.")
        if input_values is not None:
            if size is None:
                raise ValueError("`input_values` are given, but this model reads tokens: `config.input_size` is None.")
            if inputs_embeds is not None:
                raise ValueError("Give exactly one of `inputs_embeds` and `input_values`.")
            if input_values.dim() != 3 or input_values.shape[-1] != size:
                raise ValueError(f"`input_values` has shape {tuple(input_values.shape)}; it must be (B, T, {size}).")
            inputs_embeds = self.embed_tokens(input_values.to(self.embed_tokens.weight.dtype))
        return super().forward(input_ids, *arguments, inputs_embeds=inputs_embeds, **kwargs)
