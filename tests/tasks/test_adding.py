"""The adding problem against its definition."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hf_recurrent import AddingProblem


@pytest.mark.parametrize("length", [2, 3, 50])
def test_the_target_is_the_sum_of_the_marked_numbers(length):
    data = AddingProblem(40, length)
    for item in data:
        values, marks = item["input_values"].T
        assert sorted(set(marks.tolist())) in ([0.0, 1.0], [1.0])
        places = marks.nonzero().flatten().tolist()
        assert len(places) == 2 and places[0] < length // 2 <= places[1]
        assert values.min() >= 0 and values.max() <= 1
        torch.testing.assert_close(item["labels"], (values * marks).sum()[None])


def test_places_are_uniform_and_answering_one_has_an_error_of_a_sixth():
    items = AddingProblem(6000, 10).__getitems__(list(range(6000)))
    marks = torch.stack([item["input_values"][:, 1] for item in items]).sum(0) / 6000
    assert (marks - 0.2).abs().max() < 0.02
    labels = torch.stack([item["labels"] for item in items])
    assert ((labels - 1) ** 2).mean().item() == pytest.approx(1 / 6, abs=0.01)


def test_an_example_depends_on_its_number_seed_and_split_only():
    data = AddingProblem(20, 30)
    batch = next(iter(DataLoader(data, batch_size=20)))
    assert batch["input_values"].shape == (20, 30, 2) and batch["labels"].shape == (20, 1)
    assert torch.equal(batch["input_values"][7], data[7]["input_values"])
    for other in (AddingProblem(20, 30, "test"), AddingProblem(20, 30, seed=1)):
        assert not np.allclose(other[7]["input_values"], data[7]["input_values"])


def test_bad_arguments():
    with pytest.raises(ValueError, match="`length` is 1"):
        AddingProblem(4, 1)
    with pytest.raises(ValueError, match="`split` is 'dev'"):
        AddingProblem(4, 10, "dev")
    with pytest.raises(IndexError, match="there are 4 examples"):
        AddingProblem(4, 10)[4]
