"""Embeddings of hashed n-grams: the last 2, 3, … bytes select rows of a table that are added to the byte's embedding.

A row is learned from the few places where its n-gram stands, so the table holds literal strings, and the network is
left with what generalises. Sources: Pagnoni et al. 2024 (BLT, hash n-gram embeddings), Huang et al. 2025
(Over-Tokenized Transformer).

The hash of order n is Σ_k A^(k+1) · x_k mod P over the last n bytes x_0, x_1, …, newest first, with P = 2^31 - 1; a
byte counts as its id + 1, and 0 is "no byte": before the first byte of an episode there is none. All sums stay below
2^63, so that every runtime computes the same integers.

Shape letters: B streams or batch, T steps, M model width, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..block.block_inputs import Padding
from ..block.recurrent_blocks import delayed, episode_numbers, last_inputs
from ..block.training_kernels import SMALLEST_FUSED, training_kernels, training_module

# Part of the format of checkpoints: with other numbers, trained tables would be read at other rows.
NGRAM_MODULUS, NGRAM_BASE = 2**31 - 1, 1_103_515_245
MOST_ID = 2**24  # the largest id + 1; a state may hold any number


class NgramEmbedding(nn.Module):
    """A table with `config.ngram_rows` rows for each order, zero at first: the model starts as the one without it.

    In training its gradient is sparse: a step costs what the rows that it touches cost, not the table. Trainers find
    such modules by `sparse_gradients`.
    """

    sparse_gradients = True
    no_weight_decay = ("weight",)  # a row that is rarely seen would fade

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(len(config.ngram_orders) * config.ngram_rows, config.hidden_size))

    def reset_parameters(self) -> None:
        init.zeros_(self.weight)

    def forward(self, rows: Tensor) -> Tensor:
        """The sums (B, T, M) of the rows (B, T, orders) of the n-grams that end at each step."""
        kernels = training_kernels(self.weight)
        sparse = self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if kernels is not None and rows.is_cpu and rows.numel() * self.weight.shape[1] >= SMALLEST_FUSED:
            if sparse and self.weight.requires_grad:
                return _TableSum.apply(self.weight, rows)
            if not torch.is_grad_enabled():
                return kernels.table_sum(self.weight, rows)
        return nn.functional.embedding(rows, self.weight, sparse=sparse).sum(-2)


class _TableSum(torch.autograd.Function):
    """Sums of rows of a table, with a coalesced sparse gradient."""

    @staticmethod
    def forward(ctx, table, rows):
        ctx.save_for_backward(table, rows)
        return training_module().table_sum(table, rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        table, rows = ctx.saved_tensors
        found, values = training_module().table_gradient(table, rows, grad)
        gradient = torch.sparse_coo_tensor(found[None], values, table.shape, is_coalesced=True, check_invariants=False)
        return gradient, None


def find_tables(model: nn.Module) -> dict[str, NgramEmbedding]:
    """Name → module of the tables of which a step reads a few rows."""
    return {name: module for name, module in model.named_modules() if getattr(module, "sparse_gradients", False)}


def table_parameters(model: nn.Module) -> int:
    """Number of parameters in tables of which a step reads a few rows; `num_parameters()` counts them too."""
    return sum(table.weight.numel() for table in find_tables(model).values())


def dense_bytes(model: nn.Module) -> int:
    """Bytes of the parameters that every step reads, which are all but the tables."""
    tables = sum(table.weight.nbytes for table in find_tables(model).values())
    return sum(parameter.nbytes for parameter in model.parameters()) - tables


def read_ngrams(
    config, input_ids: Tensor, recent: Tensor, reset_mask: Tensor | None = None, padding: Padding | None = None
) -> tuple[Tensor, Tensor]:
    """The rows (B, T, orders) of the n-grams that end at each step of a block, and `recent` after its last real steps.

    `recent` (B, largest order - 1) are ids + 1 before the block, oldest first; 0 for no byte. N-grams end at resets.
    """
    lengths = None
    if padding is not None:
        input_ids, reset_mask = padding.pack(input_ids), padding.pack_resets(reset_mask)
        lengths = padding.lengths
    history = recent.shape[1]
    padded = torch.cat([recent, input_ids.to(recent.dtype) + 1], dim=1).unsqueeze(-1)
    episode = None if reset_mask is None else episode_numbers(reset_mask, history)
    windows = torch.cat([delayed(padded, history, lag, episode) for lag in range(history, -1, -1)], dim=-1)
    rows = hashed_rows(windows, config.ngram_orders, config.ngram_rows)
    new = last_inputs(padded, history, lengths, episode).squeeze(-1)
    return (rows if padding is None else padding.unpack(rows)), new


def hashed_rows(windows: Tensor, orders: Sequence[int], rows: int) -> Tensor:
    """Rows (…, orders) int64 of a table with `rows` rows for each order.

    `windows` (…, largest order) are ids + 1 of the last bytes, newest last; 0 for no byte.
    """
    factors = [pow(NGRAM_BASE, power, NGRAM_MODULUS) for power in range(1, windows.shape[-1] + 1)]
    # Exports and recordings see one operator, for which they have code of their own.
    if torch.compiler.is_exporting() or torch._C._len_torch_dispatch_stack():
        return torch.ops.hf_recurrent.ngram_rows(windows, factors, list(orders), rows)
    return ngram_rows(windows, factors, orders, rows)


def ngram_rows(windows: Tensor, factors: Sequence[int], orders: Sequence[int], rows: int) -> Tensor:
    """[`hashed_rows`] in operations of torch; `factors` of the bytes in the hash, newest first."""
    newest_first = windows.clamp(0, MOST_ID).long().unbind(-1)[::-1]
    total, added, found = torch.zeros_like(newest_first[0]), 0, []
    for number, order in enumerate(orders):
        for lag in range(added, order):
            total = torch.add(total, newest_first[lag], alpha=factors[lag])
        found.append(total % NGRAM_MODULUS % rows + number * rows)
        added = order
    return torch.stack(found, dim=-1)


def _register_operator() -> None:
    """Define hf_recurrent::ngram_rows once per process, as `linear_scan` is defined."""
    if hasattr(torch.ops.hf_recurrent, "ngram_rows"):
        return
    operator = torch.library.custom_op("hf_recurrent::ngram_rows", ngram_rows, mutates_args=())

    @operator.register_fake
    def _(windows, factors, orders, rows):
        return windows.new_empty((*windows.shape[:-1], len(orders)), dtype=torch.long)


_register_operator()
