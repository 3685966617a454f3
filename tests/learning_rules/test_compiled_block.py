"""Blocks in the compiled kernel, against the learning rule in plain torch, in float64."""

import gc
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, set_seed

from hf_recurrent import config_from_preset
from hf_recurrent.kernels.step_graph import UnsupportedOp
from hf_recurrent.learning_rules.block_learning import CompiledUpdate, GradientMemory
from hf_recurrent.learning_rules.compiled_block import CompiledBlock
from hf_recurrent.learning_rules.compiled_program import Uncompilable
from hf_recurrent.learning_rules.rules import NonFiniteLossError, build_learning_rule
from hf_recurrent.modeling.units.recurrent_units import RECURRENT_UNITS

block_cpu = pytest.importorskip("hf_recurrent.kernels.block_cpu")

# Widths that no vector divides.
SIZES = {"hidden_size": 13, "state_size": 12, "intermediate_size": 11, "num_hidden_layers": 2, "vocab_size": 37}
DENSE = ("gru", "dense_linear")


def build(family="memora", dtype=torch.float64, **fields):
    set_seed(3)
    if fields.get("recurrent_unit") == "rg_lru":
        fields["hidden_size"] = SIZES["state_size"]
    model = AutoModelForCausalLM.from_config(config_from_preset(f"{family}-tiny", **SIZES | fields))
    return model.eval().to(dtype)


def check(model, name, steps, *, resets=True, tolerance=1e-11):
    """Three blocks, the second with an episode that begins inside, and one update."""
    rule = build_learning_rule(name, model)
    compiled = CompiledBlock(rule, steps, steps, resets=resets)
    generator = torch.Generator().manual_seed(1)
    plain_carried, carried = rule.init_carried(1), rule.init_carried(1)
    plain_state, state = model.init_state(1), model.init_state(1)
    for number in range(3):
        ids = torch.randint(SIZES["vocab_size"], (1, steps + 1), generator=generator)
        mask = torch.zeros(1, steps, dtype=torch.bool)
        mask[0, steps // 2] = number == 1 and resets
        block = ids[:, :-1], ids[:, 1:], mask
        gradients = {name: torch.empty(shape, dtype=model.dtype) for name, shape in compiled.gradients.items()}
        nats, state = compiled.learn(carried, state, block, gradients)
        output = rule.learn(plain_carried, plain_state, *block, steps)
        plain_state = output.state
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        assert gradients.keys() == expected.keys()
        torch.testing.assert_close(nats.sum() / steps, output.loss.detach(), rtol=tolerance, atol=0)
        for ours, theirs in ((gradients, expected), (state, plain_state), (carried, plain_carried)):
            for name, tensor in theirs.items():
                bound = tolerance * max(tensor.abs().max().item(), 1e-3)
                torch.testing.assert_close(
                    ours[name], tensor, rtol=0, atol=bound, msg=lambda text, n=name: f"{n}: {text}"
                )


def recordings() -> set[int]:
    """The recorded blocks in memory."""
    gc.collect()
    return {id(one) for one in gc.get_objects() if type(one).__name__ in ("BlockTrace", "_UnitBlock")}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("unit", sorted(set(RECURRENT_UNITS) - set(DENSE)))
def test_every_element_wise_unit_learns_by_rtrl(unit):
    check(build(recurrent_unit=unit), "rtrl", 5)


@pytest.mark.parametrize("unit", ["glru", "complex_lru", "indrnn"])
def test_single_steps(unit):
    check(build(recurrent_unit=unit), "rtrl", 1)


@pytest.mark.parametrize(
    ("unit", "rule"),
    [
        ("gru", "snap1"),
        ("dense_linear", "snap1"),
        ("gru", "truncated"),
        ("glru", "spatial"),
        ("complex_glru", "truncated"),
    ],
)
def test_every_rule(unit, rule):
    check(build(recurrent_unit=unit), rule, 3)


@pytest.mark.parametrize("family", ["hawk", "lru"])
def test_other_families(family):
    check(build(family), "rtrl", 6)


@pytest.mark.parametrize(("unit", "rule"), [("glru", "rtrl"), ("gru", "snap1"), ("glru", "truncated")])
def test_nothing_of_a_recording_stays_in_memory(unit, rule):
    before = recordings()
    CompiledBlock(build_learning_rule(rule, build(recurrent_unit=unit)), 3, 3)
    assert recordings() <= before


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_nothing_of_a_failed_recording_stays_in_memory(when, monkeypatch):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden):
            if when == "forward":
                raise UnsupportedOp(when)
            return hidden.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise UnsupportedOp(when)

    before, model = recordings(), build()
    norm = type(model.model.norm)
    forward = norm.forward
    monkeypatch.setattr(norm, "forward", lambda self, hidden: Failing.apply(forward(self, hidden)))
    with pytest.raises(Uncompilable, match=when):
        CompiledBlock(build_learning_rule("rtrl", model), 3, 3)
    assert recordings() <= before


def test_long_blocks_in_float32():
    check(build(dtype=torch.float32, hidden_size=48, state_size=40), "rtrl", 67, tolerance=1e-4)


