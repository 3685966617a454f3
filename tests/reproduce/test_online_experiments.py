"""What the online-learning experiments read, count and compare, on cases whose answer is known."""

from types import SimpleNamespace

import pytest
import torch

from hf_recurrent.reproduce import load_experiment
from hf_recurrent.reproduce.bit_copier import BitCopier, CopiedBits, layer_cosines
from hf_recurrent.reproduce.online_copy import LAYERS, means_of_parts
from hf_recurrent.reproduce.online_memora import read_log


def test_models_have_the_parameters_of_table_5():
    counts = {"LRU": 268_430, "linear RNN": 267_956, "GRU, 1 layer": 269_488, "GRU": 270_011}
    for label, (fields, readout) in LAYERS.items():
        assert sum(p.numel() for p in BitCopier(fields, "bptt", readout).parameters()) == counts[label]


def test_every_number_of_table_1_has_its_row():
    experiment = load_experiment("online-copy")
    rows = experiment.rows("paper")
    assert {row["label"] for row in rows} == set(experiment.paper) and len(rows) == 16
    rules = {row["label"]: row["rule"] for row in rows}
    assert rules["LRU: ours"] == "rtrl" and rules["GRU: SnAp-1"] == "snap1" and "LRU: SnAp-1" not in rules
    assert experiment.paper["LRU: ours"] == "8.44e-3" and experiment.paper["GRU: BPTT"] == "1.94e-1"


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


def test_curves():
    losses = [torch.tensor(float(step)) for step in range(10)]
    assert means_of_parts(losses, 5) == {"2": 0.5, "4": 2.5, "6": 4.5, "8": 6.5, "10": 8.5}
    assert means_of_parts(losses[:2], 5) == {"1": 0.0, "2": 1.0}
    history = [{"step": 2, "bits_per_byte": 5.0}, {"step": 2, "eval_bits_per_byte": 4.0}, {"step": 3, "loss": 1.0}]
    assert read_log(SimpleNamespace(state=SimpleNamespace(log_history=history))) == ({2: 4.0}, {2: 5.0})
    row = {"label": "RTRL, B = 1", "value": {"0.5": 4.0}, "while reading": {"0.5": 5.0}}
    lines = load_experiment("online-memora").curves([row])
    assert lines == {"RTRL, B = 1": {0.5: [4.0]}, "RTRL, B = 1, while reading": {0.5: [5.0]}}
