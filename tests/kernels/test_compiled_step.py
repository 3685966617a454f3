"""One byte in one call of the compiled kernel equals `forward`; models without a program run `forward`."""

import copy
import gc
import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from model_cases import TOLERANCES, VARIANTS, each_dtype, each_variant, read_bytes, relative_difference, tiny_model
from torch import nn
from transformers.utils.logging import warning_once

from hf_recurrent.kernels.weight_rows import quantize_rows
from hf_recurrent.modeling.memora.modeling_memora import MemoraMLP
from hf_recurrent.modeling.step import compiled_step, single_step
from hf_recurrent.modeling.units import recurrent_units
from hf_recurrent.modeling.units.recurrent_unit import RecurrentUnit

needs_kernel = pytest.mark.skipif(compiled_step._kernel() is None, reason="the kernel was not built")
# A variant of `model_cases`, and fields of the configuration.
CASES = {variant: {} for variant in VARIANTS} | {
    "memora, LayerNorm after the blocks": {"norm_after_contraction": True},
    "memora, odd widths": {"hidden_size": 37, "state_size": 21, "intermediate_size": 83},
    "hawk, no memory in the convolution": {"conv_kernel": 1},
    "smt-rnn, several layers": {"num_hidden_layers": 2, "num_readout_layers": 2, "memory_size": 12},
}


def is_compiled(model) -> bool:
    """True where the kernel has a program for the model as it is now."""
    found = single_step._steps.get(model)
    if found is None or not found.watch.unchanged():
        return False
    return any(step.program is not None for step in found.steps.values())


@needs_kernel
@each_dtype
@pytest.mark.parametrize("streams", [1, 6, 23])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_bytes_equal_the_whole(case, streams, dtype):
    model = tiny_model(case.split(",")[0], dtype, **CASES[case])
    for module in model.modules():
        if isinstance(module, nn.RMSNorm) and module.weight is not None:
            module.weight.uniform_(0.5, 1.5)
    input_ids = torch.randint(1, 256, (streams, 11))
    expected = copy.deepcopy(model).double()(input_ids)
    logits, states = read_bytes(model, input_ids)
    assert is_compiled(model)
    # Roundings grow with the depth: `forward` in float32 is 2.4e-5 from float64 there.
    tolerance = TOLERANCES[dtype] * (5 if "several layers" in case else 1)
    assert relative_difference(logits, expected.logits) < tolerance
    for name, tensor in expected.state.items():
        assert tensor.numel() == 0 or relative_difference(states[-1][name], tensor) < tolerance


@needs_kernel
@pytest.mark.parametrize(
    ("variant", "weights"),
    [
        *((variant, None) for variant in VARIANTS),
        *(("memora, odd widths", kind) for kind in (None, "bfloat16", "int8")),
    ],
)
@torch.no_grad()
def test_a_stream_has_the_same_bits_in_every_batch(variant, weights):
    model = tiny_model(variant.split(",")[0], **CASES[variant])
    if weights is not None:
        model.compile_step(weights)
    input_ids = torch.randint(1, 256, (37, 1))
    state = model(torch.randint(1, 256, (37, 4))).state
    step = single_step.find_single_step(model, input_ids)
    together, new_state = step.run(model, input_ids, state)
    for first, last in ((0, 1), (1, 3), (3, 6), (6, 10), (10, 15), (10, 17), (5, 37)):
        part = {name: tensor[first:last].contiguous() for name, tensor in state.items()}
        logits, new_part = step.run(model, input_ids[first:last], part)
        assert torch.equal(logits, together[first:last])
        assert all(torch.equal(new_part[name], new_state[name][first:last]) for name in state)


@needs_kernel
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 24])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_chain_has_the_bits_of_single_bytes(case, steps):
    model = tiny_model(case.split(",")[0], **CASES[case])
    start = model(torch.randint(1, 256, (1, 5))).state
    before = copy.deepcopy(start)
    input_ids = torch.randint(1, 256, (1, steps))
    outputs, states = single_step.find_single_step(model, input_ids[:, :1]).run_chain(model, input_ids, start)
    state = before
    for step, byte in enumerate(input_ids.split(1, dim=1)):
        assert all(torch.equal(states[name][step : step + 1], state[name]) for name in state)
        expected = model(byte, state=state)
        assert torch.equal(outputs[:, step : step + 1], expected.logits)
        state = expected.state
    assert all(len(states[name]) == steps + 1 and torch.equal(states[name][-1:], state[name]) for name in state)
    assert all(torch.equal(start[name], before[name]) for name in before)


