"""Losses of a model on the episodes of a corpus, with the state carried or in independent windows.

Shape letters: B streams or batch, T steps, V vocabulary.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.modeling.block.recurrent_state import detach_state, select_state, upcast

if TYPE_CHECKING:
    from hf_recurrent.data.corpus import Corpus


class BlockLosses(NamedTuple):
    """Losses (B, T) of the targets of a block in nats, 0 where there is none, and the number of bytes read.

    `network` has the losses of the network without its count memory; None for a model without one.
    """

    nats: torch.Tensor
    network: torch.Tensor | None
    num_bytes: int

    @property
    def sums(self) -> dict[str, float]:
        """`nats`, and `network_nats` for a model with a count memory."""
        losses = {"nats": self.nats, "network_nats": self.network}
        return {name: part.sum(dtype=torch.float64).item() for name, part in losses.items() if part is not None}


def has_count_memory(model: nn.Module) -> bool:
    """True if the model's predictions are mixed with counts."""
    return getattr(model, "count_memory", None) is not None


def zero_sums(model: nn.Module) -> dict[str, float]:
    """[`BlockLosses.sums`] before the first block."""
    return dict.fromkeys(("nats", "network_nats") if has_count_memory(model) else ("nats",), 0.0)


def carried_token_losses(
    model: PreTrainedModel, batches: Iterable[dict[str, torch.Tensor]], num_streams: int
) -> Iterator[BlockLosses]:
    """Yield the losses of every block of [`EvaluationStreams`], with the state carried from block to block.

    A stream that has ended does not begin again; the losses of a block are of the other streams.
    """
    state, reading = model.init_state(num_streams), torch.ones(num_streams, dtype=torch.bool)
    for batch in batches:
        attended = batch["attention_mask"].sum(1)
        # Finished streams are dropped from the batch.
        state = select_state(state, attended[reading].nonzero().squeeze(1))
        reading = attended > 0
        input_ids, labels, reset_mask = (
            batch[name][reading, : int(attended.max())].to(model.device)
            for name in ("input_ids", "shift_labels", "reset_mask")
        )
        if has_count_memory(model):
            nats, network, state = model.token_losses(input_ids, labels, state, reset_mask)
        else:
            output = model(input_ids=input_ids, reset_mask=reset_mask, state=state, use_cache=True)
            nats, network, state = token_nats(output.logits, labels), None, output.state
        state = detach_state(state)
        yield BlockLosses(nats, network, int(attended.sum()))


def window_losses(
    model: PreTrainedModel, corpus: "Corpus", num_windows: int, block_size: int
) -> Iterator[BlockLosses]:
    """Yield the losses of every batch of independent windows."""
    for inputs, labels, num_bytes in _window_batches(corpus, num_windows, block_size):
        # Causal models need no attention mask for padding on the right.
        input_ids, targets = (torch.from_numpy(array).to(model.device) for array in (inputs, labels))
        if has_count_memory(model):
            nats, network, _ = model.token_losses(input_ids, targets)
        else:
            nats, network = token_nats(model(input_ids=input_ids, use_cache=False).logits, targets), None
        yield BlockLosses(nats, network, num_bytes)


def _window_batches(
    corpus: "Corpus", num_windows: int, block_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yield inputs and targets, both (B, T) int64, and their bytes; sorted by length to reduce padding."""
    lengths = np.diff(corpus.offsets)
    counts = -(-lengths // block_size)
    episode = np.repeat(np.arange(len(lengths)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    start = (np.arange(len(episode)) - first) * block_size
    length = np.minimum(block_size, lengths[episode] - start)
    order = np.argsort(-length, kind="stable")
    for rows in np.split(order, range(num_windows, len(order), num_windows)):
        shape = (len(rows), int(length[rows[0]]))
        inputs, labels = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORE_INDEX, dtype=np.int64)
        for row, window in enumerate(rows):
            tokens, begin, size = corpus[int(episode[window])], int(start[window]), int(length[window])
            inputs[row, :size] = tokens[begin : begin + size]
            following = tokens[begin + 1 : begin + size + 1]
            labels[row, : len(following)] = following
            if len(following) < size and corpus.end_token_id is not None:
                labels[row, size - 1] = corpus.end_token_id
        yield inputs, labels, int(length[rows].sum())


def token_nats(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-log p(label) of every label, 0 for -100: (B, T); logits (B, T, V), labels (B, T)."""
    losses = F.cross_entropy(upcast(logits).flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(labels.shape)


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Put models in evaluation mode inside the block, then restore their modes."""
    training = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, before in zip(models, training, strict=True):
            model.train(before)
