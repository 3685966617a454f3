"""Count memories without a network, and without their short-term part: what each of them is worth.

Shape letters: B streams or batch, T steps.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from tqdm.auto import tqdm

from hf_recurrent.evaluation.training_bytes import TrainingBytes
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, StatefulModel
from hf_recurrent.modeling.contexts.count_memory import STATE_PART, CountMemory
from hf_recurrent.modeling.contexts.count_memory_layout import MemoryShape
from hf_recurrent.modeling.contexts.counted_predictions import TokenLosses
from hf_recurrent.modeling.contexts.document_learning import DocumentLearning


class CountsAlone(StatefulModel, nn.Module):
    """A count memory that predicts without a network, to be evaluated like a model.

    Args:
        memory: the memory; its mixing weights should have learned without a network too ([`learn_counts`]).
    """

    integer_state_parts = frozenset({STATE_PART})
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, memory: CountMemory) -> None:
        super().__init__()
        self.count_memory = memory

    def state_layout(self) -> dict[str, tuple[int, ...]]:
        return self.count_memory.state_layout()

    def token_losses(
        self,
        input_ids: torch.Tensor,
        shift_labels: torch.Tensor,
        state: RecurrentState | None = None,
        reset_mask: torch.Tensor | None = None,
    ) -> TokenLosses:
        """Losses of the targets of a block; arguments as for the model's `token_losses`."""
        counts = self.init_state(len(input_ids))[STATE_PART] if state is None else state[STATE_PART]
        nats, _, counts = self.count_memory.read(input_ids, counts, None, reset_mask, targets=shift_labels)
        return TokenLosses(nats, nats, {STATE_PART: counts})


def learn_counts(shape: MemoryShape, read: TrainingBytes, *, progress: bool = True) -> CountMemory:
    """A memory that has read the bytes of a run in the run's order, and learned as in the run, but without a network.

    Args:
        shape: sizes of the memory.
        read: the bytes.
        progress: show a progress bar.
    """
    memory = CountMemory(shape)
    documents = DocumentLearning(memory, read.num_streams)
    bar = tqdm(total=read.num_bytes, unit="B", unit_scale=True, desc="counting", disable=not progress, leave=False)
    with bar:
        documents.read_ahead(read.ahead, read.corpus.end_token_id)
        for block in read.blocks():
            documents.read(block)
            bar.update(block["input_ids"].numel())
    documents.finish()
    return memory


def frozen_memory(memory: CountMemory) -> CountMemory:
    """The same memory, with the same tensors, without its short-term part: it does not adapt to what it reads."""
    with torch.device("meta"):
        frozen = CountMemory(memory.shape._replace(window=0, rows=0))
    for name, tensor in memory.named_buffers():
        setattr(frozen, name, tensor)
    return frozen.train(memory.training)


@contextmanager
def replaced_memory(model: nn.Module, replacement: Callable[[CountMemory], CountMemory | None]) -> Iterator[None]:
    """Inside the block, a language model has the replacement of its count memory, or none; states are of another size.

    The model itself is changed: one that is sharded cannot be copied. An adapter's model has the memory further in.
    """
    holders = [part for part in model.modules() if isinstance(part._modules.get("count_memory"), CountMemory)]
    memories = [holder.count_memory for holder in holders]
    for holder, memory in zip(holders, memories, strict=True):
        holder.count_memory = replacement(memory)
    try:
        yield
    finally:
        for holder, memory in zip(holders, memories, strict=True):
            holder.count_memory = memory


def frozen(model: nn.Module) -> AbstractContextManager[None]:
    """Inside the block, a language model has the [`frozen_memory`] of its count memory.

    Raises:
        ValueError: the model has no count memory.
    """
    if not any(isinstance(part, CountMemory) for part in model.modules()):
        raise ValueError("The model has no count memory, so nothing in it adapts to what it reads.")
    return replaced_memory(model, frozen_memory)


def network_alone(model: nn.Module) -> AbstractContextManager[None]:
    """Inside the block, logits and state of the model are those of its network."""
    return replaced_memory(model, lambda memory: None)
