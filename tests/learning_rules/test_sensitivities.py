"""Real-time recurrent learning against automatic differentiation through all of the time, in float64."""

import gc

import pytest
import torch
from model_cases import relative_difference, tiny_model
from torch import nn

from hf_recurrent.learning_rules import sensitivities as module
from hf_recurrent.learning_rules.rules import build_learning_rule
from hf_recurrent.learning_rules.sensitivities import SensitivityEngine
from hf_recurrent.modeling.block.recurrent_state import detach_state
from hf_recurrent.modeling.units.dense_units import DenseUnit
from hf_recurrent.modeling.units.nonlinear_units import SequentialUnit
from hf_recurrent.modeling.units.recurrent_units import RECURRENT_UNITS, build_recurrent_unit

STREAMS, LENGTH = 3, 12
# What the units of a layer read is made before them: its gradient knows of the block only.
BEFORE = ("embed_tokens", "recurrent_norm", "in_proj", "convolution")

ELEMENT_WISE = sorted(name for name, kind in RECURRENT_UNITS.items() if not issubclass(kind, DenseUnit))
CASES = [
    *(f"memora+{unit}" for unit in ELEMENT_WISE if unit != "rg_lru"),
    *(f"hawk+{unit}" for unit in ("rg_lru", "qrnn", "complex_glru")),
    "mgrade",
    "lru",
    "memora+glru+signed",
]


def is_before(name, case):
    return any(part in name for part in BEFORE) or (case == "lru" and ".layers.0.norm." in name)


def batch(streams=STREAMS):
    generator = torch.Generator().manual_seed(3)
    input_ids, labels = torch.randint(1, 64, (2, STREAMS, LENGTH), generator=generator)
    resets = torch.rand(STREAMS, LENGTH, generator=generator) < 0.15
    return input_ids[:streams], labels[:streams], resets[:streams]


def model_of(case, dtype=torch.float64, **overrides):
    # Untied, because an embedding that is also the head stands both before and after the units.
    return tiny_model(
        case, dtype, **{"tie_word_embeddings": False, "vocab_size": 64, "num_hidden_layers": 1} | overrides
    )


def loss_of(model, part, **options):
    input_ids, labels, resets = part
    return model(
        input_ids,
        shift_labels=labels,
        reset_mask=resets,
        use_cache=True,
        num_items_in_batch=STREAMS * LENGTH,
        **options,
    )


def gradients(model):
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def through_time(model, streams=STREAMS):
    loss_of(model, batch(streams)).loss.backward()
    return gradients(model)


def in_blocks(model, stride, engine=None, streams=STREAMS):
    """Gradients summed over blocks of `stride` steps; and the sensitivities after the last."""
    state, carried = model.init_state(streams), None if engine is None else engine.init_sensitivities(streams)
    for part in zip(*(tensor.split(stride, 1) for tensor in batch(streams)), strict=True):
        if engine is None:
            output = loss_of(model, part, state=state)
            output.loss.backward()
        else:
            with engine.trace(carried):
                output = loss_of(model, part, state=state)
                output.loss.backward()
        state = detach_state(output.state)
    return gradients(model), carried


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_one_recurrent_layer_is_exact_at_any_stride(case):
    model = model_of(case)
    expected = through_time(model)
    for stride in (1, 3, 8):
        learned, _ = in_blocks(model, stride, SensitivityEngine(model))
        truncated, _ = in_blocks(model, stride)
        wrong_before = 0
        for name, gradient in learned.items():
            if is_before(name, case):
                assert relative_difference(gradient, truncated[name]) < 1e-10, (name, stride)
            else:
                assert relative_difference(gradient, expected[name]) < 1e-10, (name, stride)
                wrong_before += relative_difference(truncated[name], expected[name]) > 1e-3
        assert wrong_before, "the stream is too short to need sensitivities"


@pytest.mark.parametrize("case", ["memora+glru", "mgrade"])
def test_a_single_stream(case):
    model = model_of(case)
    expected = through_time(model, 1)
    learned, _ = in_blocks(model, 1, SensitivityEngine(model), 1)
    for name, gradient in learned.items():
        if not any(part in name for part in BEFORE):
            assert relative_difference(gradient, expected[name]) < 1e-10, name


