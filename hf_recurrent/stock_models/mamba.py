"""Mamba and FalconMamba with a state.

Shape letters: B streams or batch, T steps, M model width.
"""

import torch
from torch import nn
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaForCausalLM, FalconMambaMixer
from transformers.models.mamba.modeling_mamba import MambaForCausalLM, MambaMixer

from hf_recurrent.modeling.block.recurrent_state import upcast
from hf_recurrent.modeling.scan.layers import selective_scan
from hf_recurrent.stock_models.stock_model import ConvolutionPart, StockModelWithState, given_block


class SelectiveScanPart(ConvolutionPart):
    """The mixer of Mamba (Gu and Dao 2024, section 3) from a given state.

    Stock code runs more than one step with a cache from a zero state, so the recurrence is written here:
    h_t = exp(Δ_t A) ∘ h_{t-1} + Δ_t B_t x_t, y_t = C_t · h_t + D ∘ x_t, as one linear scan over the states of all
    channels.
    """

    def part_shapes(self):
        return {
            "recurrent": (self.intermediate_size, self.ssm_state_size),
            "convolution": (self.conv_kernel_size - 1, self.intermediate_size),
        }

    def normalize(
        self, time_step: torch.Tensor, to_state: torch.Tensor, from_state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Norms of Δ (before its map), B and C, where the family has them."""
        return time_step, to_state, from_state

    def forward(self, hidden_states, **options):
        if (block := given_block(options)) is None:
            return super().forward(hidden_states, **options)
        inputs, gate = self.in_proj(hidden_states).chunk(2, dim=-1)
        inputs = self.act(self.convolve(self.conv1d, inputs, block))
        sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
        time_step, to_state, from_state = self.normalize(*self.x_proj(inputs).split(sizes, dim=-1))
        time_step = nn.functional.linear(time_step, self.dt_proj.weight)
        with torch.autocast(hidden_states.device.type, enabled=False):
            output = self._scan(upcast(inputs), upcast(time_step), upcast(to_state), upcast(from_state), block)
            output = output * nn.functional.silu(upcast(gate))
        return self.out_proj(output.to(hidden_states.dtype))

    def _scan(self, inputs, time_step, to_state, from_state, block):
        time_step = nn.functional.softplus(time_step + upcast(self.dt_proj.bias))
        if block.padding_mask is not None:
            time_step = time_step.masked_fill(block.padding_mask.unsqueeze(-1), 0)  # the state stays as it is
        a = -torch.exp(upcast(self.A_log))
        state = self.get_part(block, "recurrent")
        outputs, state = selective_scan(inputs, time_step, a, to_state, from_state, state, block.reset_mask)
        self.set_part(block, "recurrent", state)
        return outputs + upcast(self.D) * inputs


class MambaMixerWithState(SelectiveScanPart, MambaMixer):
    """[`SelectiveScanPart`] with the weights of a stock mixer."""


class FalconMambaMixerWithState(SelectiveScanPart, FalconMambaMixer):
    """[`SelectiveScanPart`] with the norms and weights of a stock mixer."""

    def normalize(self, time_step, to_state, from_state):
        return self.dt_layernorm(time_step), self.b_layernorm(to_state), self.c_layernorm(from_state)


class MambaWithState(StockModelWithState, MambaForCausalLM):
    """A stock Mamba that takes and returns a state."""


class FalconMambaWithState(StockModelWithState, FalconMambaForCausalLM):
    """A stock FalconMamba that takes and returns a state."""


CLASSES = {
    MambaForCausalLM: MambaWithState,
    MambaMixer: MambaMixerWithState,
    FalconMambaForCausalLM: FalconMambaWithState,
    FalconMambaMixer: FalconMambaMixerWithState,
}
