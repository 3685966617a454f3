"""Losses of Supervised and DAgger Memory Training (SMT, sections 2.2 and 2.3).

Shape letters: B batch, V vocabulary, Z memory tokens, D width of a memory token, Tf future.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.modeling.block.recurrent_state import upcast


def decoder_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """`L_dec`: mean cross-entropy, in nats, of the decoder's predictions from a memory.

    Args:
        logits: (…, Tf, V), the predictions of y_t, y_{t+1}, ….
        labels: (…, Tf), y_t, y_{t+1}, …; -100 is ignored.
    """
    count = labels.ne(IGNORE_INDEX).sum().clamp(min=1)
    return F.cross_entropy(upcast(logits).flatten(0, -2), labels.flatten(), reduction="sum") / count


def dynamics_loss(predicted: Tensor, memory: Tensor) -> Tensor:
    """`L_dyn`, and in a rollout `L_dmt`: mean squared error of memories, both (…, Z, D)."""
    return F.mse_loss(upcast(predicted), upcast(memory))


def uniformity_loss(memory: Tensor, over: str = "tokens") -> Tensor:
    """`L_unif` = log E exp(-2‖m_a - m_b‖²) over pairs of different sequences (Wang and Isola, 2020).

    Memories are normalized to length 1. 0 means that they have collapsed; about -4, that they are uniform.

    Args:
        memory: (B, anchors, Z, D); memories of the same anchor in different sequences are compared.
        over: "tokens" compares each of the Z tokens, "states" the whole memory as one vector.

    Raises:
        ValueError: there are fewer than two sequences.
    """
    rows = len(memory)
    if rows < 2:
        raise ValueError(f"`memory` holds {rows} sequence; it must hold at least 2 to compare.")
    if over == "states":
        memory = memory.flatten(2).unsqueeze(2)
    points = F.normalize(upcast(memory), dim=-1).flatten(1, 2).transpose(0, 1)  # (anchors · Z, B, D)
    squares = 2 - 2 * points @ points.transpose(1, 2)
    first, second = torch.triu_indices(rows, rows, offset=1, device=memory.device)
    pairs = -2 * squares[:, first, second]
    return pairs.flatten().logsumexp(0) - torch.tensor(pairs.numel(), dtype=pairs.dtype).log()


def unexplained_variance(predicted: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Residual and total sum of squares; their ratio is the drift 1 - R² of predicted memories.

    Args:
        predicted, memory: (B, Z, D); the mean is taken over B, separately for every entry of the memory.
    """
    memory, predicted = upcast(memory), upcast(predicted)
    return (predicted - memory).square().sum(), (memory - memory.mean(0)).square().sum()