@pytest.mark.parametrize("case", ["memora+glru", "hawk+rg_lru", "memora+complex_lru"])
def test_the_last_of_several_layers_is_exact(case):
    model = model_of(case, num_hidden_layers=3)
    expected = through_time(model)
    learned, _ = in_blocks(model, 3, SensitivityEngine(model))
    exact = {name for name in learned if relative_difference(learned[name], expected[name]) < 1e-10}
    last = {name for name in learned if ".layers.2." in name and not any(part in name for part in BEFORE)}
    assert last <= exact
    assert "lm_head.weight" in exact
    assert "model.layers.0.recurrent_block.recurrent_unit.recurrence_gate.weight" not in exact


@pytest.mark.parametrize(
    "case", ["memora+glru", "memora+complex_glru_conjugate", "hawk+qrnn", "memora+indrnn", "mgrade"]
)
def test_a_block_is_its_steps(case):
    model = model_of(case, num_hidden_layers=2)
    engine = SensitivityEngine(model)
    _, one_by_one = in_blocks(model, 1, engine)
    for stride in (5, LENGTH):
        _, by_block = in_blocks(model, stride, engine)
        for name, tensor in by_block.items():
            assert relative_difference(tensor, one_by_one[name]) < 1e-10, name


@pytest.mark.parametrize("streams", [64, 70])
def test_many_streams_against_float64(streams):
    """Steps whose maps and gates kernels compute, where they were built, against the same weights in float64."""
    sizes = {"hidden_size": 136, "state_size": 152, "num_hidden_layers": 2}
    narrow = model_of("memora+glru", torch.float32, **sizes)
    wide = model_of("memora+glru", **sizes)
    wide.load_state_dict(narrow.state_dict())
    ids, labels = torch.randint(1, 64, (2, streams, 4), generator=torch.Generator().manual_seed(0))
    found = []
    for model in (narrow, wide):
        rule = build_learning_rule("rtrl", model)
        state, carried = model.init_state(streams), rule.init_carried(streams)
        for part, targets in zip(ids.split(1, 1), labels.split(1, 1), strict=True):
            state = rule.learn(carried, state, part, targets, None, streams).state
        found.append(gradients(model) | {f"sensitivity of {name}": tensor for name, tensor in carried.items()})
    for name, tensor in found[0].items():
        assert relative_difference(tensor.double(), found[1][name]) < 5e-6, name


@pytest.mark.parametrize("case", ["memora+glru", "memora+complex_lru"])
@pytest.mark.parametrize("elements", [1, 100, 1000, 10**9])
def test_the_size_of_a_chunk_changes_nothing(case, elements, monkeypatch):
    model = model_of(case)
    expected, after = in_blocks(model, 3, SensitivityEngine(model))
    monkeypatch.setattr(module, "sensitivities_cpu", None)
    monkeypatch.setattr(module, "_CPU_CHUNK_ELEMENTS", elements)
    learned, carried = in_blocks(model, 3, SensitivityEngine(model))
    assert all(relative_difference(learned[name], expected[name]) < 1e-12 for name in expected)
    assert all(relative_difference(carried[name], after[name]) < 1e-12 for name in after)


class UnitAlone(nn.Module):
    """As much of a model as the engine needs."""

    dtype = torch.float64
    device = torch.device("cpu")

    def __init__(self, unit):
        super().__init__()
        self.unit = unit.double()


def random_unit(name, width=4, state=8, **options):
    torch.manual_seed(2)
    unit = build_recurrent_unit(name, state if name == "rg_lru" else width, state, **options)
    for parameter in unit.parameters():
        nn.init.normal_(parameter, std=0.5)
    return UnitAlone(unit)


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_sensitivities_are_the_jacobian_of_the_state(name):
    alone = random_unit(name, bias=True)
    unit = alone.unit
    inputs, state = torch.randn(2, 7, unit.input_size).double(), torch.zeros(2, 8).double()
    resets = torch.zeros(2, 7, dtype=torch.bool)
    resets[1, 3] = True
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 5:] = True
    engine = SensitivityEngine(alone)
    carried = engine.init_sensitivities(2)
    reached = state
    for steps in (slice(0, 2), slice(2, 3), slice(3, 7)):
        with engine.trace(carried):
            reached = unit(inputs[:, steps], reached.detach(), resets[:, steps], padding[:, steps])[1]
    parameters = dict(unit.named_parameters())

    def final_state(*values):
        given = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(unit, given, (inputs, state, resets, padding))[1]

    jacobian = torch.autograd.functional.jacobian(final_state, tuple(parameters.values()))
    groups = unit.channel_groups
    for parameter_name, block in zip(parameters, jacobian, strict=True):
        traced = carried.get(f"unit.{parameter_name}")
        if traced is None:
            assert not block.any(), parameter_name
            continue
        # (B, K, G, P, G, …) → the diagonal of the groups.
        block = block.unflatten(1, (-1, groups)).unflatten(3, (-1, groups)).movedim(3, 2)
        expected = torch.stack([block[:, :, :, group, group] for group in range(groups)], 3)
        assert relative_difference(traced, expected) < 1e-10, parameter_name


