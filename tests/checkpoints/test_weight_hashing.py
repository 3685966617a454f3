"""`weights_hash` is a function of the weights, whatever their type, device and address, and notices every change."""

import copy
import hashlib
import sys

import pytest
import torch
from model_cases import each_family, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from hf_recurrent import weights_hash


@each_family
def test_copies_and_saved_weights_share_it(family, tmp_path):
    model = tiny_model(family)
    expected = weights_hash(model)
    model.save_pretrained(tmp_path / "float32")
    copies = [copy.deepcopy(model), copy.deepcopy(model).double(), tiny_model(family)]
    copies.append(AutoModelForCausalLM.from_pretrained(tmp_path / "float32"))
    assert [weights_hash(one) for one in copies] == [expected] * len(copies)
    assert weights_hash(copy.deepcopy(model).half()) != expected  # documented: rounded otherwise


@each_family
def test_bfloat16_copies_share_it(family):
    model = tiny_model(family)
    if any(parameter.is_complex() for parameter in model.parameters()):
        pytest.skip("torch has no complex bfloat16")
    assert weights_hash(copy.deepcopy(model).bfloat16()) == weights_hash(model)


def test_known_value():
    """The hash is part of files: another way to compute it would refuse all of them."""
    linear = nn.Linear(2, 2)
    linear.weight = nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.25]]))
    linear.bias = nn.Parameter(torch.tensor([0.0, 1e-3]))
    words = (b"\nbias (2,)\n", 0x0000, 0x3A83, b"\nweight (2, 2)\n", 0x3F80, 0xC000, 0x3F00, 0x4050)
    written = b"".join(word if isinstance(word, bytes) else word.to_bytes(2, "little") for word in words)
    assert weights_hash(linear) == hashlib.sha256(written).hexdigest()


def change_in_place(model):
    with torch.no_grad():
        model.model.embed_tokens.weight[17, 3] += 0.5


def change_all_through_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(1.5)


def take_an_optimizer_step(model):
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    torch.optim.Adam(model.parameters(), lr=0.1).step()


def replace_one(model):
    linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
    linear.weight = nn.Parameter(linear.weight.detach() * 2)


def load_others(model):
    torch.manual_seed(5)
    other = AutoModelForCausalLM.from_config(model.config)
    model.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    "change", [change_in_place, change_all_through_data, take_an_optimizer_step, replace_one, load_others]
)
def test_changes_are_noticed(change):
    model = tiny_model("memora")
    before = weights_hash(model)
    assert weights_hash(model) == before
    change(model)
    assert weights_hash(model) not in (before, None)
    assert weights_hash(model) == weights_hash(copy.deepcopy(model))


def test_it_is_computed_once(monkeypatch):
    module = sys.modules["hf_recurrent.checkpoints.weight_hashing"]
    computed = []
    original = module._hash
    monkeypatch.setattr(module, "_hash", lambda *arguments: computed.append(1) or original(*arguments))
    model = tiny_model("hawk")
    for _ in range(3):
        module.weights_hash(model)
    change_in_place(model)
    module.weights_hash(model)
    assert len(computed) == 2


def test_names_and_shapes_count():
    one, other = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
    with torch.no_grad():
        other.weight.copy_(one.weight.view(4, 2))
    assert weights_hash(one) != weights_hash(other)


def test_meta_weights_have_none():
    with pytest.raises(ValueError, match="`weight` is on the meta device; load the weights first"):
        weights_hash(nn.Linear(2, 2, bias=False, device="meta"))
