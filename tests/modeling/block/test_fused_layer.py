"""A layer in one kernel against its modules."""

import platform
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch

from hf_recurrent import HawkConfig, HawkForCausalLM, MemoraConfig, MemoraForCausalLM
from hf_recurrent.modeling.block import fused_layer as fused
from hf_recurrent.modeling.block import training_kernels
from hf_recurrent.modeling.block.linear_maps import rounded_products
from hf_recurrent.modeling.block.recurrent_backbone import LayerInputs
from hf_recurrent.modeling.block.training_kernels import kernel_module, training_module
from hf_recurrent.modeling.hawk.modeling_hawk import HawkRecurrentBlock
from hf_recurrent.modeling.memora.modeling_memora import MemoraRecurrentBlock

pytestmark = pytest.mark.skipif(kernel_module("layer_cpu") is None, reason="the kernel was not built")
SIZES = {"hidden_size": 40, "state_size": 37, "intermediate_size": 70}
SHAPES = [(4, 64), (3, 128), (13, 16), (5, 32), (130, 2), (300, 1)]  # 64 rows are part of a stream, or several


class Family(NamedTuple):
    config: type
    model: type
    block: type
    taps: int  # inputs of the convolution in the state


FAMILIES = {
    "memora": Family(MemoraConfig, MemoraForCausalLM, MemoraRecurrentBlock, 0),
    "hawk": Family(HawkConfig, HawkForCausalLM, HawkRecurrentBlock, 3),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture(autouse=True)
def one_thread():
    """Two streams are enough for a thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def counted_calls():
    """Yields a list that has one entry for each layer computed by the kernel."""
    calls, apply = [], fused.FusedLayer.apply
    fused.FusedLayer.apply = lambda *arguments: (calls.append(1), apply(*arguments))[1]
    try:
        yield calls
    finally:
        fused.FusedLayer.apply = apply


def build_layer(family, dtype=torch.float64):
    torch.manual_seed(0)
    layer = family.model(family.config(num_hidden_layers=1, **SIZES)).model.layers[0].to(dtype)
    for parameter in layer.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return layer


def random_block(family, shape, dtype=torch.float64, resets=True):
    generator = torch.Generator().manual_seed(1)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    hidden, state = normal(*shape, SIZES["hidden_size"]), {"recurrent": normal(shape[0], SIZES["state_size"])}
    if family.taps:
        state["convolution"] = normal(shape[0], family.taps, SIZES["state_size"])
    mask = torch.rand(shape, generator=generator) < 0.1 if resets else None
    return hidden, LayerInputs(state, mask, None, None)


def results(layer, hidden, inputs, of_state=True):
    """Output, state, and all gradients."""
    output, state = layer(hidden, inputs)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    loss = (output * weights).sum()
    if of_state:
        loss = loss + sum(part.square().sum() for part in state.values())
    wanted = [hidden, *inputs.state.values(), *(p for p in layer.parameters() if p.requires_grad)]
    return [output, *state.values(), *torch.autograd.grad(loss, wanted)]


def by_modules(monkeypatch, layer, *arguments, compute=results, **options):
    with monkeypatch.context() as patch:
        patch.setattr(type(layer.recurrent_block), "fused_layer", lambda *_: None)
        return compute(layer, *arguments, **options)


@pytest.fixture
def small_kernels(monkeypatch):
    """Kernels compute small tensors, too."""
    for module in (fused, training_kernels):
        monkeypatch.setattr(module, "SMALLEST_FUSED", 1)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_same_as_its_modules(family, shape, dtype, level, monkeypatch, small_kernels):
    from hf_recurrent.kernels import linear_scan_cpu

    kernels, best = (training_module(), linear_scan_cpu), training_module().instruction_level()
    monkeypatch.setattr(training_module(), "has_fast_products", lambda: True)
    if level > best:
        pytest.skip("this machine has no such instructions")
    try:
        for each in kernels:
            each.instruction_level(level)
        layer, (hidden, inputs) = build_layer(family, dtype), random_block(family, shape, dtype)
        with counted_calls() as calls:
            found = results(layer, hidden, inputs)
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    output, state = layer(hidden, inputs)
                assert all(map(torch.equal, (output, *state.values()), found[: 1 + len(state)]))
        assert calls == [1, 1, 1]
        expected = by_modules(monkeypatch, layer, hidden, inputs)
    finally:
        for each in kernels:
            each.instruction_level(best)
    # Where the compiler may fuse a product with a sum, only Memora's passes with AVX-512 fix which ones.
    is_fixed = platform.machine() in ("x86_64", "AMD64") if level == 0 else level == 2 and not family.taps
    for one, other in zip(found, expected, strict=True):
        if is_fixed and shape[1] > 1:  # one step of a scan is plain torch
            assert torch.equal(one, other)
        else:
            limit = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
            torch.testing.assert_close(one, other, rtol=limit, atol=limit * float(other.detach().abs().max()))


@pytest.mark.parametrize("shape", [(4, 64), (13, 16)])
def test_float32_is_near_plain_torch_in_float64(family, shape, small_kernels, monkeypatch):
    layer, (hidden, inputs) = build_layer(family, torch.float32), random_block(family, shape, torch.float32)
    found = results(layer, hidden, inputs)
    monkeypatch.setattr(training_kernels, "training_module", lambda: None)
    state = {name: part.detach().double().requires_grad_() for name, part in inputs.state.items()}
    hidden = hidden.detach().double().requires_grad_()
    expected = results(layer.double(), hidden, inputs._replace(state=state))
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).detach().abs().max()) < 2e-6 * max(1, float(other.detach().abs().max()))


def test_without_resets_gradients_of_the_state_and_of_some_weights(family, monkeypatch, small_kernels):
    layer, (hidden, inputs) = build_layer(family), random_block(family, (4, 64), resets=False)
    for module in (layer.mlp_norm, layer.recurrent_block.recurrent_unit.input_gate, layer.mlp.down_proj):
        module.requires_grad_(False)
    with counted_calls() as calls:
        found = results(layer, hidden, inputs, of_state=False)
    assert calls == [1]
    for one, other in zip(found, by_modules(monkeypatch, layer, hidden, inputs, of_state=False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_gradient_of_the_last_state_alone(family, monkeypatch, small_kernels):
    layer, block = build_layer(family), random_block(family, (4, 64))

    def gradients(layer, hidden, inputs):
        states = layer(hidden, inputs)[1].values()
        return [torch.autograd.grad(state.sum(), hidden, retain_graph=True)[0] for state in states]

    for one, other in zip(
        gradients(layer, *block), by_modules(monkeypatch, layer, *block, compute=gradients), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("threads", [2, 3])
def test_bits_do_not_depend_on_threads(family, threads, small_kernels):
    found = []
    for number in (1, threads):
        torch.set_num_threads(number)
        with counted_calls() as calls:
            block = random_block(family, (13, 64), torch.float32)
            found.append(results(build_layer(family, torch.float32), *block))
        assert calls == [1]
    assert all(map(torch.equal, *found))


def test_rounded_products(family, monkeypatch, small_kernels):
    if not training_module().has_bf16_products():
        pytest.skip("this machine does not multiply bfloat16 numbers")
    monkeypatch.setattr(training_module(), "has_fast_bf16_products", lambda: True)
    layer, block = build_layer(family, torch.float32), random_block(family, (4, 64), torch.float32)
    exact = results(layer, *block)
    with rounded_products():
        found = layer(*block)
        expected = by_modules(monkeypatch, layer, *block)[: 2 + bool(family.taps)]
    # As above, only Memora's bits are fixed, and a last bit can decide how a number is rounded.
    limit = 1e-2 if family.taps else 0
    for one, other in zip((found[0], *found[1].values()), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=limit * float(other.detach().abs().max()))
    assert not torch.allclose(found[0], exact[0], rtol=1e-5)


def test_padding_hooks_other_methods_and_large_weights_are_not_skipped(family, small_kernels, monkeypatch):
    layer, (hidden, inputs) = build_layer(family), random_block(family, (4, 64))
    unit, seen = layer.recurrent_block.recurrent_unit, []
    with counted_calls() as calls:
        layer(hidden, inputs._replace(padding_mask=torch.zeros(4, 64, dtype=torch.bool)))
        for module in (layer.mlp, unit, unit.input_gate, layer.mlp_norm, layer.recurrent_block):
            handle = module.register_forward_hook(lambda *_: seen.append(1))
            layer(hidden, inputs)
            handle.remove()
        unit.recur = unit.recur
        layer(hidden, inputs)
        del unit.recur
        layer(*random_block(family, (2, 96)))
        layer(*random_block(family, (1, 1024)))
        down = layer.mlp.down_proj
        layer.mlp.down_proj = torch.nn.Sequential(down)  # without a weight
        layer(hidden, inputs)
        layer.mlp.down_proj = down
        layers = kernel_module("layer_cpu")
        with monkeypatch.context() as patch:
            patch.setattr(layers, "_MOST_WEIGHTS", 1000)
            patch.setattr(layers, "instruction_level", lambda: 1)
            layer(hidden, inputs)
            assert not calls and len(seen) == 5
            patch.setattr(layers, "instruction_level", lambda: 2)
            layer(hidden, inputs)
        assert len(calls) == 1
        layer(hidden, inputs)
        assert len(calls) == 2


def test_nothing_is_kept_without_gradients(family, small_kernels, monkeypatch):
    layers, seen = kernel_module("layer_cpu"), []
    compute = layers.layer
    monkeypatch.setattr(layers, "layer", lambda *given, **how: seen.append(compute(*given, **how)) or seen[-1])
    layer, block = build_layer(family), random_block(family, (4, 64))
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            layer(*block)
    assert [result.kept is None for result in seen] == [True, True, False]


def test_backward_twice_and_recomputed_activations(family, small_kernels):
    layer, (hidden, inputs) = build_layer(family), random_block(family, (4, 64))
    loss = layer(hidden, inputs)[0].square().sum()
    first, second = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    again = torch.utils.checkpoint.checkpoint(layer, hidden, inputs, use_reentrant=False)[0].square().sum()
    assert torch.equal(torch.autograd.grad(again, hidden)[0], first)