@needs_kernel
@torch.no_grad()
def test_a_chain_of_another_state_is_left_to_forward():
    model = tiny_model("memora")
    input_ids = torch.tensor([[65, 66]])
    step = single_step.find_single_step(model, input_ids[:, :1])
    state = model.init_state(1)
    strided = {name: tensor.repeat(1, 2)[:, ::2] for name, tensor in state.items()}
    for other in (model.init_state(2), strided, {name: tensor.double() for name, tensor in state.items()}):
        assert step.run_chain(model, input_ids, other) is None
    assert step.run_chain(model, input_ids.repeat(2, 1), state) is None


@needs_kernel
@torch.no_grad()
def test_arguments_stay_as_they_are():
    model = tiny_model("hawk")
    state = model(torch.tensor([[5, 6, 7]])).state
    embedded = torch.randn(1, 1, 16)
    before, embedded_before = copy.deepcopy(state), embedded.clone()
    model(inputs_embeds=embedded, state=state)
    model(torch.tensor([[65]]), state=state)
    assert is_compiled(model) and torch.equal(embedded, embedded_before)
    assert all(torch.equal(state[name], before[name]) for name in state)


@needs_kernel
@torch.no_grad()
def test_another_type_copies_and_many_streams():
    model = tiny_model("memora")
    input_ids = torch.randint(1, 256, (1, 6))
    read_bytes(model, input_ids)
    assert is_compiled(copy.deepcopy(model)) is False
    copied, _ = read_bytes(copy.deepcopy(model), input_ids)
    expected, _ = read_bytes(model.double(), input_ids)
    assert expected.dtype == torch.float64 and relative_difference(copied.double(), expected) < 1e-5
    many = input_ids[:, :2].expand(300, -1)
    assert relative_difference(read_bytes(model, many)[0], model(many).logits) < 1e-10
    half, _ = read_bytes(model.bfloat16(), input_ids)
    assert half.dtype == torch.bfloat16 and not is_compiled(model)


