"""Inputs, states and weights that no kernel may read; tests/faults/fuzz_forward.py draws many more."""

import pytest
import torch
from model_cases import tiny_model

MODES = {"step": 1, "block": 3}


@pytest.fixture(params=["memora", "hawk"])
def model(request):
    return tiny_model(request.param, torch.float32)


@pytest.fixture(params=MODES)
def steps(request):
    return MODES[request.param]


def read(model, steps=1, **arguments):
    with torch.no_grad():
        inputs = {} if "inputs_embeds" in arguments else {"input_ids": torch.ones(1, steps, dtype=torch.long)}
        return model(**inputs, **{"state": model.init_state(1)} | arguments)


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def test_embeddings_of_another_width(model, steps):
    with pytest.raises(ValueError, match=r"`inputs_embeds` has shape \(1, \d, 4\); it must be \(B, T, \d+\)"):
        read(model, inputs_embeds=torch.randn(1, steps, 4))


@pytest.mark.parametrize("spoil", [freed, lambda part: part.to("meta"), lambda part: part[:0]])
def test_states_that_cannot_be_read(model, steps, spoil):
    for name, part in model.init_state(1).items():
        with pytest.raises(ValueError, match=f"`?{name}"):
            read(model, steps, state=model.init_state(1) | {name: spoil(part)})


def test_lazily_negated_states_have_the_right_sign(model, steps):
    state = {name: torch.randn_like(part) for name, part in model.init_state(1).items()}
    negated = {name: torch._neg_view(-part) for name, part in state.items()}
    torch.testing.assert_close(read(model, steps, state=negated).logits, read(model, steps, state=state).logits)


def test_weights_with_freed_memory(model, steps):
    read(model, steps)
    weight = next(p for n, p in model.model.named_parameters() if p.dim() == 2 and "embed" not in n)
    weight.untyped_storage().resize_(0)
    with pytest.raises((ValueError, RuntimeError), match=r"memory|storage"):
        read(model, steps)


@pytest.mark.parametrize("token", [-1, 256, 1 << 40])
def test_tokens_outside_the_vocabulary(model, token):
    with pytest.raises(ValueError, match=f"`input_ids` holds {token}, but the vocabulary has 256 tokens"):
        model(torch.tensor([[token]]))


def test_a_batch_without_streams(model):
    with pytest.raises(ValueError, match=r"B ≥ 1 and T ≥ 1"):
        model(torch.empty(0, 1, dtype=torch.long))


def test_targets_that_are_not_integers(model):
    with pytest.raises(ValueError, match=r"`shift_labels` is torch\.float32"):
        model(torch.ones(1, 2, dtype=torch.long), shift_labels=torch.rand(1, 2))
