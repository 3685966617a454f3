"""States of many streams: split, join, select."""

import pytest
import torch
from model_cases import each_family, each_variant, tiny_model

from hf_recurrent import join_states, select_state, split_state

TEXT = torch.tensor([list(b"alpha"), list(b"betas"), list(b"gamma")])


@each_family
def test_split_and_join_are_inverse(family):
    state = tiny_model(family)(TEXT).state
    streams = split_state(state)
    assert len(streams) == 3 and all(len(tensor) == 1 for stream in streams for tensor in stream.values())
    joined = join_states(streams)
    assert all(torch.equal(joined[name], tensor) for name, tensor in state.items())
    # A state that is kept does not keep the memory of all others.
    with torch.no_grad():
        for tensor in state.values():
            tensor.zero_()
    assert any(tensor.any() for tensor in streams[1].values())


@each_family
def test_streams_that_move_between_batches(family):
    """Reading in a batch of others gives what reading alone gives."""
    model = tiny_model(family, torch.float64)
    first = model(TEXT).state
    alone = [model(TEXT[row : row + 1]).state for row in range(3)]
    batch = join_states([alone[2], select_state(first, [0, 1])])
    logits = model(TEXT, state=batch).logits
    for place, row in enumerate((2, 0, 1)):
        expected = model(TEXT[place : place + 1], state=alone[row]).logits
        torch.testing.assert_close(logits[place : place + 1], expected, rtol=1e-9, atol=1e-9)


@each_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_state_of_another_type_is_read_in_the_models_own(variant, dtype):
    model = tiny_model(variant)
    stored = {name: tensor.to(dtype) for name, tensor in model(TEXT).state.items()}
    expected = model(TEXT, state={name: tensor.float() for name, tensor in stored.items()})
    output = model(TEXT, state=stored)
    assert torch.equal(output.logits, expected.logits)
    assert all(torch.equal(output.state[name], tensor) for name, tensor in expected.state.items())


def test_select_takes_numbers_lists_and_tensors():
    state = {"a": torch.arange(6).view(3, 2)}
    assert select_state(state, 2)["a"].tolist() == [[4, 5]]
    assert select_state(state, [2, 0, 2])["a"].tolist() == [[4, 5], [0, 1], [4, 5]]
    assert select_state(state, torch.tensor([1]))["a"].tolist() == [[2, 3]]
    assert select_state(state, [])["a"].shape == (0, 2)
    for wrong in (3, [0, 3], -1):
        with pytest.raises(IndexError):
            select_state(state, wrong)


def test_bad_input():
    with pytest.raises(ValueError, match="`states` is empty"):
        join_states([])
    one = {"a": torch.zeros(1, 2)}
    for other in ({"b": torch.zeros(1, 2)}, {"a": torch.zeros(1, 3)}, {}):
        with pytest.raises(ValueError, match=r"`states\[1\]` has other tensors than `states\[0\]`"):
            join_states([one, other])
    assert split_state({}) == []
