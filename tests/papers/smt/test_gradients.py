"""Norms of the memories' gradients, against differences."""

import numpy as np
import pytest
import torch

from hf_recurrent import Retrieval
from papers.smt.gradients import bptt_norms, scale_maps, smt_norms
from papers.smt.models import build_pair

SHAPE = {
    "hidden_size": 8, "num_memory_tokens": 2, "num_attention_heads": 2, "num_hidden_layers": 1, "num_readout_layers": 1
}  # fmt: skip


def test_gradient_norms_of_the_unrolled_network():
    """Against finite differences of the loss with respect to a memory."""
    rnn, _ = (model.double() for model in build_pair(SHAPE, 5, 0))
    task = Retrieval(length=5, vocab_size=5)
    inputs, targets = (torch.from_numpy(part) for part in task.examples(np.arange(1)))
    norms = bptt_norms(rnn, inputs, targets)

    @torch.no_grad()
    def loss(change):
        memory = rnn.init_state(1)["memory"]
        for step in range(5):
            memory = rnn.update(memory, inputs[:, step])
            if step == 1:
                memory = memory + change
        return torch.nn.functional.cross_entropy(rnn.readout(memory), targets[:, -1]).item()

    gradient = torch.zeros(1, 2, 8, dtype=torch.float64)
    for place in range(16):
        step = torch.zeros(16, dtype=torch.float64)
        step[place] = 1e-6
        gradient.view(-1)[place] = (loss(step.view(1, 2, 8)) - loss(-step.view(1, 2, 8))) / 2e-6
    assert norms.shape == (5,)
    assert norms[1].item() == pytest.approx(gradient.norm().item(), rel=1e-5)


def test_gradients_of_smt_do_not_depend_on_the_length():
    """Larger maps make BPTT's gradients explode with the distance to the end, but not SMT's."""
    shape = SHAPE | {"num_memory_tokens": 8, "num_readout_layers": 4}
    rnn, teacher = (model.double() for model in build_pair(shape, 5, 0))
    for model in (rnn, teacher):
        before = model.lm_head.weight.clone()
        scale_maps(model, 3.0)
        assert torch.equal(model.lm_head.weight, before)
    task = Retrieval(length=48, vocab_size=5)
    inputs, targets = (torch.from_numpy(part) for part in task.examples(np.arange(3)))
    ratios = [
        (norms.max() / norms.min()).item()
        for norms in (bptt_norms(rnn, inputs, targets), smt_norms(rnn, teacher, inputs, targets))
    ]
    assert ratios[0] > 1000 > 50 > ratios[1]
