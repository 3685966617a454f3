"""The loss of a language model against sums written out in float64."""

import pytest
import torch

from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX, causal_lm_loss


@pytest.mark.parametrize("num_items", [None, 5])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_loss_is_the_sum_by_hand(num_items, is_weighted):
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 7, dtype=torch.float64)
    targets = torch.tensor([[1, 6, IGNORE_INDEX, 0], [3, IGNORE_INDEX, 2, 2]])
    weights = torch.rand(2, 4) if is_weighted else None
    total = 0.0
    for row, step in (targets != IGNORE_INDEX).nonzero().tolist():
        probability = logits[row, step].exp()[targets[row, step]] / logits[row, step].exp().sum()
        total -= probability.log().item() * (weights[row, step].item() if is_weighted else 1)
    loss = causal_lm_loss(logits, None, targets, num_items, weights)
    assert loss.item() == pytest.approx(total / (num_items or 6), rel=1e-12)
