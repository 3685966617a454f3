"""One byte in one call of the compiled kernel equals `forward`; models without a program run `forward`."""

import copy
import gc
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from model_cases import TOLERANCES, each_dtype, read_bytes, relative_difference, tiny_model
from torch import nn

import hf_recurrent
from hf_recurrent.modeling import compiled_step, single_step
from hf_recurrent.modeling.modeling_memora import MemoraMLP

needs_kernel = pytest.mark.skipif(compiled_step._kernel() is None, reason="the kernel was not built")
CASES = {
    "memora": {},
    "hawk": {},
    "memora+glru+signed": {},
    "memora, LayerNorm after the blocks": {"norm_after_contraction": True},
    "memora, odd widths": {"hidden_size": 37, "state_size": 21, "intermediate_size": 83},
    "hawk, no memory in the convolution": {"conv_kernel": 1},
}


def is_compiled(model) -> bool:
    """True where the kernel has a program for the model as it is now."""
    found = single_step._steps.get(model.model)
    if found is None or not found.watch.unchanged():
        return False
    return any(step.program is not None for step in found.steps.values())


@needs_kernel
@each_dtype
@pytest.mark.parametrize("streams", [1, 3, 6, 23])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_bytes_equal_the_whole(case, streams, dtype):
    model = tiny_model(case.split(",")[0], dtype, **CASES[case])
    for module in model.modules():
        if isinstance(module, nn.RMSNorm) and module.weight is not None:
            module.weight.uniform_(0.5, 1.5)
    input_ids = torch.randint(1, 256, (streams, 11))
    expected = model(input_ids)
    logits, states = read_bytes(model, input_ids)
    assert is_compiled(model)
    assert relative_difference(logits, expected.logits) < TOLERANCES[dtype]
    for name, tensor in expected.state.items():
        assert tensor.numel() == 0 or relative_difference(states[-1][name], tensor) < TOLERANCES[dtype]


@needs_kernel
@each_dtype
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 7, 24])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_chain_has_the_bits_of_single_bytes(case, steps, dtype):
    model = tiny_model(case.split(",")[0], dtype, **CASES[case])
    start = model(torch.randint(1, 256, (1, 5))).state
    before = copy.deepcopy(start)
    hidden = model.model.embed_tokens(torch.randint(1, 256, (1, steps)))
    given = hidden.clone()
    outputs, states = single_step.find_single_step(model.model, hidden[:, :1]).run_chain(hidden, start)
    state = before
    for step, embedded in enumerate(hidden.split(1, dim=1)):
        assert all(torch.equal(states[name][step : step + 1], state[name]) for name in state)
        expected = model.model(inputs_embeds=embedded, state=state)
        assert torch.equal(outputs[:, step : step + 1], expected.last_hidden_state)
        state = expected.state
    assert all(len(states[name]) == steps + 1 and torch.equal(states[name][-1:], state[name]) for name in state)
    assert torch.equal(hidden, given) and all(torch.equal(start[name], before[name]) for name in before)


@needs_kernel
@torch.no_grad()
def test_a_chain_of_another_state_is_left_to_forward():
    model = tiny_model("memora")
    hidden = model.model.embed_tokens(torch.tensor([[65, 66]]))
    step = single_step.find_single_step(model.model, hidden[:, :1])
    state = model.init_state(1)
    strided = {name: tensor.repeat(1, 2)[:, ::2] for name, tensor in state.items()}
    for other in (model.init_state(2), strided, {name: tensor.double() for name, tensor in state.items()}):
        assert step.run_chain(hidden, other) is None
    assert step.run_chain(hidden.repeat(2, 1, 1), state) is None


@needs_kernel
@torch.no_grad()
def test_arguments_stay_as_they_are():
    model = tiny_model("hawk")
    state = model(torch.tensor([[5, 6, 7]])).state
    embedded = torch.randn(1, 1, 16)
    before, embedded_before = copy.deepcopy(state), embedded.clone()
    model(inputs_embeds=embedded, state=state)
    assert is_compiled(model) and torch.equal(embedded, embedded_before)
    assert all(torch.equal(state[name], before[name]) for name in state)


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
    many = input_ids.expand(40, -1)
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


