"""Sequential operations of a step, counted."""

import torch

from papers.smt.models import build_pair
from papers.smt.operations import critical_path, step_operations

SHAPE = {
    "hidden_size": 8, "num_memory_tokens": 2, "num_attention_heads": 2, "num_hidden_layers": 1, "num_readout_layers": 1
}  # fmt: skip


def test_critical_path_is_the_longest_chain():
    weight = torch.randn(3, 3, requires_grad=True)
    hidden = torch.ones(2, 3)
    for _ in range(4):
        hidden = (hidden @ weight).tanh().view(2, 3)  # two operations; a view counts zero
    short = (torch.ones(2, 3) @ weight).sum()
    assert critical_path(hidden.sum() + short) == 4 * 2 + 2
    assert critical_path(short) == 2


def test_sequential_operations_grow_with_the_length_but_for_smt():
    rnn, teacher = build_pair(SHAPE, 5, 0)
    counts = {
        method: [step_operations(rnn, teacher, method, length, 3) for length in (2, 4, 8)]
        for method in ("BPTT", "SMT", "DMT")
    }
    assert len(set(counts["SMT"])) == 1
    for method in ("BPTT", "DMT"):
        first, second, third = counts[method]
        assert 0 < 2 * (second - first) == third - second
    # The cost of one more unrolled step depends only on the depth of the update.
    assert counts["BPTT"][1] - counts["BPTT"][0] == counts["DMT"][1] - counts["DMT"][0]
    deeper, deep_teacher = build_pair(SHAPE | {"num_hidden_layers": 2}, 5, 0)
    growth = [step_operations(deeper, deep_teacher, "BPTT", length) for length in (2, 4)]
    assert growth[1] - growth[0] > 1.5 * (counts["BPTT"][1] - counts["BPTT"][0])
