"""One byte as one CUDA graph equals `forward`; without a GPU, a stand-in runs the step again."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from captured_on_cpu import GRAPHS, device_for
from model_cases import read_bytes, relative_difference, tiny_model

from hf_recurrent.modeling.step import captured_step, single_step

CASES = {"memora": {}, "hawk": {}, "hawk, no memory in the convolution": {"conv_kernel": 1}}


def run_again(step, device):
    """As a graph: results stay where they were at first."""
    results = step()

    def replay():
        for result, new in zip(results, step(), strict=True):
            result.copy_(new)

    return results, replay


@pytest.fixture(params=GRAPHS)
def device(request, monkeypatch):
    if (device := device_for(request.param)) == "cpu":
        monkeypatch.setattr(captured_step, "_record", run_again)
        monkeypatch.setattr(captured_step.CapturedStep, "accepts", staticmethod(lambda hidden: True))
        monkeypatch.setattr(single_step, "_STEP_CLASSES", {"cpu": captured_step.CapturedStep})
    return device


def is_recorded(model) -> bool:
    found = single_step._steps.get(model.model)
    return found is not None and any(step.replay is not None for step in found.steps.values())


@pytest.mark.parametrize("streams", [1, 20])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_bytes_equal_the_whole(case, streams, device):
    model = tiny_model(case.split(",")[0], torch.float64, **CASES[case]).to(device)
    input_ids = torch.randint(1, 256, (streams, 9), device=device)
    logits, states = read_bytes(model, input_ids)
    assert is_recorded(model)
    assert relative_difference(logits, model(input_ids).logits) < 1e-10
    # What was returned is not written to again.
    for length, state in enumerate(states[1:], 1):
        expected = model(input_ids[:, :length]).state
        assert list(state) == list(expected)
        for name, tensor in expected.items():
            assert tensor.numel() == 0 or relative_difference(state[name], tensor) < 1e-10


@torch.no_grad()
def test_parts_of_the_state_go_by_name(device):
    model = tiny_model("hawk", torch.float64).to(device)
    input_ids = torch.randint(1, 256, (2, 6), device=device)
    _, states = read_bytes(model, input_ids)
    byte = torch.tensor([[7], [8]], device=device)
    turned = dict(reversed(states[-1].items()))
    assert is_recorded(model)
    assert torch.equal(model(byte, state=turned).logits, model(byte, state=states[-1]).logits)


def test_recorded_in_inference_mode_and_used_outside(device):
    model = tiny_model("memora", torch.float64).to(device)
    input_ids = torch.randint(1, 256, (2, 6), device=device)
    with torch.inference_mode():
        read_bytes(model, input_ids)
    assert is_recorded(model)
    with torch.no_grad():
        logits, states = read_bytes(model, input_ids)
    assert relative_difference(logits, model(input_ids).logits) < 1e-10
    # Outside of both, gradients go through `forward`.
    model(input_ids[:, :1], state=states[-1], shift_labels=input_ids[:, 1:2]).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@torch.no_grad()
def test_changed_models_and_other_streams_are_recorded_anew(device):
    model = tiny_model("memora", torch.float64).to(device)
    input_ids = torch.randint(1, 256, (2, 6), device=device)
    before, _ = read_bytes(model, input_ids)
    model.model.layers[0].mlp_norm.weight = torch.nn.Parameter(torch.linspace(0.1, 3, 16, device=device).double())
    after, _ = read_bytes(model, input_ids)
    assert is_recorded(model) and relative_difference(after, before) > 1e-3
    assert relative_difference(after, model(input_ids).logits) < 1e-10
    assert relative_difference(read_bytes(model, input_ids[:1])[0], after[:1]) < 1e-10
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: (-output[0], output[1]))
    hooked, _ = read_bytes(model, input_ids)
    assert not is_recorded(model) and relative_difference(hooked, after) > 1e-3


class Switched(torch.nn.Linear):
    """As an adapter that can be turned off."""

    off = False

    def forward(self, x):
        return torch.zeros_like(super().forward(x)) if self.off else super().forward(x)


@torch.no_grad()
def test_modules_with_switches_run_as_they_stand(device):
    model = tiny_model("memora", torch.float64).to(device)
    mlp = model.model.layers[0].mlp
    mlp.down_proj = Switched(mlp.down_proj.in_features, mlp.down_proj.out_features, False, device, torch.float64)
    input_ids = torch.randint(1, 256, (2, 6), device=device)
    on, _ = read_bytes(model, input_ids)
    mlp.down_proj.off = True
    off, _ = read_bytes(model, input_ids)
    assert not is_recorded(model) and relative_difference(off, on) > 1e-3
    assert relative_difference(off, model(input_ids).logits) < 1e-10


def test_a_graph_that_cannot_be_made_is_said_once(device, monkeypatch):
    def refuse(step, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(captured_step, "_record", refuse)
    model = tiny_model("memora", torch.float64).to(device)
    input_ids = torch.randint(1, 256, (2, 8), device=device)
    with torch.no_grad(), pytest.warns(UserWarning, match="without a CUDA graph") as said:
        logits, _ = read_bytes(model, input_ids)
    assert len(said) == 1 and relative_difference(logits, model(input_ids).logits) < 1e-10


def test_generates_the_same(device, monkeypatch):
    model = tiny_model("memora", torch.float64).to(device)
    prompt = torch.tensor([list(b"import"), list(b"return")], device=device)
    options = {"max_new_tokens": 15, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    generated = model.generate(prompt, **options)
    assert is_recorded(model)
    monkeypatch.setattr(single_step, "_STEP_CLASSES", {})
    assert torch.equal(model.generate(prompt, **options), generated)


@torch.no_grad()
def test_a_changed_value_is_recorded_anew(device):
    model = tiny_model("memora", torch.float64).to(device)
    input_ids = torch.randint(1, 256, (2, 6), device=device)
    before, _ = read_bytes(model, input_ids)
    model.model.layers[1].mlp.eps = 0.5
    after, _ = read_bytes(model, input_ids)
    assert is_recorded(model) and relative_difference(after, before) > 1e-4
    assert relative_difference(after, model(input_ids).logits) < 1e-10


def test_threads_with_batches_of_their_own(device):
    model = tiny_model("hawk", torch.float64).to(device)
    inputs = [torch.randint(1, 256, (1 + number % 3, 40), device=device) for number in range(6)]
    read = torch.no_grad()(lambda input_ids: read_bytes(model, input_ids)[0])
    alone = [read(input_ids) for input_ids in inputs]
    with ThreadPoolExecutor(len(inputs)) as threads:
        assert all(map(torch.equal, threads.map(read, inputs), alone))
    assert is_recorded(model)


@torch.no_grad()
def test_few_graphs_are_kept(device, monkeypatch):
    monkeypatch.setattr(single_step, "_MOST_STEPS", 2)
    model = tiny_model("memora", torch.float64).to(device)
    for streams in (1, 2, 3, 1):
        input_ids = torch.randint(1, 256, (streams, 5), device=device)
        assert relative_difference(read_bytes(model, input_ids)[0], model(input_ids).logits) < 1e-10
        assert is_recorded(model)
    kept = [key[-1][0] for _, key in single_step._steps[model.model].steps]
    assert kept == [3, 1]
