"""Lorenz attractor: readouts, neighbours and weight decay, on cases whose answer is known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import TrainingArguments

from hf_recurrent import MgradeConfig, MgradeModel
from papers.engine.pictures import principal_components
from papers.engine.supervised import SupervisedTrainer
from papers.mgrade import lorenz
from papers.mgrade.lorenz_system import LorenzTrajectories


def test_readout_finds_what_the_states_hold():
    """States equal to the dimensions have no error and keep all neighbours."""
    train, test = (LorenzTrajectories(4, 60, split, noise=0.0) for split in ("train", "test"))
    following = {tuple(data[index]["input_values"].flatten().tolist()): (data, index) for data in (train, test)
                 for index in range(4)}  # fmt: skip

    class Oracle(torch.nn.Module):
        config = SimpleNamespace(hidden_size=3, input_size=1)

        def forward(self, input_values, use_cache):
            rows = [following.get(tuple(row.flatten().tolist())) for row in input_values]
            states = [row[0].clean[row[1], 1:] if row else np.zeros((60, 3)) for row in rows]
            return SimpleNamespace(last_hidden_state=torch.tensor(np.stack(states)).float())

    measured = lorenz.measure(lorenz.NextStepRegressor(Oracle()), train, test)
    assert measured["value"][lorenz.LINEAR] < 1e-3 and measured["value"][lorenz.QUADRATIC] < 1e-3
    assert measured["value"][lorenz.OBSERVED] > 1
    assert measured["neighbour_overlap"] > 0.8


def test_neighbours():
    points = torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    assert lorenz.neighbour_overlap(points, 3 * points.flip(1)) == 1
    other = torch.randn(300, 5, generator=torch.Generator().manual_seed(1))
    assert lorenz.neighbour_overlap(points, other) == pytest.approx(20 / 299, abs=0.03)


def test_explained_variance_is_a_share_of_all_states():
    generator = np.random.default_rng(0)
    states = generator.normal(size=(50, 40, 5)) * [3, 0, 2, 0, 1] + 7
    components = principal_components(states.reshape(-1, 5), 3)
    shares = lorenz.explained_variance(components, states)
    assert list(shares) == ["1", "2", "3"] and sum(shares.values()) == pytest.approx(1)
    assert list(shares.values()) == pytest.approx([9 / 14, 4 / 14, 1 / 14], abs=0.03)
    assert sum(lorenz.explained_variance(components[:, :1], states).values()) == pytest.approx(shares["1"])


def test_positions_and_biases_are_not_decayed(tmp_path):
    backbone = MgradeModel(MgradeConfig(input_size=1, hidden_size=4, num_hidden_layers=1, conv_kernel=2))
    model = lorenz.NextStepRegressor(backbone)
    trainer = SupervisedTrainer(model, TrainingArguments(str(tmp_path), report_to="none", use_cpu=True))
    decayed = trainer.get_decay_parameter_names(model)
    assert "backbone.layers.0.convolution.weight" in decayed and "readout.weight" in decayed
    assert not [name for name in decayed if "positions" in name or "bias" in name or "norm" in name]
