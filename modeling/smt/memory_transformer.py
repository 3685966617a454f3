"""Transformer blocks over memory tokens: the parts of SMT's encoder, decoder, update and readout (appendix E).

A standard block with the paper's two changes, RMSNorm for LayerNorm and rotary positions; GELU inside 4·M, no biases.

Shape letters: B batch (streams, or streams × steps), T steps, M model width, Z memory tokens, D width of a memory
token, Tf future.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from ..block.linear_maps import linear_map
from ..block.recurrent_blocks import Contraction, resets_itself, rms_norm
from ..block.recurrent_state import state_dtype, upcast
from ..units.recurrent_unit import lecun_std
from .configuration_smt import SmtConfig

Rotary = tuple[Tensor, Tensor]


def rotary_tables(config: SmtConfig, length: int, like: Tensor) -> Rotary:
    """Cosine and signed sine, (T, 1, head width), of positions 0 … T-1; in the type and on the device of `like`.

    Attention depends on differences of positions only.
    """
    dtype = state_dtype(like.dtype)
    half = config.hidden_size // config.num_attention_heads // 2
    exponents = torch.arange(half, dtype=dtype, device=like.device) / half
    angles = torch.arange(length, dtype=dtype, device=like.device).unsqueeze(1) * config.rope_theta**-exponents
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)
    return tuple(table.unsqueeze(1).to(like.dtype) for table in tables)


def rotate(heads: Tensor, rotary: Rotary) -> Tensor:
    """Turn each pair (i, i + half) of (B, T, heads, head width) by the angle of its position."""
    cos, sin = (table.to(heads.dtype) for table in rotary)
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), sin)


def normalize_memory(memory: Tensor, config: SmtConfig) -> Tensor:
    """A memory (…, Z, D) in the type of states, with every token at RMS 1 if `config.memory_norm` is set."""
    memory = upcast(memory)
    if not config.memory_norm:
        return memory
    return nn.functional.rms_norm(memory, memory.shape[-1:], eps=config.norm_eps)


def width_map(in_features: int, out_features: int) -> nn.Module:
    """A linear map between the widths of model and memory, where they differ."""
    return nn.Identity() if in_features == out_features else nn.Linear(in_features, out_features, bias=False)


class MemoryAttention(nn.Module):
    """Self-attention with rotary positions; computes the last `num_outputs` positions."""

    def __init__(self, config: SmtConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.kv_proj = nn.Linear(config.hidden_size, 2 * config.hidden_size, bias=False)
        self.o_proj = Contraction(config.hidden_size, config.hidden_size)

    def forward(
        self, hidden: Tensor, rotary: Rotary, key_mask: Tensor | None, causal: bool, num_outputs: int
    ) -> Tensor:
        length, start = hidden.shape[1], hidden.shape[1] - num_outputs
        query = self._split(linear_map(self.q_proj, hidden[:, start:]))
        key, value = (self._split(tensor) for tensor in linear_map(self.kv_proj, hidden).chunk(2, dim=-1))
        query, key = rotate(query, tuple(table[start:] for table in rotary)), rotate(key, rotary)
        mask = None if key_mask is None else key_mask[:, None, None, :]
        if causal and 1 < num_outputs < length:
            # PyTorch's own causal mask would align the first query with the first key.
            mask = torch.ones(num_outputs, length, dtype=torch.bool, device=hidden.device).tril(start)
        attended = nn.functional.scaled_dot_product_attention(
            *(tensor.transpose(1, 2) for tensor in (query, key, value)),
            attn_mask=mask,
            is_causal=causal and num_outputs == length,
        )
        return linear_map(self.o_proj, attended.transpose(1, 2).flatten(2))

    def _split(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(-1, (self.num_heads, -1))


class MemoryMLP(nn.Module):
    """W_down · GELU(W_up x)."""

    def __init__(self, config: SmtConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Contraction(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return linear_map(self.down_proj, nn.functional.gelu(linear_map(self.up_proj, hidden)))


class MemoryTransformerBlock(nn.Module):
    """x + Attention(RMSNorm(x)), then x + MLP(RMSNorm(x))."""

    def __init__(self, config: SmtConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = MemoryAttention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MemoryMLP(config)

    def forward(
        self, hidden: Tensor, rotary: Rotary, key_mask: Tensor | None, causal: bool, num_outputs: int
    ) -> Tensor:
        attended = self.attention(rms_norm(self.attention_norm, hidden), rotary, key_mask, causal, num_outputs)
        hidden = hidden[:, hidden.shape[1] - num_outputs :] + attended
        return hidden + self.mlp(rms_norm(self.mlp_norm, hidden))


class MemoryTransformerLayer(GradientCheckpointingLayer, MemoryTransformerBlock):
    """A block that gradient checkpointing recomputes in the backward pass."""


class MemoryTransformer(nn.Module):
    """A stack of blocks without a final norm.

    Its blocks are units of gradient checkpointing (`MemoryTransformerLayer`), unless the caller's units are larger.
    """

    def __init__(
        self,
        config: SmtConfig,
        num_layers: int,
        causal: bool = False,
        block_class: type[MemoryTransformerBlock] = MemoryTransformerLayer,
    ):
        super().__init__()
        self.causal = causal
        self.layers = nn.ModuleList([block_class(config) for _ in range(num_layers)])

    def forward(
        self,
        hidden: Tensor,
        rotary: Rotary,
        key_mask: Tensor | None = None,
        num_outputs: int | None = None,
        output_hidden_states: bool = False,
    ) -> list[Tensor]:
        """The outputs (B, `num_outputs`, M) of the last layer, or of all with `output_hidden_states`.

        `key_mask` (B, T) is false where a position is hidden, not for a causal stack. The last layer computes the last
        `num_outputs` positions, by default all.
        """
        length = hidden.shape[1]
        num_outputs = length if num_outputs is None else num_outputs
        outputs = []
        for number, layer in enumerate(self.layers, start=1):
            last = number == len(self.layers)
            hidden = layer(hidden, rotary, key_mask, self.causal, num_outputs if last else length)
            if last or output_hidden_states:
                outputs.append(hidden[:, -num_outputs:])
        return outputs


class MemoryDecoder(nn.Module):
    """Causal Transformer over memory tokens and the tokens after them; over the memory alone, a readout.

    With `causal=False`, for a readout only, the memory tokens see one another in both directions.
    """

    def __init__(self, config: SmtConfig, num_layers: int, causal: bool = True):
        super().__init__()
        self.config = config
        self.memory_proj = width_map(config.memory_size, config.hidden_size)
        self.transformer = MemoryTransformer(config, num_layers, causal)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(
        self, memory: Tensor, embeds: Tensor | None = None, output_hidden_states: bool = False
    ) -> list[Tensor]:
        """Decode the continuation of a memory (B, Z, D), and the embedded tokens after it (B, Tf, M), if any.

        Returns the outputs (B, 1 + Tf, M) of the last layer, or of all, at the last memory token and at the tokens:
        position i has seen the memory and the first i tokens. The last one is after the final norm.
        """
        hidden = self.memory_proj(memory.to(self.norm.weight.dtype))
        if embeds is not None:
            hidden = torch.cat([hidden, embeds.to(hidden.dtype)], dim=1)
        num_outputs = hidden.shape[1] - memory.shape[1] + 1
        rotary = rotary_tables(self.config, hidden.shape[1], hidden)
        *outputs, last = self.transformer(
            hidden, rotary, num_outputs=num_outputs, output_hidden_states=output_hidden_states
        )
        return [*outputs, self.norm(last)]


@torch.no_grad()
def init_memory_weights(module: nn.Module, config: SmtConfig) -> None:
    """LeCun normal, or `config.initializer_range` for all linear maps; embeddings at RMS 1, like memory tokens.

    Maps back to the residual stream are smaller by √(2N), N the depth of the update or the encoder. The embedding is
    smaller where it is the head as well.
    """
    if isinstance(module, nn.Linear):
        depth = 2 * config.num_hidden_layers if isinstance(module, Contraction) else 1
        std = lecun_std(depth * module.in_features)
        init.normal_(module.weight, mean=0.0, std=config.initializer_range or std)
    elif isinstance(module, nn.Embedding):
        init.normal_(module.weight, mean=0.0, std=lecun_std(module.embedding_dim) if config.tie_word_embeddings else 1)
    elif isinstance(module, nn.GRUCell):
        for weight in (module.weight_ih, module.weight_hh):
            init.normal_(weight, mean=0.0, std=config.initializer_range or lecun_std(weight.shape[1]))
        init.zeros_(module.bias_ih)
        init.zeros_(module.bias_hh)
    elif isinstance(module, nn.RMSNorm):
        init.ones_(module.weight)
    elif resets_itself(module):
        module.reset_parameters()
