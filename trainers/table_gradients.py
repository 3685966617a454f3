"""`TableGradients`: sparse gradients of tables, averaged over processes without a pass over the tables."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_recurrent.learning_rules.rowwise_adagrad import coalesced, sparse_tables, sum_of_gradients


class TableGradients:
    """Sparse gradients of a model's tables: ordered by row, and averaged over processes.

    Every process has whole tables, also if other weights are sharded (FSDP2). DDP leaves tables to this class, since
    NCCL cannot reduce sparse gradients: processes exchange the rows that they touched. Nor does DDP need to
    broadcast the buffers named in `learned_alike`, which all processes change in the same way.
    """

    def __init__(self, model: nn.Module, world_size: int, learned_alike: Sequence[str] = ()):
        tables = {name: table for name, table in sparse_tables(model).items() if table.requires_grad}
        self.tables, self.world_size = list(tables.values()), world_size
        self._parts: list[list[torch.Tensor]] = [[] for _ in self.tables]  # of each table, by micro-batch
        if world_size > 1 and (tables or learned_alike):
            ignored = [*tables, *learned_alike]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
            for table in self.tables:
                dist.broadcast(table.data, 0)

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self.tables)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return any(parameter is table for table in self.tables)

    @contextmanager
    def coalescing(self) -> Iterator[None]:
        """Inside the block, the gradients of micro-batches are added up by `average`, each of them coalesced.

        So micro-batches of one process add up in the same order as in several processes, and all at once:
        autograd would write the whole sum again for each of them.
        """
        handles = [
            table.register_post_accumulate_grad_hook(partial(_take, parts))
            for table, parts in zip(self.tables, self._parts, strict=True)
        ]
        try:
            yield
        finally:
            for handle, parts in zip(handles, self._parts, strict=True):
                handle.remove()
                parts.clear()

    def average(self) -> None:
        """Average the gradients over all processes, which call this together; each gets the same bits."""
        for table, parts in zip(self.tables, self._parts, strict=True):
            if table.grad is not None:
                _take(parts, table)
            if parts:
                table.grad = sum_of_gradients(parts)
                parts.clear()
            if self.world_size > 1 and table.requires_grad:
                table.grad = self._averaged(table)

    def _averaged(self, table: nn.Parameter) -> torch.Tensor:
        rows, values = _rows_and_values(table)
        own_size = torch.tensor([len(rows)], device=table.device)
        sizes = self._gathered(own_size)
        most = int(max(sizes))
        parts = [
            [part[: int(size)] for part, size in zip(self._gathered(_padded(each, most)), sizes, strict=True)]
            for each in (rows, values)
        ]
        rows, values = map(torch.cat, parts)
        gradient = coalesced(torch.sparse_coo_tensor(rows[None], values, table.shape, check_invariants=False))
        gradient.values().div_(self.world_size)
        return gradient

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """A tensor of the same shape from each process."""
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor.contiguous())
        return gathered


def _take(parts: list[torch.Tensor], table: nn.Parameter) -> None:
    """Move the gradient of a table to `parts`."""
    parts.append(table.grad)
    table.grad = None


def _rows_and_values(table: nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows (n,) of a table that have a gradient, and their gradients (n, width)."""
    if table.grad is None:  # nothing that this process read touches the table
        return torch.empty(0, dtype=torch.long, device=table.device), table.new_empty(0, table.shape[1])
    if table.grad.is_sparse:
        gradient = coalesced(table.grad)
        return gradient.indices()[0], gradient.values()
    return torch.arange(len(table), device=table.device), table.grad


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """The tensor with zeros after it, so that its first dimension is `size`."""
    return torch.cat([tensor, tensor.new_zeros(size - len(tensor), *tensor.shape[1:])])
