"""Copy task: rows and models of the paper's tables, means of the loss."""

import torch

from papers import load_experiment
from papers.online_learning.bit_copier import BitCopier
from papers.online_learning.copying import LAYERS, means_of_parts


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


def test_means_of_parts():
    losses = [torch.tensor(float(step)) for step in range(10)]
    assert means_of_parts(losses, 5) == {"2": 0.5, "4": 2.5, "6": 4.5, "8": 6.5, "10": 8.5}
    assert means_of_parts(losses[:2], 5) == {"1": 0.0, "2": 1.0}
