"""Every family on a GPU computes what it computes on a CPU: losses, gradients, blocks, single bytes, counts."""

import copy

import pytest
import torch
from counted_model import counted_model, word_corpus
from model_cases import each_variant, read_bytes, relative_difference, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
STREAMS, STEPS = 3, 40
TOLERANCE = 1e-9  # of float64


def on_gpu(tensors):
    return {name: tensor.cuda() for name, tensor in tensors.items()}


def loss_and_gradients(model, inputs):
    output = model(**inputs)
    output.loss.backward()
    found = {"loss": output.loss, **output.state}
    found |= {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


@each_variant
def test_training_equals_a_cpu(variant):
    model = tiny_model(variant, torch.float64).train()
    input_ids = torch.randint(1, 256, (STREAMS, STEPS))
    inputs = {"input_ids": input_ids, "shift_labels": input_ids.roll(-1, 1)}
    inputs["reset_mask"] = torch.rand(STREAMS, STEPS) < 0.1
    expected = loss_and_gradients(copy.deepcopy(model), inputs)
    actual = loss_and_gradients(model.cuda(), on_gpu(inputs))
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.is_sparse:
            tensor, actual[name] = tensor.to_dense(), actual[name].to_dense()
        assert tensor.numel() == 0 or relative_difference(actual[name], tensor) < TOLERANCE, name


@each_variant
@torch.no_grad()
def test_blocks_and_bytes_equal_the_whole(variant):
    model = tiny_model(variant, torch.float64).cuda()
    input_ids = torch.randint(1, 256, (STREAMS, 12), device="cuda")
    whole = model(input_ids)
    first = model(input_ids[:, :5])
    second = model(input_ids[:, 5:], state=first.state)
    assert relative_difference(torch.cat([first.logits, second.logits], 1), whole.logits) < TOLERANCE
    logits, states = read_bytes(model, input_ids)
    assert relative_difference(logits, whole.logits) < TOLERANCE
    for name, tensor in whole.state.items():
        assert tensor.numel() == 0 or relative_difference(states[-1][name].double(), tensor.double()) < TOLERANCE, name


@each_variant
def test_greedy_text_equals_a_cpu(variant):
    model = tiny_model(variant, torch.float64)
    prompt = torch.randint(1, 256, (2, 5))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    model, prompt = model.cuda(), prompt.cuda()
    assert torch.equal(model.generate(prompt, attention_mask=torch.ones_like(prompt), **options).cpu(), expected)


@torch.no_grad()
def test_counts_equal_a_cpu():
    corpus = word_corpus()
    model = counted_model(corpus).double()  # counts round what the network says, and show its last bits in float32
    input_ids = torch.tensor(corpus[1][:60], dtype=torch.long)[None]
    expected, actual = model(input_ids), model.cuda()(input_ids.cuda())
    assert relative_difference(actual.logits.cpu(), expected.logits) < 1e-5
    assert actual.logits.logsumexp(-1).abs().max() < 1e-5
    logits, _ = read_bytes(model, input_ids.cuda())
    assert relative_difference(logits.cpu(), expected.logits) < 1e-5
