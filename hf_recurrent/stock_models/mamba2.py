"""Mamba2 with a state.

Shape letters: B streams or batch, T steps, G channel groups, H heads (of a group), P width of a head, S state width,
Q steps of a chunk.
"""

import torch
from torch import nn
from transformers.models.mamba2.modeling_mamba2 import Mamba2ForCausalLM, Mamba2Mixer

from hf_recurrent.modeling.block.recurrent_state import upcast
from hf_recurrent.stock_models.stock_model import (
    CHUNK_STEPS,
    Block,
    ConvolutionPart,
    StockModelWithState,
    given_block,
    same_episode,
)


class Mamba2MixerWithState(ConvolutionPart, Mamba2Mixer):
    """The mixer of Mamba2 from a given state, by the chunks of [`state_space_dual`].

    Stock code takes a state as well, but writes over it at single steps, so that gradients fail, and knows no resets.
    """

    def part_shapes(self):
        return {
            "recurrent": (self.num_heads, self.head_dim, self.ssm_state_size),
            "convolution": (self.conv_kernel_size - 1, self.conv_dim),
        }

    def forward(self, hidden_states, **options):
        if (block := given_block(options)) is None:
            return super().forward(hidden_states, **options)
        sizes = [self.intermediate_size, self.conv_dim, self.num_heads]
        gate, inputs, time_step = self.in_proj(hidden_states).split(sizes, dim=-1)
        inputs = self.act(self.convolve(self.conv1d, inputs, block))
        with torch.autocast(hidden_states.device.type, enabled=False):
            output = self._scan(upcast(inputs), upcast(time_step), block)
        return self.out_proj(self.norm(output, gate).to(hidden_states.dtype))

    def _scan(self, inputs: torch.Tensor, time_step: torch.Tensor, block: Block) -> torch.Tensor:
        width = self.n_groups * self.ssm_state_size
        inputs, to_state, from_state = inputs.split([self.intermediate_size, width, width], dim=-1)
        groups = (self.n_groups, self.num_heads // self.n_groups)
        inputs = inputs.unflatten(-1, (*groups, self.head_dim))
        time_step = nn.functional.softplus(time_step + upcast(self.dt_bias)).clamp(*self.time_step_limit)
        if block.padding_mask is not None:
            time_step = time_step.masked_fill(block.padding_mask.unsqueeze(-1), 0)  # the state stays as it is
        log_decay = (time_step * -torch.exp(upcast(self.A_log))).unflatten(-1, groups)
        output, state = state_space_dual(
            inputs * time_step.unflatten(-1, groups).unsqueeze(-1),
            log_decay,
            to_state.unflatten(-1, (self.n_groups, -1)),
            from_state.unflatten(-1, (self.n_groups, -1)),
            self.get_part(block, "recurrent").unflatten(1, groups),
            block.reset_mask,
        )
        self.set_part(block, "recurrent", state.flatten(1, 2))
        return (output + upcast(self.D).view(*groups, 1) * inputs).flatten(2)


def state_space_dual(
    inputs: torch.Tensor,
    log_decay: torch.Tensor,
    to_state: torch.Tensor,
    from_state: torch.Tensor,
    state: torch.Tensor,
    reset_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h_t = exp(log_decay_t) h_{t-1} + x_t ⊗ B_t and y_t = C_t · h_t, in chunks (Dao and Gu 2024, section 6).

    Args:
        inputs: x, (B, T, G, H, P).
        log_decay: (B, T, G, H), at most 0.
        to_state, from_state: B and C, (B, T, G, S).
        state: h before the block, (B, G, H, P, S).

    Returns:
        y (B, T, G, H, P) and h after the block.
    """
    outputs = []
    resets = [None] * inputs.shape[1] if reset_mask is None else reset_mask.split(CHUNK_STEPS, dim=1)
    chunks = zip(*(part.split(CHUNK_STEPS, dim=1) for part in (inputs, log_decay, to_state, from_state)), strict=True)
    for (values, decay, keys, queries), reset in zip(chunks, resets, strict=False):
        visible, from_before = same_episode(*values.shape[:2], reset, values.device)
        total = decay.cumsum(1)  # (B, Q, G, H)
        between = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill(~visible[..., None, None], -torch.inf)
        weights = torch.einsum("bqgk,bsgk->bqsg", queries, keys).unsqueeze(-1) * between.exp()
        since = total.exp() * from_before[..., None, None]  # what is left of the state before the chunk
        read = torch.einsum("bqgk,bghpk->bqghp", queries, state) * since.unsqueeze(-1)
        outputs.append(torch.einsum("bqsgh,bsghp->bqghp", weights, values) + read)
        kept = values * between[:, -1].exp().unsqueeze(-1)
        state = since[:, -1, ..., None, None] * state + torch.einsum("bsghp,bsgk->bghpk", kept, keys)
    return torch.cat(outputs, dim=1), state


class Mamba2WithState(StockModelWithState, Mamba2ForCausalLM):
    """A stock Mamba2 that takes and returns a state."""


CLASSES = {Mamba2ForCausalLM: Mamba2WithState, Mamba2Mixer: Mamba2MixerWithState}
