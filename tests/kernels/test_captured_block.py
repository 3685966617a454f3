"""The layers of a training block as CUDA graphs equal the layers; without a GPU, a stand-in runs them again."""

import copy

import pytest
import torch
from captured_on_cpu import GRAPHS, capture_on_cpu, device_for
from model_cases import relative_difference, tiny_model

from hf_recurrent.modeling.step import captured_block
from hf_recurrent.modeling.step.captured_block import CapturedTraining

CASES = ["memora", "hawk", "lru", "memora+ngrams"]
STREAMS, STEPS, BLOCKS = 2, 12, 6
TOLERANCE = 1e-10  # of float64


@pytest.fixture(params=GRAPHS)
def device(request, monkeypatch):
    if (device := device_for(request.param)) == "cpu":
        capture_on_cpu(monkeypatch)
    return device


def read_blocks(model, blocks, captured=None):
    """Loss of each block, the last state and the summed gradients, with the state carried and some resets."""
    state, losses = model.init_state(STREAMS, blocks.device), []
    for number, input_ids in enumerate(blocks):
        resets = torch.zeros(STREAMS, STEPS, dtype=torch.bool, device=blocks.device)
        resets[0, number] = True
        given = {"input_ids": input_ids, "shift_labels": input_ids.roll(-1, 1), "reset_mask": resets, "state": state}
        if captured is None:
            output = model(**given)
        else:
            with captured.active():
                output = model(**given)
        output.loss.backward()
        losses.append(output.loss.detach())
        state = {name: tensor.detach() for name, tensor in output.state.items()}
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return torch.stack(losses), state, grads


def pair(case, device):
    model = tiny_model(case, torch.float64).train().to(device)
    blocks = torch.randint(1, 256, (BLOCKS, STREAMS, STEPS), device=device)
    return model, copy.deepcopy(model), blocks


@pytest.mark.parametrize("case", CASES)
def test_blocks_equal_the_layers(case, device):
    model, other, blocks = pair(case, device)
    captured = CapturedTraining(model.model)
    losses, state, grads = read_blocks(model, blocks, captured)
    assert captured.block.recording is not None
    expected_losses, expected_state, expected_grads = read_blocks(other, blocks)
    assert relative_difference(losses, expected_losses) < TOLERANCE
    assert state.keys() == expected_state.keys() and grads.keys() == expected_grads.keys()
    for name, tensor in (expected_state | expected_grads).items():
        found = (state | grads)[name]
        if tensor.is_sparse:
            tensor, found = tensor.to_dense(), found.to_dense()
        assert tensor.numel() == 0 or relative_difference(found.double(), tensor.double()) < TOLERANCE, name


def test_changed_weights_are_read(device):
    model, other, blocks = pair("memora", device)
    captured = CapturedTraining(model.model)
    read_blocks(model, blocks, captured)
    for each in (model, other):
        each.zero_grad()
        with torch.no_grad():
            each.model.layers[0].mlp.down_proj.weight.mul_(2)
        last = each.model.layers[1].mlp.up_proj
        last.weight = torch.nn.Parameter(torch.ones_like(last.weight))
    losses, _, grads = read_blocks(model, blocks, captured)
    expected, _, expected_grads = read_blocks(other, blocks)
    assert relative_difference(losses, expected) < TOLERANCE
    for name, tensor in expected_grads.items():
        assert relative_difference(grads[name], tensor) < TOLERANCE, name


def test_two_blocks_before_their_backward_passes(device):
    model, other, blocks = pair("memora", device)
    captured = CapturedTraining(model.model)
    read_blocks(model, blocks, captured)
    for each in (model, other):
        each.zero_grad()
    with captured.active():
        first, second = (model(block, labels=block).loss for block in blocks[:2])
    (first * second).backward()
    expected_first, expected_second = (other(block, labels=block).loss for block in blocks[:2])
    (expected_first * expected_second).backward()
    for name, weight in other.named_parameters():
        assert relative_difference(model.get_parameter(name).grad, weight.grad) < TOLERANCE, name


def test_a_second_backward_pass_is_refused(device):
    model, _, blocks = pair("memora", device)
    captured = CapturedTraining(model.model)
    read_blocks(model, blocks, captured)
    with captured.active():
        resets = torch.zeros(STREAMS, STEPS, dtype=torch.bool, device=device)
        loss = model(blocks[0], labels=blocks[0], reset_mask=resets).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="cuda_graphs"):
        loss.backward()


def test_frozen_weights_have_no_gradient(device):
    model, other, blocks = pair("memora", device)
    for each in (model, other):
        each.model.layers[0].requires_grad_(False)
        each.model.embed_tokens.requires_grad_(False)
    captured = CapturedTraining(model.model)
    _, _, grads = read_blocks(model, blocks, captured)
    _, _, expected = read_blocks(other, blocks)
    assert captured.block.recording is not None
    assert grads.keys() == expected.keys()


def test_evaluation_hooks_and_checkpointing_use_the_layers(device):
    model, _, blocks = pair("memora", device)
    captured = CapturedTraining(model.model)
    read_blocks(model.eval(), blocks, captured)
    assert captured.block is None
    handle = model.train().model.layers[0].register_forward_hook(lambda *_: None)
    read_blocks(model, blocks, captured)
    assert captured.block is None
    handle.remove()
    model.gradient_checkpointing_enable()
    read_blocks(model, blocks, captured)
    assert captured.block is None


def test_a_failed_capture_warns_once(device, monkeypatch):
    def refuse(run, wanted):
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(captured_block, "_record_block", refuse)
    model, other, blocks = pair("memora", device)
    with pytest.warns(UserWarning, match="without CUDA graphs.*not permitted") as caught:
        losses, _, _ = read_blocks(model, blocks, CapturedTraining(model.model))
    assert len(caught) == 1
    assert relative_difference(losses, read_blocks(other, blocks)[0]) < TOLERANCE


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_after_a_failed_capture_the_gpu_is_as_before(monkeypatch):
    model, other, blocks = pair("memora", "cuda")
    read_layers = type(model.model).read_layers

    def synchronize(self, hidden, *rest):
        hidden.sum().item()  # a capture cannot wait for the GPU
        return read_layers(self, hidden, *rest)

    monkeypatch.setattr(type(model.model), "read_layers", synchronize)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        losses, _, _ = read_blocks(model, blocks, CapturedTraining(model.model))
    assert relative_difference(losses, read_blocks(other, blocks)[0]) < TOLERANCE
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.randn(9, device="cuda").isfinite().all()
