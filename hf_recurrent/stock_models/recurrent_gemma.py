"""RecurrentGemma (Griffin) with a state: recurrent blocks, and the window of its local attention.

Stock code keeps the state on its modules, and drops the convolution's for more than one step.

Shape letters: B streams or batch, T steps, W attention window.
"""

from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import (
    RecurrentGemmaAttention,
    RecurrentGemmaForCausalLM,
    RecurrentGemmaRecurrentBlock,
    SqrtBoundDerivative,
    apply_rotary_pos_emb,
)

from hf_recurrent.modeling.block.recurrent_state import upcast
from hf_recurrent.modeling.scan.linear_scan import linear_scan
from hf_recurrent.stock_models.stock_model import Block, ConvolutionPart, StatePart, StockModelWithState, given_block

_AGE = "age"


class GriffinBlock(Block):
    """A [`Block`] whose state holds the number of steps since each episode began, (B, 1), counted up to W."""

    @cached_property
    def ages(self) -> torch.Tensor:
        """(B, T) int64: steps of the episode before each step, at least right up to W."""
        before = self.state[_AGE].long()
        steps = torch.arange(self.steps, device=before.device)
        ages = before + steps
        if self.reset_mask is not None:
            last_reset = torch.where(self.reset_mask, steps, -1).cummax(1).values
            ages = torch.where(last_reset >= 0, steps - last_reset, ages)
        return ages

    def ages_at_end(self) -> torch.Tensor:
        """(B, 1) int64: real steps of the episode that runs at the end of the block."""
        if self.lengths is None:
            return self.ages[:, -1:] + 1
        last = self.ages.gather(1, (self.lengths - 1).clamp(min=0).unsqueeze(1)) + 1
        return torch.where(self.lengths.unsqueeze(1) > 0, last, self.state[_AGE].long())


class RecurrentBlockWithState(ConvolutionPart, RecurrentGemmaRecurrentBlock):
    """Convolution and RG-LRU (De et al. 2024, sections 2.3 and 2.4) from a given state."""

    def part_shapes(self):
        return {"recurrent": (self.lru_width,), "convolution": (self.conv1d_width - 1, self.lru_width)}

    def forward(self, input_states, *arguments, **options):
        if (block := given_block(options)) is None:
            return super().forward(input_states, *arguments, **options)
        gate = self.act_fn(self.linear_y(input_states))
        inputs = self.convolve(self.conv_1d, self.linear_x(input_states), block)
        with torch.autocast(input_states.device.type, enabled=False):
            hidden = self._scan(upcast(inputs), block).to(inputs.dtype)
        return self.linear_out(hidden * gate), None

    def _scan(self, inputs: torch.Tensor, block: GriffinBlock) -> torch.Tensor:
        unit = self.rg_lru
        heads = inputs.unflatten(-1, (unit.num_attention_heads, unit.block_width))
        input_gate, recurrent_gate = (
            torch.sigmoid(torch.einsum("btai,aij->btaj", heads, upcast(weight)) + upcast(bias)).flatten(2)
            for weight, bias in (
                (unit.input_gate_weight, unit.input_gate_bias),
                (unit.recurrent_gate_weight, unit.recurrent_gate_bias),
            )
        )
        log_decay = -8.0 * recurrent_gate * nn.functional.softplus(upcast(unit.recurrent_param))
        first = (block.ages == 0).unsqueeze(-1)
        # The first input of an episode is not scaled, as in the stock unit.
        scale = torch.where(first, 1.0, SqrtBoundDerivative.apply(1 - torch.exp(2 * log_decay)))
        decay, added = torch.exp(log_decay), inputs * input_gate * scale
        if block.padding_mask is not None:
            padding = block.padding_mask.unsqueeze(-1)
            decay, added = decay.masked_fill(padding, 1), added.masked_fill(padding, 0)
        hidden, state = linear_scan(decay, added, self.get_part(block, "recurrent"), block.reset_mask)
        self.set_part(block, "recurrent", state)
        return hidden


class AttentionWithState(StatePart, RecurrentGemmaAttention):
    """Local attention whose state is the last W - 1 keys and values.

    Keys are kept without their rotation, which depends on distances only: positions are counted from the oldest key,
    and do not grow with the length of the text.
    """

    def part_shapes(self):
        shape = (self.sliding_window - 1, self.num_key_value_heads, self.head_dim)
        return {"keys": shape, "values": shape}

    def forward(self, hidden_states, *arguments, **options):
        if (block := given_block(options)) is None:
            return super().forward(hidden_states, *arguments, **options)
        steps = hidden_states.shape[1]
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        keys = torch.cat([self.get_part(block, "keys").to(key.dtype), key], dim=1)
        values = torch.cat([self.get_part(block, "values").to(value.dtype), value], dim=1)
        self._keep_window(block, keys, values)
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, keys, values))
        positions = torch.arange(keys.shape[1], device=keys.device).unsqueeze(0)
        cos, sin = self.rotary_emb(value, positions)
        query, _ = apply_rotary_pos_emb(query, query, cos[:, -steps:], sin[:, -steps:])
        _, key = apply_rotary_pos_emb(key, key, cos, sin)
        distances = positions[:, -steps:].unsqueeze(-1) - positions.unsqueeze(1)  # (1, T, W - 1 + T)
        visible = (distances >= 0) & (distances < self.sliding_window) & (distances <= block.ages.unsqueeze(-1))
        output = nn.functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(self.num_key_value_groups, 1),
            value.repeat_interleave(self.num_key_value_groups, 1),
            attn_mask=visible.unsqueeze(1),
            dropout_p=self.attention_dropout if self.training else 0.0,
            scale=self.scaling,
        )
        return self.o_proj(output.transpose(1, 2).flatten(2)), None

    def _keep_window(self, block: GriffinBlock, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the last W - 1 keys and values, zero where an earlier episode wrote them."""
        history = self.sliding_window - 1
        index_in_window = torch.arange(history, device=keys.device).unsqueeze(0)
        ended = (history - index_in_window > block.ages_at_end())[..., None, None]
        lengths = index_in_window.new_tensor([block.steps]) if block.lengths is None else block.lengths
        index = (lengths.unsqueeze(1) + index_in_window).expand(len(keys), -1)[..., None, None]
        for part, tensor in (("keys", keys), ("values", values)):
            window = tensor.gather(1, index.expand(-1, -1, *tensor.shape[2:]))
            self.set_part(block, part, window.masked_fill(ended, 0))


class RecurrentGemmaWithState(StockModelWithState, RecurrentGemmaForCausalLM):
    """A stock RecurrentGemma that takes and returns a state."""

    block_class = GriffinBlock

    def state_layout(self):
        return {_AGE: (1,)} | super().state_layout()

    def read_stock(self, input_ids: torch.Tensor, block: GriffinBlock, **options) -> Any:
        age = block.ages_at_end().clamp(max=self.config.attention_window_size)
        block.new_state[_AGE] = age.to(block.state[_AGE].dtype)
        # The block has ages and masks. Given positions and a mask of four dimensions, stock code makes none.
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        options |= {"position_ids": positions, "attention_mask": positions.new_ones(1, 1, 1, 1)}
        return super().read_stock(input_ids, block, **options)


CLASSES = {
    RecurrentGemmaForCausalLM: RecurrentGemmaWithState,
    RecurrentGemmaRecurrentBlock: RecurrentBlockWithState,
    RecurrentGemmaAttention: AttentionWithState,
}
