"""Row-wise Adagrad: the optimizer of tables of embeddings, of which a step touches few rows."""

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn

from hf_recurrent.learning_rules.muon import MatrixOptimizer, check_not_negative
from hf_recurrent.modeling.block.training_kernels import training_kernels
from hf_recurrent.modeling.contexts.ngram_embedding import find_tables


def sparse_tables(model: nn.Module) -> dict[str, nn.Parameter]:
    """Tables with sparse gradients, by name: the parameters of modules whose `sparse_gradients` is true."""
    return {
        f"{prefix}.{name}".lstrip("."): parameter
        for prefix, module in find_tables(model).items()
        for name, parameter in module.named_parameters(recurse=False)
    }


def use_sparse_gradients(model: nn.Module) -> None:
    """Put tables in training mode, in which their gradients are sparse; the rest of the model stays as it is."""
    for table in find_tables(model).values():
        table.train()


def coalesced(gradient: torch.Tensor) -> torch.Tensor:
    """`Tensor.coalesce` for a sparse gradient (rows, width), faster; other gradients are returned as they are."""
    if not gradient.is_sparse or gradient.is_coalesced() or gradient.sparse_dim() != 1:
        return gradient
    indices, values = gradient._indices()[0], gradient._values()
    if not len(indices):
        return gradient.coalesce()
    if bool((indices[1:] > indices[:-1]).all()):  # autograd stores a gradient without the mark that it is coalesced
        return _of_rows(indices, values, gradient.shape)
    rows, numbers = torch.unique(indices, return_inverse=True)
    order, counts = torch.argsort(numbers, stable=True), torch.bincount(numbers, minlength=len(rows))
    sums = nn.functional.embedding_bag(order, values, counts.cumsum(0) - counts, mode="sum")
    return _of_rows(rows, sums, gradient.shape)


def _of_rows(rows: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A sparse gradient with the values (n, width) of ascending rows (n,)."""
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)


def sum_of_gradients(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of gradients of one table, row by row in their order; coalesced if all are sparse."""
    gradients = [coalesced(gradient) for gradient in gradients]
    if len(gradients) == 1:
        return gradients[0]
    if all(gradient.is_sparse and gradient.sparse_dim() == 1 for gradient in gradients):
        parts = [(gradient.indices()[0], gradient.values()) for gradient in gradients]
        if (kernels := training_kernels(*(values for _, values in parts))) is not None:
            return _of_rows(*kernels.add_rows(parts), gradients[0].shape)
    return reduce(torch.add, gradients)


class RowwiseAdagrad(MatrixOptimizer):
    """Adagrad with one accumulator for each row of a table: a step reads and writes the rows in its gradient only.

    `s[row] += mean(g²)` and `w[row] -= lr · g / (sqrt(s[row]) + eps)`. A constant factor of all gradients changes
    nothing, so they need no clipping. There is no momentum and no weight decay, which would touch every row. Rows
    without a gradient keep their bits; a dense gradient gives the same result as a sparse one.

    Source: Adagrad (Duchi et al. 2011), row-wise as in Mudigere et al. 2022, *Software-Hardware Co-design for Fast and
    Scalable Training of Deep Learning Recommendation Models*.

    Args:
        params: matrices (rows, width), or groups of them.
    """

    # Entries of a parameter's state with one number for each row.
    row_states = ("row_sums",)

    def __init__(
        self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]], lr: float = 0.02, eps: float = 1e-10
    ):
        check_not_negative(lr=lr, eps=eps)
        super().__init__(params, {"lr": lr, "eps": eps})

    def update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        for table in parameters:
            self._update(table, table.grad, group["lr"], group["eps"])

    def _update(self, table: nn.Parameter, gradient: torch.Tensor, rate: float, eps: float) -> None:
        sums = self.row_sums(table)
        if not gradient.is_sparse:
            gradient = gradient.to(sums.dtype)
            sums += gradient.square().mean(1)
            table -= (gradient * (rate / (sums.sqrt() + eps))[:, None]).to(table.dtype)
            return
        gradient = coalesced(gradient)
        rows, values = gradient.indices()[0], gradient.values().to(sums.dtype)
        if sums.dtype is table.dtype and (kernels := training_kernels(table, sums, values)) is not None:
            kernels.table_adagrad(table, sums, rows, values, rate, eps)
            return
        touched = sums[rows] + values.square().mean(1)
        sums.index_copy_(0, rows, touched)
        step = values * (rate / (touched.sqrt() + eps))[:, None]
        table.index_add_(0, rows, step.to(table.dtype), alpha=-1)

    def row_sums(self, table: nn.Parameter) -> torch.Tensor:
        """The sums (rows,) of a table's rows, which a step changes."""
        state = self.state[table]
        if not state:
            # In bfloat16, a sum would soon be too large to grow.
            state["row_sums"] = torch.zeros(table.shape[0], dtype=_sum_type(table), device=table.device)
        return state["row_sums"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; sums of rows keep their type, whatever the type of the table."""
        super().load_state_dict(state_dict)
        restore_row_sums(self, state_dict)


def restore_row_sums(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Undo the rounding of `Optimizer.load_state_dict`, which gives states the type of their parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for name in RowwiseAdagrad.row_states:
            if name in (saved := state_dict["state"].get(number, {})):
                value = saved[name].to(parameter.device, _sum_type(parameter), copy=True)
                optimizer.state[parameter][name] = value


def _sum_type(table: torch.Tensor) -> torch.dtype:
    return torch.promote_types(table.dtype, torch.float32)
