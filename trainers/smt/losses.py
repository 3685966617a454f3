"""The losses of Supervised and of DAgger Memory Training as plain functions (SMT, sections 2.2 and 2.3)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_recurrent.modeling.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.modeling.recurrent_state import upcast


def decoder_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """`L_dec`: mean cross-entropy, in nats, of what the decoder predicts from a memory.

    Args:
        logits: (..., Tf, V), prediction i of y_{t+i}.
        labels: (..., Tf), y_{t+i}, or -100 where nothing is asked.
    """
    count = labels.ne(IGNORE_INDEX).sum().clamp(min=1)
    return F.cross_entropy(upcast(logits).flatten(0, -2), labels.flatten(), reduction="sum") / count


def dynamics_loss(predicted: Tensor, memory: Tensor) -> Tensor:
    """`L_dyn`, and over a rollout `L_dmt`: mean squared error of memories, each (..., M, D)."""
    return F.mse_loss(upcast(predicted), upcast(memory))


def uniformity_loss(memory: Tensor, over: str = "tokens") -> Tensor:
    """`L_unif` = log E exp(-2‖m_a - m_b‖²) over pairs of different sequences: 0 is collapse, about -4 is uniform.

    Memories are normalised to length 1 first (Wang and Isola, 2020).

    Args:
        memory: (B, K, M, D), K memories of each sequence; the k-th of one is compared with the k-th of the others.
        over: "tokens" compares each of the M tokens, "states" the whole memory as one vector.

    Raises:
        ValueError: fewer than two sequences.
    """
    rows = len(memory)
    if rows < 2:
        raise ValueError(f"`memory` holds {rows} sequence; uniformity compares at least 2.")
    if over == "states":
        memory = memory.flatten(2).unsqueeze(2)
    points = F.normalize(upcast(memory), dim=-1).flatten(1, 2).transpose(0, 1)  # (K·M, B, D)
    squares = 2 - 2 * points @ points.transpose(1, 2)
    first, second = torch.triu_indices(rows, rows, offset=1, device=memory.device)
    pairs = -2 * squares[:, first, second]
    return pairs.flatten().logsumexp(0) - torch.tensor(pairs.numel(), dtype=pairs.dtype).log()


def unexplained_variance(predicted: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Residual and total sum of squares, whose ratio is the drift 1 - R² of predicted memories.

    Args:
        predicted, memory: (rows, M, D); the mean is taken over rows, for every entry of the memory.
    """
    memory, predicted = upcast(memory), upcast(predicted)
    return (predicted - memory).square().sum(), (memory - memory.mean(0)).square().sum()
