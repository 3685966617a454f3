"""A recurrent unit of your own: a leaky integrator.

    hf-recurrent pretrain --import leaky_unit.py --config_overrides recurrent_unit=leaky

Checkpoints hold this file. So it may import the standard library, numpy, safetensors, torch, transformers, and names
of `hf_recurrent` with code in `hf_recurrent.modeling`.
"""

import torch

from hf_recurrent import RecurrentUnit, register_recurrent_unit
from hf_recurrent.modeling.block.recurrent_state import upcast
from hf_recurrent.modeling.units.recurrent_unit import copy_log


@register_recurrent_unit("leaky")
class LeakyIntegrator(RecurrentUnit):
    """h_t = a ∘ h_{t-1} + (1 - a) ∘ (W x_t), with a = exp(-e^rate), learned for each channel."""

    input_maps = ("input_projection",)
    vectors = ("rate",)

    def reset_parameters(self) -> None:
        copy_log(self.rate, self.sample_rate(self.rate))

    def coefficients(self, projection: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        projection, rate = upcast(projection), upcast(self.rate)  # float32, also in a bfloat16 model
        decay, _ = self.decay_and_normalizer(-torch.exp(rate))
        return decay, (1 - decay) * projection