@needs_kernel
def test_gradients_go_through_a_single_byte():
    model = tiny_model("memora", torch.float64)
    with torch.no_grad():
        state = model(torch.tensor([[1, 2]])).state
    model(torch.tensor([[3]]), state=state, shift_labels=torch.tensor([[4]])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_generates_the_same_without_the_kernel(monkeypatch):
    model = tiny_model("memora", torch.float64)
    options = {
        "inputs": torch.tensor([list(b"import")]),
        "max_new_tokens": 15,
        "do_sample": False,
        "eos_token_id": None,
    }
    expected = model.generate(**options)
    monkeypatch.setattr(compiled_step, "_kernel", lambda: None)
    assert torch.equal(model.generate(**options), expected)


@pytest.mark.long
@needs_kernel
def test_threads_generate_what_each_generates_alone(commands, tmp_path):
    """In a process of its own, because memory that threads wrongly share ends in a crash."""
    program = Path(__file__).with_name("threads_program.py")
    done = commands.python([str(program), "memora-tiny", "lru-tiny"], tmp_path)
    assert done.returncode == 0, done.stderr


@needs_kernel
def test_threads_are_in_the_kernel_at_the_same_time(monkeypatch):
    kernel, both = compiled_step._kernel(), threading.Barrier(2, timeout=60)
    run = kernel._library.hf_step_run

    def run_with_the_other(*arguments):
        both.wait()
        return run(*arguments)

    model, byte = tiny_model("memora"), torch.tensor([[65]])
    state = model.init_state(1)
    with torch.no_grad():
        expected = model(byte, state=state).logits
        monkeypatch.setattr(kernel, "_library", SimpleNamespace(hf_step_run=run_with_the_other))
        with ThreadPoolExecutor(2) as threads:
            read = torch.no_grad()(lambda _: model(byte, state=state).logits)
            assert all(torch.equal(logits, expected) for logits in threads.map(read, range(2)))


@needs_kernel
@torch.no_grad()
def test_batches_of_other_sizes_share_the_program():
    model = tiny_model("memora")
    read_bytes(model, torch.randint(1, 256, (1, 3)))
    found = single_step._steps[model]
    step = found.steps[compiled_step.CompiledStep, torch.int64]
    for streams in (3, 1, 7):
        read_bytes(model, torch.randint(1, 256, (streams, 3)))
    assert single_step._steps[model] is found and list(found.steps.values()) == [step]


@needs_kernel
def test_a_model_that_is_no_longer_used_is_freed():
    model = tiny_model("memora")
    with torch.no_grad():
        read_bytes(model, torch.randint(1, 256, (1, 3)))
    backbone = weakref.ref(model.model)
    assert is_compiled(model)
    del model
    gc.collect()
    assert backbone() is None


@needs_kernel
@pytest.mark.parametrize("error", [AttributeError, ValueError, TypeError])
@torch.no_grad()
def test_errors_of_forward_are_raised(error, monkeypatch):
    def forward(self, hidden):
        raise error("a mistake")

    model = tiny_model("memora")
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", forward)
    with pytest.raises(error, match="a mistake"):
        read_bytes(model, torch.tensor([[65, 66]]))


@needs_kernel
@torch.no_grad()
def test_widths_that_do_not_match_are_refused():
    """The kernel would read and write past the ends of its vectors."""
    model = tiny_model("memora")
    read_bytes(model, torch.tensor([[65, 66]]))
    model.model.layers[0].mlp.up_proj = nn.Linear(15, 48, bias=False)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        read_bytes(model, torch.tensor([[65, 66]]))


class QuietMLP(MemoraMLP):
    def forward(self, hidden):
        return super().forward(hidden) / 2


@needs_kernel
@torch.no_grad()
def test_a_subclass_runs_as_it_stands():
    model = tiny_model("memora", torch.float64)
    input_ids = torch.randint(1, 256, (2, 6))
    before, _ = read_bytes(model, input_ids)
    model.model.layers[0].mlp.__class__ = QuietMLP
    after, _ = read_bytes(model, input_ids)
    assert is_compiled(model) and relative_difference(after, before) > 1e-2
    assert relative_difference(after, model(input_ids).logits) < 1e-10


class Warnings(logging.Handler):
    """Messages of the compiled step."""

    def __init__(self):
        super().__init__()
        self.messages = []
        warning_once.cache_clear()  # tests before this one

    def emit(self, record):
        self.messages.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("hf_recurrent.modeling.step.compiled_step").addHandler(self)
        return self.messages

    def __exit__(self, *_):
        logging.getLogger("hf_recurrent.modeling.step.compiled_step").removeHandler(self)


class LeakyIntegrator(RecurrentUnit):
    """A user's own unit, with an operation to be chosen."""

    function = staticmethod(torch.sigmoid)

    def __init__(self, input_size, state_size, **options):
        super().__init__(input_size, state_size, **options)
        self.input_projection = self.input_map()
        self.rate = nn.Parameter(torch.linspace(-2, 2, state_size))

    def coefficients(self, projection):
        decay = self.function(self.rate + 0.1 * projection)
        return decay, nn.functional.softsign(projection) * (1 - decay)


def model_with(unit, monkeypatch, **attributes):
    monkeypatch.setitem(recurrent_units._UNITS, "own", type("OwnUnit", (unit,), attributes))
    return tiny_model("memora+own")


@needs_kernel
@torch.no_grad()
def test_a_unit_of_the_users_own_is_compiled(monkeypatch):
    model = model_with(LeakyIntegrator, monkeypatch)
    input_ids = torch.randint(1, 256, (3, 9))
    with Warnings() as messages:
        logits, _ = read_bytes(model, input_ids)
    assert is_compiled(model) and not messages
    assert relative_difference(logits, model(input_ids).logits) < 1e-5


def of_sorted(x):
    return torch.sigmoid(x).sort(dim=-1).values


def of_a_choice(x):
    return torch.sigmoid(x) if float(x.sum()) > -1e9 else x


def of_other_streams(x):
    return torch.sigmoid(x - x.mean(0, keepdim=True))


@needs_kernel
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (of_sorted, "aten.sort"),
        (of_a_choice, "aten._local_scalar_dense"),
        (of_other_streams, "differs between streams"),
    ],
)
@torch.no_grad()
def test_an_operation_without_a_form_is_named_once_and_runs_in_forward(function, name, monkeypatch):
    model = model_with(LeakyIntegrator, monkeypatch, function=staticmethod(function))
    input_ids = torch.randint(1, 256, (3, 5))
    with Warnings() as messages:
        logits, _ = read_bytes(model, input_ids)
    assert not is_compiled(model) and len(messages) == 1 and name in messages[0]
    assert relative_difference(logits, model(input_ids).logits) < 1e-5