def test_read_outs_are_not_traced():
    assert {name.split(".")[1] for name in SensitivityEngine(random_unit("complex_lru")).init_sensitivities(1)} == {
        "input_projection",
        "nu",
        "theta",
    }
    assert "unit.output_gate.weight" not in SensitivityEngine(random_unit("qrnn")).init_sensitivities(1)
    assert set(SensitivityEngine(random_unit("rg_lru")).init_sensitivities(2)) == {
        "unit.recurrence_gate.weight",
        "unit.input_gate.weight",
        "unit.recurrent_param",
    }


def test_a_reset_forgets_what_was_before():
    alone = random_unit("glru")
    engine = SensitivityEngine(alone)
    inputs = torch.randn(2, 5, 4).double()
    resets = torch.tensor([[False, True, False], [False, False, False]])
    started = {name: torch.randn_like(tensor) for name, tensor in engine.init_sensitivities(2).items()}
    carried = {name: tensor.clone() for name, tensor in started.items()}
    fresh = engine.init_sensitivities(1)
    with engine.trace(carried):
        alone.unit(inputs[:, :3], torch.randn(2, 8).double(), resets)
    with engine.trace(fresh):
        alone.unit(inputs[:1, 1:3], torch.zeros(1, 8).double())
    for name, tensor in carried.items():
        torch.testing.assert_close(tensor[:1], fresh[name])
        assert not torch.allclose(tensor[1], started[name][1])


def test_gradients_add_to_what_is_there_and_frozen_parameters_stay_out():
    model = model_of("memora+glru")
    unit = model.model.layers[0].recurrent_block.recurrent_unit
    expected, _ = in_blocks(model, 4, SensitivityEngine(model))
    unit.input_gate.weight.requires_grad_(False)
    unit.nu.requires_grad_(False)
    engine = SensitivityEngine(model)
    assert not any("nu" in name or "input_gate" in name for name in engine.init_sensitivities(1))
    unit.recurrence_gate.weight.grad = torch.ones_like(unit.recurrence_gate.weight)
    learned, _ = in_blocks(model, 4, engine)
    name = "model.layers.0.recurrent_block.recurrent_unit.{}.weight"
    torch.testing.assert_close(learned[name.format("recurrence_gate")], expected[name.format("recurrence_gate")] + 1)
    torch.testing.assert_close(learned[name.format("input_projection")], expected[name.format("input_projection")])
    for parameter in unit.parameters():
        parameter.requires_grad_(False)
    assert SensitivityEngine(model).init_sensitivities(1) == {}
    in_blocks(model, 4, SensitivityEngine(model))


def test_reading_changes_no_number_and_needs_no_backward_pass():
    model = model_of("hawk+rg_lru", torch.float32, num_hidden_layers=2)
    engine = SensitivityEngine(model)
    plain = loss_of(model, batch())
    carried = engine.init_sensitivities(STREAMS)
    with engine.trace(carried):
        output = loss_of(model, batch())
    assert torch.equal(plain.logits, output.logits)
    learned = engine.init_sensitivities(STREAMS)
    with engine.trace(learned):
        loss_of(model, batch()).loss.backward()
    assert all(torch.equal(learned[name], tensor) and tensor.any() for name, tensor in carried.items())


def test_two_backward_passes_are_refused():
    model = model_of("memora+glru")
    engine = SensitivityEngine(model)
    with engine.trace(engine.init_sensitivities(STREAMS)):
        loss = loss_of(model, batch()).loss
        loss.backward(retain_graph=True)
        with pytest.raises(ValueError, match="two backward passes"):
            loss.backward()


