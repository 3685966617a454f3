"""The compiled step notices every change of its model."""

import pytest
import torch
from model_cases import read_bytes, relative_difference, tiny_model
from test_compiled_step import is_compiled, needs_kernel
from torch import nn

from hf_recurrent.modeling.step import single_step


def change_in_place(model):
    model.model.layers[1].mlp.up_proj.weight.copy_(torch.linspace(-1, 1, 48 * 16).view(48, 16).cos())


def replace_a_weight(model):
    model.model.layers[0].mlp_norm.weight = nn.Parameter(torch.linspace(0.1, 3, 16))


def replace_a_map(model):
    mlp = model.model.layers[0].mlp
    mlp.down_proj = nn.Sequential(mlp.down_proj, nn.Tanh())


def add_a_hook(model):
    model.model.layers[0].recurrent_block.register_forward_hook(lambda module, inputs, output: (-output[0], output[1]))


def stand_in_front(model):
    block = model.model.layers[0].mlp
    block.forward = lambda hidden: torch.zeros_like(hidden)


@needs_kernel
@pytest.mark.parametrize(
    "change", [change_in_place, replace_a_weight, replace_a_map, add_a_hook, stand_in_front], ids=lambda f: f.__name__
)
@torch.no_grad()
def test_a_changed_model_is_noticed(change):
    model = tiny_model("memora")
    input_ids = torch.randint(1, 256, (2, 6))
    before, _ = read_bytes(model, input_ids)
    change(model)
    after, _ = read_bytes(model, input_ids)
    assert relative_difference(after, model(input_ids).logits) < 1e-5
    assert relative_difference(after, before) > 1e-2


def plain_attributes(model) -> list[tuple[str, str]]:
    """Name of a module below the model, and of an attribute of its own that is a number, text, tuple or None."""
    own = (bool, int, float, str, tuple, type(None))
    return [
        (name, attribute)
        for name, module in model.model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, own) and attribute != "_is_full_backward_hook"  # of nn.Module itself
    ]


@needs_kernel
@pytest.mark.parametrize("family", ["memora", "hawk"])
@torch.no_grad()
def test_every_changed_attribute_is_noticed(family):
    model = tiny_model(family)
    byte = torch.tensor([[65]])
    state = model(byte).state
    attributes = plain_attributes(model)
    read = {"eps", "training"} | ({"norm_after_contraction"} if family == "memora" else {"kernel_size"})
    assert read | {"allow_negative_eigenvalues"} <= {attribute for _, attribute in attributes}
    for name, attribute in attributes:
        model(byte, state=state)
        found, module = single_step._steps[model], model.model.get_submodule(name)
        assert found.watch.unchanged(), f"before {name}.{attribute}"
        old = getattr(module, attribute)
        vars(module)[attribute] = not old if isinstance(old, bool) else (old, "changed")
        assert not found.watch.unchanged(), f"{name}.{attribute}"
        vars(module)[attribute] = old


def set_eps(model):
    model.model.layers[1].mlp.eps = 0.5


def set_eps_of_a_norm(model):
    model.model.layers[0].recurrent_norm.eps = 2.0


def set_the_norm_after_contraction(model):
    model.model.layers[0].recurrent_block.norm_after_contraction = True


def set_negative_eigenvalues(model):
    model.model.layers[0].recurrent_block.recurrent_unit.allow_negative_eigenvalues = True


def set_the_decay_scale_of_one_unit(model):
    model.model.layers[1].recurrent_block.recurrent_unit.decay_scale = 0.1


@needs_kernel
@pytest.mark.parametrize(
    "change",
    [
        set_eps,
        set_eps_of_a_norm,
        set_the_norm_after_contraction,
        set_negative_eigenvalues,
        set_the_decay_scale_of_one_unit,
    ],
    ids=lambda f: f.__name__,
)
@torch.no_grad()
def test_changed_values_act(change):
    model = tiny_model("memora", torch.float64)
    input_ids = torch.randint(1, 256, (2, 6))
    before, _ = read_bytes(model, input_ids)
    change(model)
    after, _ = read_bytes(model, input_ids)
    assert is_compiled(model)
    assert relative_difference(after, model(input_ids).logits) < 1e-10
    assert relative_difference(after, before) > 1e-4
