"""The losses of SMT and DMT against plain loops in float64, written from the paper's equations."""

import math

import pytest
import torch

from hf_recurrent.trainers.smt.smt_objective import decoder_loss, dynamics_loss, unexplained_variance, uniformity_loss


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_decoder_loss():
    logits, labels = normal(3, 4, 7), torch.randint(7, (3, 4), generator=torch.Generator().manual_seed(1))
    labels[0, 1:] = labels[2] = -100
    nats = [
        -math.log(math.exp(logits[row, step, labels[row, step]]) / sum(math.exp(v) for v in logits[row, step]))
        for row in range(3)
        for step in range(4)
        if labels[row, step] >= 0
    ]
    assert len(nats) == 5
    assert decoder_loss(logits, labels).item() == pytest.approx(sum(nats) / 5, rel=1e-10)
    assert decoder_loss(logits, torch.full_like(labels, -100)).item() == 0


def test_dynamics_loss():
    predicted, memory = normal(2, 3, 4), normal(2, 3, 4, seed=1)
    squares = [(p - m) ** 2 for p, m in zip(predicted.flatten().tolist(), memory.flatten().tolist(), strict=True)]
    assert dynamics_loss(predicted, memory).item() == pytest.approx(sum(squares) / len(squares), rel=1e-10)


@pytest.mark.parametrize("over", ["tokens", "states"])
def test_uniformity_loss(over):
    rows, steps, tokens = 4, 2, 3
    memory = normal(rows, steps, tokens, 5)
    terms = []
    for step in range(steps):
        points = memory[:, step] if over == "tokens" else memory[:, step].reshape(rows, 1, -1)
        points = points / points.norm(dim=-1, keepdim=True)
        for token in range(points.shape[1]):
            for a in range(rows):
                for b in range(a):
                    distance = (points[a, token] - points[b, token]).norm().item()
                    terms.append(math.exp(-2 * distance**2))
    assert uniformity_loss(memory, over).item() == pytest.approx(math.log(sum(terms) / len(terms)), rel=1e-10)


def test_uniformity_is_zero_for_a_collapse_and_low_for_spread_memories():
    assert uniformity_loss(torch.ones(5, 1, 2, 3)).item() == pytest.approx(0, abs=1e-5)
    assert uniformity_loss(normal(64, 1, 2, 256)).item() < -3.9
    with pytest.raises(ValueError, match="holds 1 sequence"):
        uniformity_loss(torch.ones(1, 1, 2, 3))


def test_drift_is_one_minus_r_squared():
    memory = normal(50, 2, 3)
    residual, total = unexplained_variance(memory.mean(0).expand_as(memory), memory)
    assert (residual / total).item() == pytest.approx(1, rel=1e-10)  # as good as the mean
    residual, total = unexplained_variance(memory + 0.1, memory)
    means = memory.mean(0)
    assert total.item() == pytest.approx(sum(((m - means) ** 2).sum().item() for m in memory), rel=1e-10)
    assert residual.item() == pytest.approx(0.01 * memory.numel(), rel=1e-10)