@needs_kernel
@pytest.mark.parametrize("variant", ["memora", "memora+s5", "mgrade", "lru"])
@torch.no_grad()
def test_vectors_changed_in_place_count_at_the_next_step(variant):
    """The program holds what it computed from them, such as exp(ν)."""
    model = tiny_model(variant)
    input_ids = torch.randint(1, 256, (2, 8))
    read_bytes(model, input_ids)
    changed = [p for name, p in model.named_parameters() if p.dim() == 1 or "positions" in name]
    for parameter in changed:
        parameter.data.mul_(0.9).add_(0.05)
    logits, _ = read_bytes(model, input_ids)
    assert is_compiled(model)
    assert relative_difference(logits, model(input_ids).logits) < 1e-5


@pytest.mark.sampled(4)
@needs_kernel
@each_variant
@torch.no_grad()
def test_each_parameter_changed_in_place_counts_at_the_next_step(variant):
    """Alone: a parameter that is noticed would have the others read again."""
    model = tiny_model(variant)
    state = model(torch.tensor([[66, 67]])).state
    byte = torch.tensor([[65]])
    model(byte, state=state)
    for name, parameter in model.named_parameters():
        before = parameter.clone()
        parameter.mul_(1.5).add_(0.05)
        logits = model(byte, state=state).logits
        with torch.enable_grad():
            expected = model(byte, state=state).logits.detach()
        assert relative_difference(logits, expected) < 1e-4, name
        parameter.copy_(before)
    assert is_compiled(model)


@pytest.mark.sampled(4)
@needs_kernel
@pytest.mark.parametrize(("weights", "tolerance"), [("bfloat16", 0.02), ("int8", 0.03)])
@each_variant
@torch.no_grad()
def test_narrow_weights(variant, weights, tolerance):
    """The program with narrow weights equals a model whose weights were rounded so."""
    model = tiny_model(variant)
    input_ids = torch.randint(1, 256, (5, 6))
    exact, _ = read_bytes(model, input_ids)
    model.compile_step(weights)
    logits, _ = read_bytes(model, input_ids)
    assert 0 < relative_difference(logits, exact) < 12 * tolerance
    alone, _ = read_bytes(model, input_ids[2:3])
    assert torch.equal(alone, logits[2:3])
    rounded = copy.deepcopy(model)
    for name, parameter in rounded.named_parameters():
        if parameter.dim() == 2 and not any(part in name for part in ("positions", "convolution")):
            if weights == "bfloat16":
                parameter.copy_(parameter.bfloat16())
            else:
                values, scale = quantize_rows(parameter)
                parameter.copy_(values * scale)
    expected, _ = read_bytes(rounded, input_ids)
    assert relative_difference(logits, expected) < 3e-3
    model.compile_step(None)
    assert torch.equal(read_bytes(model, input_ids)[0], exact)


@needs_kernel
@torch.no_grad()
def test_narrow_weights_follow_the_model():
    model = tiny_model("memora")
    input_ids = torch.randint(1, 256, (1, 8))
    model.compile_step("int8")
    before, _ = read_bytes(model, input_ids)
    model.model.layers[0].mlp.up_proj.weight.mul_(-1)
    after, _ = read_bytes(model, input_ids)
    assert relative_difference(after, model(input_ids).logits) < 0.2 < relative_difference(after, before)


def test_narrow_weights_are_refused_where_they_cannot_be():
    model = tiny_model("memora")
    with pytest.raises(ValueError, match="`weights` is 'int4'; it must be one of 'bfloat16', 'int8', or None"):
        model.compile_step("int4")
    with pytest.raises(RuntimeError, match="needs float32 on the CPU"):
        tiny_model("memora", torch.float64).compile_step("int8")
    model.lm_head.register_forward_hook(lambda *_: None)
    if compiled_step._kernel() is not None:
        with pytest.raises(ValueError, match="a hook or another `forward` is in its place"):
            model.compile_step("int8")
