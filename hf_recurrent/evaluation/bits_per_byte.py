"""Bits per byte of a model on held-out episodes.

    bits per byte = total negative log-likelihood in nats / ln 2 / number of document bytes

An episode d_0 … d_{n-1} has the inputs d_0 … d_{n-1} and the targets d_1 … d_{n-1} and end byte: the numerator
includes the cost of the end byte, and the first byte is given. Binary corpora have no end byte and one target less.
"""

from transformers import PreTrainedModel

from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.episode_source import EvaluationShare, check_window
from hf_recurrent.stock_models.with_state import with_state


def evaluate_bits_per_byte(
    model: PreTrainedModel,
    corpus: Corpus,
    *,
    num_streams: int = 8,
    block_size: int = 1024,
    carry_state: bool = True,
    progress: bool = True,
) -> dict[str, float | int]:
    """Evaluate `model` on every byte of every episode of `corpus`.

    The context of a byte depends on the model:

    * For a recurrent model, ours or one of [`with_state`], with `carry_state=True`, it is the whole episode; then
      `num_streams` and `block_size` change speed and memory, not the result (beyond rounding).
    * With `carry_state=False`, and for models without a state (stock Llama), episodes are cut into
      independent windows of `block_size` bytes. A byte has at most `block_size` bytes of context, on average
      (`block_size` + 1) / 2, and the result depends on `block_size`.

    The model runs in its own type; each loss is computed in float32 or wider, and the sum in float64. The model's mode
    is restored.

    Args:
        model: a causal language model over the token ids of the corpus.
        corpus: the held-out episodes.
        num_streams: B, episodes or windows read in parallel.
        block_size: T, bytes per block or window.
        carry_state: carry the state of a recurrent model from block to block.
        progress: show a progress bar.

    Returns:
        `bits_per_byte`, `nats` (the total), `num_bytes` and `num_episodes`; for a model with a count memory also
        `network_bits_per_byte` and `network_nats`, of the network alone.

    Raises:
        ValueError: the corpus has ids outside the model's vocabulary, `num_streams` or `block_size` is
            below 1, or `block_size` exceeds the model's number of positions.
    """
    for name, value in (("num_streams", num_streams), ("block_size", block_size)):
        if value < 1:
            raise ValueError(f"`{name}` is {value}; it must be at least 1.")
    if carry_state:
        model = with_state(model)
    corpus.check_model("corpus", model)
    check_window("block_size", block_size, model)
    share = EvaluationShare(batch_size=num_streams, block_size=block_size, carry_state=carry_state, progress=progress)
    sums = corpus.evaluate(model, share)
    return corpus.evaluation_metrics(sums) | sums
