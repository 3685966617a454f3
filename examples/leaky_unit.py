"""A recurrent unit of your own: a leaky integrator.

    hf-recurrent pretrain --import leaky_unit.py --config_overrides recurrent_unit=leaky

Checkpoints hold this file. So it may import the standard library, numpy, safetensors, torch, transformers, and names
of `hf_recurrent` with code in `hf_recurrent.modeling`.
"""

import torch
from torch import nn

from hf_recurrent import RecurrentUnit, register_recurrent_unit
from hf_recurrent.modeling.block.recurrent_state import upcast
from hf_recurrent.modeling.units.parameter_values import copy_log


@register_recurrent_unit("leaky")
class LeakyIntegrator(RecurrentUnit):
    """h_t = a ∘ h_{t-1} + (1 - a) ∘ (W x_t), with a = exp(-e^rate), learned for each channel."""

    def __init__(self, input_size: int, state_size: int, **options):
        super().__init__(input_size, state_size, **options)
        self.input_projection = self.input_map()
        self.rate = nn.Parameter(torch.empty(state_size))

    def reset_parameters(self) -> None:
        copy_log(self.rate, self.sample_rate(self.rate))

    def coefficients(self, projection: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        projection, rate = upcast(projection), upcast(self.rate)  # float32, also in a bfloat16 model
        decay, _ = self.decay_and_normalizer(-torch.exp(rate))
        return decay, (1 - decay) * projection
