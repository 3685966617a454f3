"""Count memories without a network, and without their short-term part: what each of them is worth.

`TrainingBytes` are the bytes that a run on streams has read, in its order, so that other methods can read the same.

Shape letters: B streams or batch, T steps.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from hf_recurrent.checkpoints.records import Provenance
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.streams import MultiStreamDataset, unreached_documents
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, StatefulModel
from hf_recurrent.modeling.contexts.count_memory import STATE_PART, CountMemory
from hf_recurrent.modeling.contexts.count_memory_layout import MemoryShape
from hf_recurrent.modeling.contexts.counted_predictions import TokenLosses
from hf_recurrent.modeling.contexts.document_learning import DocumentLearning


@dataclass(frozen=True)
class TrainingBytes:
    """The first steps of streams of a corpus."""

    corpus: Corpus
    num_streams: int  # B
    block_size: int  # T
    seed: int  # of the order of documents
    steps: int  # number of blocks of every stream
    count_bytes: float = 0.0  # of other documents that a count memory read before, as in the arguments of the run
    planned_steps: int = 0  # of the run, when these documents were chosen

    @property
    def num_bytes(self) -> int:
        return self.num_streams * self.block_size * self.steps

    @cached_property
    def ahead(self) -> list[np.ndarray]:
        """The documents that a count memory read before the streams."""
        length = self.planned_steps * self.block_size
        indices = unreached_documents(self.corpus, self.num_streams, length, self.seed, self.count_bytes)
        return [self.corpus[index] for index in indices]

    @property
    def num_counted_bytes(self) -> int:
        """Number of bytes that a count memory has read."""
        return self.num_bytes + sum(map(len, self.ahead))

    def blocks(self) -> Iterator[dict[str, torch.Tensor]]:
        """The blocks in their order, with the keys of [`MultiStreamDataset`]."""
        dataset = MultiStreamDataset(self.corpus, self.num_streams, self.block_size, self.seed)
        for _, batch in zip(range(self.steps), dataset, strict=False):
            yield batch

    def documents(self) -> list[bytes]:
        """Documents that were read ahead, then others in the order of their ends, block by block; the last are cut."""
        # Long blocks of the same streams, which are read faster.
        length = self.block_size * self.steps
        size = min(length, 1 << 14)
        dataset = MultiStreamDataset(self.corpus, self.num_streams, size, self.seed)
        batches = [batch for _, batch in zip(range(math.ceil(length / size)), dataset, strict=False)]
        tokens = torch.cat([batch["input_ids"] for batch in batches], 1)[:, :length].numpy()
        resets = torch.cat([batch["reset_mask"] for batch in batches], 1)[:, :length].numpy()
        tokens = tokens.astype(self.corpus.store.dtype)
        found = []
        for stream in range(self.num_streams):
            borders = np.union1d(np.flatnonzero(resets[stream]), [0, length]).tolist()
            for begin, end in itertools.pairwise(borders):
                found.append(((end // self.block_size, stream, end), tokens[stream, begin:end].tobytes()))
        return [document.tobytes() for document in self.ahead] + [document for _, document in sorted(found)]


def bytes_read(provenance: Provenance, corpus: Corpus) -> TrainingBytes | str:
    """The bytes that a model with this record of training has read, or a sentence that says why they are not known."""
    if len(provenance.phases) != 1 or provenance.phases[0].base is not None or provenance.gaps:
        return "the model was not trained in a single recorded phase."
    phase = provenance.phases[0]
    if [data.fingerprint for data in phase.data] != [corpus.fingerprint]:
        return "the model was trained on other data than the training part of this corpus."
    settings = phase.segments[-1].settings
    if settings.get("regime") != "multi_stream" or not {"streams", "block_size", "data_seed"} <= settings.keys():
        return "the model was not trained on streams."
    streams, block_size = settings["streams"], settings["block_size"]
    ahead = {name: settings[name] for name in ("count_bytes", "planned_steps") if name in settings}
    steps = phase.read // (streams * block_size)
    return TrainingBytes(corpus, streams, block_size, settings["data_seed"], steps, **ahead)


class CountsAlone(StatefulModel, nn.Module):
    """A count memory that predicts without a network, as [`learn_counts`] makes it, to be evaluated like a model."""

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
        counts = self.init_state(len(input_ids))[STATE_PART] if state is None else state[STATE_PART]
        nats, _, counts = self.count_memory.read(input_ids, counts, None, reset_mask, targets=shift_labels)
        return TokenLosses(nats, nats, {STATE_PART: counts})


def learn_counts(shape: MemoryShape, read: TrainingBytes, *, progress: bool = True) -> CountMemory:
    """A memory that has read the bytes of a run in the run's order, and learned as there, but without a network."""
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
    """Inside the block, logits and state of the model are its network's."""
    return replaced_memory(model, lambda memory: None)
