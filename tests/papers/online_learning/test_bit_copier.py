"""Bit copier: its loss, and cosines between gradients, on cases whose answer is known."""

import numpy as np
import pytest
import torch

from hf_recurrent import Copying
from papers.online_learning.bit_copier import BitCopier, CopiedBits, layer_cosines


def test_loss_is_that_of_the_asked_bits():
    data = CopiedBits(3, 5, seed=0)
    item = data[2]
    assert item["input_values"].shape == (13, 8) and item["labels"].shape == (13, 7)
    assert item["input_values"][-3:, 7].all() and not item["input_values"][:-3, 7].any()
    torch.testing.assert_close(item["labels"][-3:].float(), item["input_values"][:3, :7])
    bits = torch.stack([data[index]["labels"] for index in range(5)])
    right = torch.nn.functional.one_hot(bits, 2).movedim(-1, 2) * 40.0
    assert data.loss(right, bits) < 1e-8
    right[:, :-3] = 0
    assert data.loss(right, bits) < 1e-8
    assert data.loss(0 * right, bits).item() == pytest.approx(0.6931, abs=1e-4)
    ids, _ = Copying(num_tokens=3, delay=7, num_symbols=128).examples(np.arange(5))
    for row in range(5):
        numbers = [int("".join(str(int(bit)) for bit in step), 2) for step in data.inputs[row, :3, :7]]
        assert numbers == (ids[row, :3] - 1).tolist() and not data.inputs[row, 3:, :7].any()
    assert not torch.equal(data.inputs, CopiedBits(3, 5, seed=0, split="validation").inputs)


def test_cosines_are_one_where_the_rule_is_exact():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "state_size": 8, "num_hidden_layers": 3}
    data = CopiedBits(4, 6, seed=0)
    cosines = {
        rule: layer_cosines(BitCopier(sizes, rule).double(), wide(data)) for rule in ("bptt", "rtrl", "spatial")
    }
    assert cosines["bptt"] == pytest.approx([1, 1, 1])
    assert cosines["rtrl"][2] == pytest.approx(1) and cosines["rtrl"][0] < 0.999
    assert cosines["spatial"][2] < 0.999


def wide(data):
    data.inputs = data.inputs.double()
    return data


def test_sequences_without_a_first_bit_are_dropped():
    data = CopiedBits(2, 600, 0)
    count = int(data.inputs[:, 0].any(dim=-1).sum())
    data.drop_silent_starts()
    assert len(data) == len(data.bits) == count < 600
    assert data.inputs[:, 0].any(dim=-1).all()
