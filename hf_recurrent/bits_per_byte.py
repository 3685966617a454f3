"""Bits per byte of a model on held-out episodes.

    bits per byte = total nats / ln 2 / number of document bytes

An episode d_0 … d_{n-1} is read as the inputs d_0 … d_{n-1} with the targets d_1 … d_{n-1} and the end byte, so the
cost of ending is in the numerator and the first byte, which nothing comes before, is given. (Binary corpora have no
end byte: one target less.)

Shape letters: B streams or batch, T steps, V vocabulary.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.streams import EvaluationStreams
from hf_recurrent.modeling.recurrent_state import detach_state, select_state, supports_recurrent_state


def evaluate_bits_per_byte(
    model: PreTrainedModel,
    corpus: Corpus,
    *,
    num_streams: int = 8,
    block_size: int = 1024,
    carry_state: bool = True,
    progress: bool = True,
) -> dict[str, float | int]:
    """Measure `model` on every byte of every episode of `corpus`, each exactly once.

    What stands before a byte when it is predicted:

    * a recurrent model (`supports_recurrent_state`) with `carry_state=True`: all of its episode. The state goes from
      block to block and is zero at the start of an episode, so `num_streams` and `block_size` change the speed and
      the memory, never the result (beyond rounding).
    * `carry_state=False`, and any model without a state to carry (stock Llama, stock Mamba2): the episode is cut
      from its start into windows of `block_size` bytes and each window stands alone. The byte at place i of a window
      is predicted from i + 1 bytes at most, (`block_size` + 1) / 2 on average, and `block_size` is part of the
      result. This is how blocks drawn independently are evaluated.

    The model runs in its own type; each loss is computed in float32 or wider, and the sum is float64. The model is
    put into evaluation mode and back.

    Args:
        model: a causal language model over the token ids of the corpus.
        corpus: the held-out episodes.
        num_streams: B, episodes (or windows) read side by side.
        block_size: T, bytes per block, or per window where the state is not carried.
        carry_state: whether a recurrent model keeps its state from block to block.
        progress: whether to show a progress bar.

    Returns:
        `bits_per_byte`, `nats` (the total), `num_bytes` and `num_episodes`.

    Raises:
        ValueError: the corpus is empty, its ids do not fit the model's vocabulary, `num_streams` or `block_size` is
            below 1, or `block_size` is more than a model with learned positions was built for.
    """
    _check(model, corpus, num_streams, block_size)
    recurrent = carry_state and supports_recurrent_state(model)
    losses = _carried_losses if recurrent else _window_losses
    training = model.training
    model.eval()
    total, read = 0.0, 0
    try:
        with (
            torch.inference_mode(),
            tqdm(total=corpus.num_bytes, unit="B", unit_scale=True, desc="evaluating", disable=not progress) as bar,
        ):
            for nats, num_bytes in losses(model, corpus, num_streams, block_size):
                total += nats
                read += num_bytes
                bar.update(num_bytes)
                bar.set_postfix_str(f"{total / math.log(2) / max(read, 1):.3f} bits per byte", refresh=False)
    finally:
        model.train(training)
    return {
        "bits_per_byte": total / math.log(2) / corpus.num_bytes,
        "nats": total,
        "num_bytes": int(corpus.num_bytes),
        "num_episodes": len(corpus),
    }


def _check(model: PreTrainedModel, corpus: Corpus, num_streams: int, block_size: int) -> None:
    if not len(corpus) or not corpus.num_bytes:
        raise ValueError(f"`corpus` {corpus.name!r} is empty: there is nothing to evaluate.")
    for name, value in (("num_streams", num_streams), ("block_size", block_size)):
        if value < 1:
            raise ValueError(f"`{name}` is {value}; it must be at least 1.")
    if corpus.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"`corpus` {corpus.name!r} has {corpus.vocab_size} token ids, but the model's vocabulary has only "
            f"{model.config.vocab_size}: it was made for another alphabet."
        )
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and not supports_recurrent_state(model) and block_size > limit:
        raise ValueError(f"`block_size` is {block_size}, but the model was built for at most {limit} positions.")


def _carried_losses(
    model: PreTrainedModel, corpus: Corpus, num_streams: int, block_size: int
) -> Iterator[tuple[float, int]]:
    """(nats, bytes read) of every block, the state handed from each to the next."""
    state, reading = None, torch.ones(num_streams, dtype=torch.bool)
    for batch in EvaluationStreams(corpus, num_streams, block_size):
        attended = batch["attention_mask"].sum(1)
        # A stream that has run out has nothing more to say: the others go on without it.
        if state is not None:
            state = select_state(state, attended[reading].nonzero().squeeze(1))
        reading = attended > 0
        input_ids, labels, reset_mask = (
            batch[name][reading, : int(attended.max())].to(model.device)
            for name in ("input_ids", "shift_labels", "reset_mask")
        )
        output = model(input_ids=input_ids, reset_mask=reset_mask, state=state, use_cache=True)
        state = detach_state(output.state)
        yield _sum_nats(output.logits, labels), int(attended.sum())


def _window_losses(
    model: PreTrainedModel, corpus: Corpus, num_windows: int, block_size: int
) -> Iterator[tuple[float, int]]:
    """(nats, bytes read) of every batch of windows; no window sees another."""
    for inputs, labels, num_bytes in _window_batches(corpus, num_windows, block_size):
        # Padding is on the right, so no causal model needs a mask to keep it out of the real positions.
        output = model(input_ids=torch.from_numpy(inputs).to(model.device), use_cache=False)
        yield _sum_nats(output.logits, torch.from_numpy(labels).to(model.device)), num_bytes


def _window_batches(corpus: Corpus, num_windows: int, block_size: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Inputs and targets, both (B, T) int64, and the bytes in them; long windows first so that little is padded."""
    lengths = np.diff(corpus.offsets)
    counts = -(-lengths // block_size)
    episode = np.repeat(np.arange(len(lengths)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    start = (np.arange(len(episode)) - first) * block_size
    length = np.minimum(block_size, lengths[episode] - start)
    order = np.argsort(-length, kind="stable")
    for rows in np.split(order, range(num_windows, len(order), num_windows)):
        shape = (len(rows), int(length[rows[0]]))
        inputs, labels = np.zeros(shape, dtype=np.int64), np.full(shape, -100, dtype=np.int64)
        for row, window in enumerate(rows):
            tokens, begin, size = corpus[int(episode[window])], int(start[window]), int(length[window])
            inputs[row, :size] = tokens[begin : begin + size]
            following = tokens[begin + 1 : begin + size + 1]
            labels[row, : len(following)] = following
            if len(following) < size and corpus.end_token_id is not None:
                labels[row, size - 1] = corpus.end_token_id
        yield inputs, labels, int(length[rows].sum())


def _sum_nats(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Sum of -log p(label), labels of -100 left out; logits (B, T, V), labels (B, T)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    return losses.sum(dtype=torch.float64).item()
