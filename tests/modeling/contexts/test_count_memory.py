"""The count memory inside language models: every family, every way of reading, saving and loading."""

import copy
import itertools

import pytest
import torch
from model_cases import FAMILIES, tiny_model
from transformers import AutoModelForCausalLM

from hf_recurrent.modeling.contexts import count_memory as module
from hf_recurrent.modeling.contexts.count_memory import STATE_PART, memory_class
from hf_recurrent.modeling.contexts.count_memory_layout import Rates
from hf_recurrent.modeling.contexts.count_memory_reference import CountMemoryReference

TEXT = (
    b"def first(number):\n    return number + 1\n\n\ndef second(number):\n    return first(number) + first(number)\n"
    * 3
)
# Logits of the network are rounded otherwise in a block than step by step, and probabilities are multiples of 2^-16.
TOLERANCE = 0.02
SIZES = {"count_memory_slots": 256, "count_memory_text": 4096, "count_memory_window": 256, "count_memory_rows": 16}


def counting_model(family="memora", learned=TEXT, **overrides):
    model = tiny_model(family, **SIZES | overrides)
    if learned:
        model.count_memory.insert(torch.tensor(list(learned), dtype=torch.uint8), 0)
    return model


def ids(text, rows=1):
    return torch.tensor([list(text)] * rows)


@pytest.fixture(params=FAMILIES, scope="module")
def model(request):
    return counting_model(request.param)


@torch.no_grad()
def test_probabilities_sum_to_one(model):
    logits = model(ids(TEXT[:80])).logits
    assert (logits.double().exp().sum(-1) - 1).abs().max() < 1e-6


@torch.no_grad()
def test_a_block_is_its_chunks_and_its_bytes(model):
    model = copy.deepcopy(model).double()  # the network's rounding is below that of the count memory's inputs
    tokens = torch.stack([ids(TEXT[:90])[0], ids(TEXT[30:120])[0].flip(0)])
    reset_mask = torch.zeros(2, 90, dtype=torch.bool)
    reset_mask[0, 41] = reset_mask[1, 60] = True
    whole = model(tokens, reset_mask=reset_mask)
    for cuts in ([0, 1, 30, 31, 90], [*range(91)]):
        state, logits = None, []
        for begin, end in itertools.pairwise(cuts):
            output = model(tokens[:, begin:end], reset_mask=reset_mask[:, begin:end], state=state)
            state = output.state
            logits.append(output.logits)
        assert torch.equal(torch.cat(logits, 1), whole.logits)
        assert torch.equal(state[STATE_PART], whole.state[STATE_PART])
    alone = model(tokens[:1, 41:])
    assert torch.equal(alone.logits, whole.logits[:1, 41:])


@torch.no_grad()
def test_padding_leaves_no_trace(model):
    text = ids(TEXT[:40])
    padded, mask = torch.zeros(3, 48, dtype=torch.long), torch.zeros(3, 48, dtype=torch.long)
    columns = [list(range(8, 48)), list(range(40)), [*range(5), *range(13, 48)]]
    for row, column in enumerate(columns):
        padded[row, column], mask[row, column] = text[0], 1
    plain, output = model(text), model(padded, attention_mask=mask)
    for row, column in enumerate(columns):
        assert (output.logits[row, column] - plain.logits[0]).abs().max() < TOLERANCE
        assert (output.state[STATE_PART][row] != plain.state[STATE_PART][0]).float().mean() < 0.1


@torch.no_grad()
def test_losses_of_targets_are_those_of_all_logits(model):
    tokens = ids(TEXT[:101])
    logits = model(tokens[:, :-1]).logits
    labels = tokens[:, 1:].clone()
    labels[0, 50] = -100
    losses = model.token_losses(tokens[:, :-1], labels)
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    assert (losses.nats - expected).abs().max() < 1e-4
    assert losses.nats[0, 50] == losses.network[0, 50] == 0
    assert losses.nats.sum() < 0.8 * losses.network.sum()
    without = tiny_model("memora").token_losses(tokens[:, :-1], labels)
    assert without.nats is without.network


@torch.no_grad()
def test_kept_logits_and_generation(model):
    tokens = ids(TEXT[:60], rows=2)
    whole = model(tokens).logits
    assert torch.equal(model(tokens, logits_to_keep=3).logits, whole[:, -3:])
    assert torch.equal(model(tokens, logits_to_keep=torch.tensor([4, 9])).logits, whole[:, [4, 9]])
    output = model.generate(tokens, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    again = model.generate(
        output.sequences[:, -1:], state=output.pending_state, max_new_tokens=4, do_sample=False, eos_token_id=None
    )
    longer = model.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(again[:, 1:], longer[:, -4:])
    assert output.state[STATE_PART].dtype == torch.uint8
    beams = model.generate(tokens[:1], max_new_tokens=5, num_beams=3, return_dict_in_generate=True)
    assert beams.state[STATE_PART].shape == (1, model.count_memory.state_bytes)


def test_training_reads_the_network_alone(model):
    tokens = ids(TEXT[:40])
    state = model(tokens).state
    model.train()
    try:
        output = model(tokens, state=state, shift_labels=tokens)
        assert output.state[STATE_PART] is state[STATE_PART]
        output.loss.backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        model.eval()
        model.zero_grad()
    mixed = model(tokens, shift_labels=tokens)
    assert abs(mixed.loss - output.loss) > 0.1
    mixed.loss.backward()  # errors of the mixture reach the network
    assert any(p.grad.abs().max() > 0 for p in model.parameters())
    model.zero_grad()


@torch.no_grad()
def test_saved_and_loaded(tmp_path):
    model, tokens = counting_model(), ids(TEXT[:60])
    expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(tokens).logits, expected)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert torch.equal(half.count_memory.weights, model.count_memory.weights)
    assert (half(tokens).logits.double().exp().sum(-1) - 1).abs().max() < 1e-6
    network = AutoModelForCausalLM.from_pretrained(tmp_path, count_memory_slots=0).eval()
    assert torch.equal(network(tokens).logits, tiny_model("memora")(tokens).logits)
    frozen = AutoModelForCausalLM.from_pretrained(tmp_path, count_memory_window=0, count_memory_rows=0).eval()
    assert frozen.count_memory.state_bytes < 2048 < model.count_memory.state_bytes
    assert torch.equal(copy.deepcopy(model)(tokens).logits, expected)
    model.count_memory.insert(tokens[0].to(torch.uint8))  # memory of its own
    assert torch.equal(loaded(tokens).logits, expected)


