"""Bits per byte of a model on held-out episodes.

    bits per byte = total nats / ln 2 / number of document bytes

An episode d_0 … d_{n-1} is read as the inputs d_0 … d_{n-1} with the targets d_1 … d_{n-1} and the end byte, so the
cost of ending is in the numerator and the first byte, which nothing comes before, is given. (Binary corpora have no
end byte: one target less.)
"""

from transformers import PreTrainedModel

from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.episode_source import EvaluationShare, check_window


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
    for name, value in (("num_streams", num_streams), ("block_size", block_size)):
        if value < 1:
            raise ValueError(f"`{name}` is {value}; it must be at least 1.")
    corpus.check_model("corpus", model)
    check_window("block_size", block_size, model)
    share = EvaluationShare(batch_size=num_streams, block_size=block_size, carry_state=carry_state, progress=progress)
    sums = corpus.evaluate(model, share)
    return corpus.evaluation_metrics(sums) | sums
