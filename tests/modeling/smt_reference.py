"""A Transformer over one sequence, position by position in float64, from the equations: rotary, RMSNorm, GELU."""

import cmath
from collections.abc import Callable

import torch
from torch import nn


def memory_norm(vectors: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / √(mean x² + ε), over the last dimension."""
    return vectors / (vectors.square().mean(-1, keepdim=True) + eps).sqrt()


def turn(vector: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotary position: entries i and i + d/2 are one complex number, turned by position · θ^(-2i/d)."""
    half = len(vector) // 2
    numbers = torch.complex(vector[:half], vector[half:])
    turns = torch.tensor(
        [cmath.exp(1j * position * theta ** (-i / half)) for i in range(half)], dtype=torch.complex128
    )
    numbers = numbers * turns
    return torch.cat([numbers.real, numbers.imag])


def transformer(
    stack: nn.Module, sequence: torch.Tensor, sees: Callable[[int, int], bool], config, first_position: int = 0
) -> torch.Tensor:
    """(L, H) → (L, H); position i attends to those j with `sees(i, j)`."""
    length, heads, width = len(sequence), config.num_attention_heads, config.hidden_size // config.num_attention_heads
    for layer in stack.layers:
        normed = memory_norm(sequence) * layer.attention_norm.weight
        query = normed @ layer.attention.q_proj.weight.T
        key, value = (normed @ layer.attention.kv_proj.weight.T).split(config.hidden_size, dim=1)
        attended = torch.zeros_like(sequence)
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            queries, keys = (
                [turn(rows[i, part], first_position + i, config.rope_theta) for i in range(length)]
                for rows in (query, key)
            )
            for i in range(length):
                seen = [j for j in range(length) if sees(i, j)]
                weights = torch.softmax(torch.stack([queries[i] @ keys[j] for j in seen]) / width**0.5, dim=0)
                attended[i, part] = sum(w * value[j, part] for w, j in zip(weights, seen, strict=True))
        sequence = sequence + attended @ layer.attention.o_proj.weight.T
        normed = memory_norm(sequence) * layer.mlp_norm.weight
        inner = normed @ layer.mlp.up_proj.weight.T
        inner = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
        sequence = sequence + inner @ layer.mlp.down_proj.weight.T
    return sequence