@torch.no_grad()
def test_reference_runs_without_the_kernel(monkeypatch):
    if memory_class() is CountMemoryReference:
        pytest.skip("the kernel was not built")
    tokens = ids(TEXT[:40])
    expected = counting_model()(tokens)
    monkeypatch.setattr(module, "memory_class", lambda small: CountMemoryReference)
    found = counting_model()(tokens)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.state[STATE_PART], expected.state[STATE_PART])


@torch.no_grad()
def test_text_that_was_seen_is_expected():
    tokens, labels = ids(TEXT[:99]), ids(TEXT[1:100])
    fresh, learned = counting_model(learned=b""), counting_model()
    bits = [model.token_losses(tokens, labels).nats.sum() for model in (fresh, learned)]
    assert bits[1] < 0.5 * bits[0]
    twice = torch.cat([tokens, tokens], 1)
    losses = fresh.token_losses(twice, twice.roll(-1, 1)).nats
    assert losses[0, 99:].sum() < 0.5 * losses[0, :99].sum()  # the short-term memory knows the first half


@torch.no_grad()
def test_learning_changes_the_memory_and_its_version():
    model, tokens = counting_model(learned=b""), ids(TEXT[:99])
    memory, before = model.count_memory, model.count_memory.weights.clone()
    version = memory.weights._version
    state = model.init_state(1)[STATE_PART]
    nats, _, after = memory.read(tokens[:, :-1], state, targets=tokens[:, 1:], rates=Rates(learns=True, inserts=True))
    assert not torch.equal(memory.weights, before) and memory.weights._version > version
    assert memory.slots.any() and not state.any() and after.any() and nats.isfinite().all()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"count_memory_slots": 100}, r"`count_memory_slots` is 100; it must be 0 or a power of two"),
        ({"count_memory_window": 3}, "`count_memory_window` is 3; it must be 0 or a power of two"),
        ({"vocab_size": 300}, "a count memory reads bytes"),
    ],
)
def test_wrong_sizes(overrides, message):
    with pytest.raises(ValueError, match=message):
        counting_model(learned=b"", **overrides)


def test_wrong_states_and_inputs():
    model, tokens = counting_model(), ids(TEXT[:5])
    state = model.init_state(1)
    rest = {name: part for name, part in state.items() if name != STATE_PART}
    assert torch.equal(model(tokens, state=rest).logits, tiny_model("memora")(tokens).logits)  # the network alone
    with pytest.raises(ValueError, match=r"state\['count_memory'\]` is torch.float32"):
        model(tokens, state=state | {STATE_PART: state[STATE_PART].float()})
    with pytest.raises(ValueError, match=r"need torch\.uint8"):
        model(tokens, state=state | {STATE_PART: state[STATE_PART][:, 1:]})
    with pytest.raises(ValueError, match="cannot read `inputs_embeds`"):
        model(inputs_embeds=torch.zeros(1, 2, model.config.hidden_size))


@torch.no_grad()
def test_samples_are_not_learned_from():
    model, prompt, sample = counting_model(learned=b""), ids(TEXT[:60]), ids(b"zyxwvuts zyxwvuts zyxwvuts zyxw")
    state = model(prompt).state
    read = model(sample, state=state).logits[0, -1].softmax(-1)[ord("v")]
    sampled = model(sample, state=state, sampled=True).logits[0, -1].softmax(-1)[ord("v")]
    assert read > 10 * sampled
    # The text of the prompt is still known after a sample.
    after = model(sample, state=state, sampled=True).state
    again = model.token_losses(prompt[:, :-1], prompt[:, 1:], state=after).nats.sum()
    assert again < 0.5 * model.token_losses(prompt[:, :-1], prompt[:, 1:]).nats.sum()
    generated = model.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None)
    by_hand, output = [], model(prompt)
    for _ in range(30):
        by_hand.append(output.logits[:, -1].argmax(-1, keepdim=True))
        output = model(by_hand[-1], state=output.state, sampled=True)
    assert torch.equal(generated[:, 60:], torch.cat(by_hand, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_without_a_memory_gets_an_empty_one(family, tmp_path):
    tiny_model(family).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **SIZES).count_memory
    fresh = counting_model(family, learned=b"").count_memory
    pairs = zip(loaded.named_buffers(), fresh.named_buffers(), strict=True)
    assert all(torch.equal(one, two) for (_, one), (_, two) in pairs)