@needs_kernel
@pytest.mark.parametrize("operation", ["gelu", "glru", "rg_lru"])
@pytest.mark.parametrize("negative", [False, True])
def test_functions_in_float32(operation, negative):
    """The kernel's own polynomials against float64, also far out, where torch's float32 GeLU has lost all digits."""
    kernel = compiled_step._kernel()
    program = kernel.StepProgram(torch.float32)
    x = torch.linspace(-14, 14, 10001).repeat(2, 1)  # an odd width: the last lanes are not full
    names = ("recurrence_gate", "input_gate", "projection", "state")
    tensors = {name: torch.roll(x, 997 * place, 1).contiguous() for place, name in enumerate(names)}
    rate, output = torch.roll(x[0], 5) / 3, torch.zeros_like(x)
    new, *operands = (kernel.Vector(x.shape[1], name) for name in ("new", *names))
    if operation == "gelu":
        program.add(new, program.gelu(operands[0]))
    else:
        program.gated_unit(operation, new, *operands, rate=rate, scale=8.0, negative=negative)
    program.run(tensors | {"new": output}, 2)
    gate, input_gate, projection, state = (tensor.double() for tensor in tensors.values())
    if operation == "gelu":
        expected = gate / 2 * torch.special.erfc(-gate / 2**0.5)
        torch.testing.assert_close(output.double(), expected, rtol=5e-6, atol=1e-36)
        return
    rate = rate.double()
    rate, inputs = (
        (rate.exp(), input_gate * projection)
        if operation == "glru"
        else (nn.functional.softplus(rate), input_gate.sigmoid() * projection)
    )
    log_decay = -8 * rate * gate.sigmoid()
    decay = 2 * log_decay.exp() - 1 if negative else log_decay.exp()
    squared = -4 * log_decay.exp() * log_decay.expm1() if negative else -(2 * log_decay).expm1()
    expected = decay * state + squared.clamp_min(4e-12 if negative else 1e-12).sqrt() * inputs
    assert ((output - expected).abs() / (inputs.abs() + state.abs() + 1e-3)).max() < 5e-7


@needs_kernel
def test_threads_generate_what_each_generates_alone():
    """In a process of its own, because memory that threads wrongly share ends in a crash."""
    program = Path(__file__).with_name("threads_program.py")
    environment = os.environ | {"PYTHONPATH": str(Path(hf_recurrent.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, program, "memora-tiny", "hawk-tiny"], check=True, timeout=600, env=environment)


@needs_kernel
def test_threads_are_in_the_kernel_at_the_same_time(monkeypatch):
    kernel, both = compiled_step._kernel(), threading.Barrier(2, timeout=60)
    run = kernel._library.hf_step_run

    def run_with_the_other(*arguments):
        both.wait()
        run(*arguments)

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
    found = single_step._steps[model.model]
    step = found.steps[compiled_step.CompiledStep, torch.float32]
    for streams in (3, 1, 7):
        read_bytes(model, torch.randint(1, 256, (streams, 3)))
    assert single_step._steps[model.model] is found and list(found.steps.values()) == [step]


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
        found, module = single_step._steps[model.model], model.model.get_submodule(name)
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


@needs_kernel
@pytest.mark.parametrize("error", [AttributeError, ValueError, TypeError])
@torch.no_grad()
def test_errors_in_compiling_are_raised(error, monkeypatch):
    def compile_step(self, step, hidden, onto):
        raise error("a mistake")

    model = tiny_model("memora")
    monkeypatch.setattr(type(model.model.layers[0].mlp), "compile_step", compile_step)
    with pytest.raises(error, match="a mistake"):
        read_bytes(model, torch.tensor([[65, 66]]))


@needs_kernel
@torch.no_grad()
def test_widths_that_do_not_match_are_refused():
    """The kernel would read and write past the ends of its vectors."""
    model = tiny_model("memora")
    model.model.layers[0].mlp.up_proj = nn.Linear(15, 48, bias=False)
    with pytest.raises(ValueError, match=r"have widths \(16, 48\); they must be \(15, 48\)"):
        read_bytes(model, torch.tensor([[65, 66]]))


class QuietMLP(MemoraMLP):
    def forward(self, hidden):
        return super().forward(hidden) / 2


@needs_kernel
@torch.no_grad()
def test_a_subclass_without_a_step_of_its_own_runs_as_it_stands():
    model = tiny_model("memora", torch.float64)
    input_ids = torch.randint(1, 256, (2, 6))
    before, _ = read_bytes(model, input_ids)
    model.model.layers[0].mlp.__class__ = QuietMLP
    after, _ = read_bytes(model, input_ids)
    assert not is_compiled(model) and relative_difference(after, before) > 1e-2
    assert relative_difference(after, model(input_ids).logits) < 1e-10