@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
def test_the_update_is_that_of_the_optimizer(kind):
    models = [build(), build()]
    options = {"lr": 1e-2, "weight_decay": 0.0} if kind == "adamw" else {"lr": 1e-2, "alpha": 0.9}
    optimizer_class = torch.optim.AdamW if kind == "adamw" else torch.optim.RMSprop
    plain, optimizer = (optimizer_class(model.parameters(), **options) for model in models)
    memory = GradientMemory(dict(models[1].named_parameters()))
    update = CompiledUpdate(optimizer, memory)
    generator = torch.Generator().manual_seed(2)
    for number in range(5):
        for parameter, view in zip(models[0].parameters(), memory.views.values(), strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            view.copy_(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(models[0].parameters(), 1.0)
        assert update.norm() == pytest.approx(norm.item(), rel=1e-12)
        plain.step()
        update.step(1 / (norm.item() + 1e-6))
        if number == 2:  # a step of its own in between
            update.write_steps()
            memory.attach()
            memory.flat.mul_(1 / (norm + 1e-6))
            plain.step()
            optimizer.step()
            update = CompiledUpdate(optimizer, memory)
    update.write_steps()
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
    for ours, theirs in zip(optimizer.state.values(), plain.state.values(), strict=True):
        assert ours["step"] == theirs["step"] == 6


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 48, "state_size": 32, "intermediate_size": 64}])
def test_gradients_that_are_not_written_update_as_written_ones(kind, sizes):
    """Weights bit for bit, whether or not vectors divide the widths; norms are sums in another order."""
    models = [build(dtype=torch.float32, **sizes) for _ in range(2)]
    found = []
    for model, factored in zip(models, (True, False), strict=True):
        rule = build_learning_rule("rtrl", model)
        compiled = CompiledBlock(rule, 1, 1, factored=factored)
        assert len(compiled.factors) == 10 * factored  # of two layers
        memory = GradientMemory({name: compiled.parameters[name] for name in compiled.gradients}, compiled.factors)
        update = CompiledUpdate(kind(model.parameters(), weight_decay=0.0), memory)
        carried, state = rule.init_carried(1), model.init_state(1)
        for token in range(6):
            block = torch.tensor([[token]]), torch.tensor([[7 * token % 5]]), torch.zeros(1, 1, dtype=torch.bool)
            _, state = compiled.learn(carried, state, block, memory.unfactored_views)
            memory.is_factored = factored
            found.append(update.norm())
            update.step(0.5)
        if factored:
            memory.write_products()
        found.append([view.clone() for view in memory.views.values()] + [x.detach() for x in model.parameters()])
    assert found[:6] == pytest.approx(found[7:13], rel=1e-6)
    for ours, theirs in zip(found[6], found[13], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (40, 33), (128, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_of_products_and_of_written_gradients_together(shape, dtype):
    numbers = torch.Generator().manual_seed(0)
    factors = [torch.randn(n, generator=numbers, dtype=dtype) for n in shape]
    written = torch.randn(1500, generator=numbers, dtype=dtype)
    products, size = torch.outer(*factors), shape[0] * shape[1]
    parameters = [
        block_cpu.Trained(torch.zeros(shape, dtype=dtype), None, torch.zeros(shape, dtype=dtype), 0.1, tuple(factors)),
        block_cpu.Trained(torch.zeros(1500, dtype=dtype), None, torch.zeros(1500, dtype=dtype), 0.1),
    ]
    gradient = torch.cat([torch.full((size,), torch.nan, dtype=dtype), written])
    update = block_cpu.WeightUpdate("rmsprop", gradient, parameters, (0.0, 0.9), 1e-8)
    expected = torch.cat([products.flatten(), written]).double().norm().item()
    assert update.norm(factored=True) == pytest.approx(expected, rel=1e-6 if dtype is torch.float32 else 1e-14)
    for factor in factors:
        factor.fill_(torch.finfo(dtype).max ** 0.75)
    assert update.norm(factored=True) == float("inf")
    factors[0].fill_(torch.nan)
    assert math.isnan(update.norm(factored=True))


def test_a_loss_that_is_not_finite_changes_nothing_that_is_carried():
    model = build()
    rule = build_learning_rule("rtrl", model)
    compiled = CompiledBlock(rule, 4, 4)
    carried, state = rule.init_carried(1), model.init_state(1)
    gradients = {name: torch.empty(shape, dtype=model.dtype) for name, shape in compiled.gradients.items()}
    block = (
        torch.zeros(1, 4, dtype=torch.long),
        torch.ones(1, 4, dtype=torch.long),
        torch.zeros(1, 4, dtype=torch.bool),
    )
    _, state = compiled.learn(carried, state, block, gradients)
    before = {name: tensor.clone() for name, tensor in carried.items()}
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(NonFiniteLossError, match="nothing was learned"):
        compiled.learn(carried, state, block, gradients)
    assert all(torch.equal(tensor, before[name]) for name, tensor in carried.items())


def test_changes_of_the_model_are_noticed():
    model = build()
    compiled = CompiledBlock(build_learning_rule("truncated", model), 2, 2)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert compiled.is_current()
    handle = model.register_forward_hook(print)
    assert compiled.is_observed()
    handle.remove()
    assert not compiled.is_observed()
    model.lm_head.weight.requires_grad_(False)
    assert not compiled.is_current()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: build(dtype=torch.bfloat16), "the model is bfloat16 on cpu"),
        (lambda: build("mgrade", state_size=None), "unsupported operator: aten"),
    ],
)
def test_what_is_not_compiled_is_said(model, reason):
    with pytest.raises(Uncompilable, match=reason):
        CompiledBlock(build_learning_rule("rtrl", model()), 4, 4)