def test_bfloat16_models_have_float32_sensitivities():
    model = model_of("memora+glru", torch.float32)
    expected, exact = in_blocks(model, 3, SensitivityEngine(model))
    with torch.autocast("cpu", torch.bfloat16):
        learned, carried = in_blocks(model, 3, SensitivityEngine(model))
    model = model.to(torch.bfloat16)
    narrow, half = in_blocks(model, 3, SensitivityEngine(model))
    for name, tensor in exact.items():
        for other in (carried[name], half[name]):
            assert other.dtype == torch.float32
            assert relative_difference(other, tensor) < 0.05
        assert relative_difference(learned[name], expected[name]) < 0.1
        assert relative_difference(narrow[name].float(), expected[name]) < 0.1


def test_nothing_of_a_block_stays():
    model = model_of("memora+glru")
    engine = SensitivityEngine(model)
    gc.collect()
    gc.disable()
    earlier = [thing for thing in gc.get_objects() if isinstance(thing, module._UnitBlock)]  # of compiled learners
    try:
        in_blocks(model, 3, engine)
        later = [thing for thing in gc.get_objects() if isinstance(thing, module._UnitBlock)]
        assert len(later) == len(earlier)
        unit = model.model.layers[0].recurrent_block.recurrent_unit
        assert isinstance(unit.nu, nn.Parameter)
        assert "recur" not in unit.__dict__
        assert not unit.input_gate._forward_hooks
    finally:
        gc.enable()


# ---- Refusals ----


class Dense(SequentialUnit):
    """tanh(W x + U h)."""

    def __init__(self, input_size, state_size, **options):
        super().__init__(input_size, state_size, **options)
        self.input_projection = self.input_map()
        self.recurrent_map = nn.Linear(state_size, state_size, bias=False)

    def project(self, inputs):
        return (self.input_projection(inputs),)

    def step(self, state, projection):
        return torch.tanh(projection + self.recurrent_map(state))


class Neighbours(Dense):
    """Mixes channels without a map."""

    def step(self, state, projection):
        return torch.tanh(projection + 0.5 * state.roll(1, -1))


class WithMatrix(Dense):
    """Has a parameter that no `nn.Linear` owns."""

    def __init__(self, input_size, state_size, **options):
        super().__init__(input_size, state_size, **options)
        self.table = nn.Parameter(torch.ones(3, state_size))


@pytest.mark.parametrize("kind", [Dense, Neighbours])
def test_units_that_mix_channels_are_refused(kind):
    with pytest.raises(ValueError, match=rf"`unit` is a {kind.__name__}.*mixes its channels.*`bptt`.*SnAp-1"):
        SensitivityEngine(UnitAlone(kind(4, 8)))


@pytest.mark.parametrize(("name", "kind"), [("gru", "GRU"), ("dense_linear", "DenseLinear")])
def test_our_own_dense_units_are_refused(name, kind):
    model = model_of(f"memora+{name}")
    message = rf"`model.layers.0.recurrent_block.recurrent_unit` is a {kind}.*mixes.*`bptt`.*`snap1`"
    with pytest.raises(ValueError, match=message):
        SensitivityEngine(model)


def test_what_cannot_be_traced_is_refused():
    with pytest.raises(ValueError, match=r"`unit.table` is neither a vector"):
        SensitivityEngine(UnitAlone(WithMatrix(4, 8)))
    with pytest.raises(ValueError, match=r"`model` is a UnitAlone without element-wise.*`bptt`.*SnAp-1"):
        SensitivityEngine(UnitAlone(nn.Linear(2, 2)))


def test_another_number_of_streams_is_refused():
    model = model_of("memora+glru")
    engine = SensitivityEngine(model)
    refusal = pytest.raises(ValueError, match=r"weight'\]` has shape \(2,.*3 streams.*number of streams cannot change")
    with refusal, engine.trace(engine.init_sensitivities(2)):
        loss_of(model, batch())
    with pytest.raises(ValueError, match=r"`sensitivities` has no `model.layers.0"), engine.trace({}):
        loss_of(model, batch())
    with pytest.raises(ValueError, match=r"`batch_size` is 0"):
        engine.init_sensitivities(0)


def test_gradient_checkpointing_is_refused():
    model = model_of("memora+glru").train()
    model.activation_checkpointing_enable()
    engine = SensitivityEngine(model)
    refusal = pytest.raises(ValueError, match=r"ran twice.*gradient checkpointing")
    with refusal, engine.trace(engine.init_sensitivities(STREAMS)):
        loss_of(model, batch()).loss.backward()
