"""A rule over whole sequences in one pass is the rule byte by byte."""

import pytest
import torch
from model_cases import relative_difference, tiny_model
from transformers import AutoModelForSequenceClassification

from hf_recurrent import config_from_preset
from hf_recurrent.learning_rules.rules import build_learning_rule
from hf_recurrent.learning_rules.sequence_rules import SEQUENCE_RULES, SequenceRule
from hf_recurrent.modeling.block.recurrent_state import detach_state

CASES = [
    "memora+glru",
    "memora+complex_lru",
    "memora+qrnn",
    "memora+indrnn",
    "memora+sru",
    "memora+slstm",
    "memora+h3",
    "memora+mamba2",
    "lru",
    "memora+gru",
    "memora+dense_linear",
]


def batch():
    generator = torch.Generator().manual_seed(3)
    input_ids, labels = torch.randint(1, 64, (2, 3, 11), generator=generator)
    return input_ids, labels, torch.rand(3, 11, generator=generator) < 0.15


def model_of(case):
    return tiny_model(case, torch.float64, vocab_size=64, num_hidden_layers=3, tie_word_embeddings=False)


def gradients(model):
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def byte_by_byte(model, name):
    rule = build_learning_rule(name, model)
    state, carried = model.init_state(3), rule.init_carried(3)
    for part in zip(*(tensor.split(1, 1) for tensor in batch()), strict=True):
        state = detach_state(rule.learn(carried, state, *part, 33).state)
    return gradients(model)


def in_one_pass(model, name, **options):
    input_ids, labels, resets = batch()
    with SequenceRule(name, model).block():
        output = model(input_ids, shift_labels=labels, reset_mask=resets, num_items_in_batch=33, **options)
    output.loss.backward()
    return gradients(model), output


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name in SEQUENCE_RULES if name != "bptt"])
@pytest.mark.parametrize("case", CASES)
def test_one_pass_is_byte_by_byte(case, name):
    if name == "rtrl" and case in ("memora+gru", "memora+dense_linear"):
        pytest.skip("exact real-time recurrent learning needs channels that do not mix")
    model = model_of(case)
    plain = model(batch()[0], reset_mask=batch()[2])
    learned, output = in_one_pass(model, name)
    torch.testing.assert_close(output.logits, plain.logits, rtol=1e-12, atol=1e-12)
    expected = byte_by_byte(model, name)
    for parameter, gradient in expected.items():
        assert relative_difference(learned[parameter], gradient) < 1e-10, parameter
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_rules_differ_and_bptt_is_backpropagation():
    model = model_of("lru")
    found = {name: in_one_pass(model, name)[0] for name in SEQUENCE_RULES}
    input_ids, labels, resets = batch()
    model(input_ids, shift_labels=labels, reset_mask=resets, num_items_in_batch=33).loss.backward()
    for parameter, gradient in gradients(model).items():
        assert torch.equal(found["bptt"][parameter], gradient), parameter
    weights = "model.layers.0.recurrent_unit.input_projection.weight"
    for one, other in (("bptt", "rtrl"), ("rtrl", "truncated"), ("rtrl", "spatial")):
        assert relative_difference(found[one][weights], found[other][weights]) > 1e-3
    # Truncated and spatial differ in what decides how long a state is kept.
    weights = "model.layers.0.recurrent_unit.nu"
    assert found["truncated"][weights].any() and not found["spatial"][weights].any()
    weights = "model.layers.0.recurrent_unit.log_gamma"
    torch.testing.assert_close(found["snap1"][weights], found["rtrl"][weights])


@pytest.mark.parametrize("name", ["rtrl", "truncated"])
def test_padding_is_left_out(name):
    model = model_of("lru")
    input_ids, labels, _ = batch()
    mask = torch.ones_like(input_ids)
    mask[0, :4] = 0
    labels[0, :4] = -100

    def learned(rows, **options):
        with SequenceRule(name, model).block():
            output = model(input_ids[rows], shift_labels=labels[rows], num_items_in_batch=9, **options)
        output.loss.backward()
        return gradients(model)

    together = learned([0], attention_mask=mask[:1])
    with SequenceRule(name, model).block():
        model(input_ids[:1, 4:], shift_labels=labels[:1, 4:], num_items_in_batch=9).loss.backward()
    for parameter, gradient in gradients(model).items():
        assert relative_difference(together[parameter], gradient) < 1e-10, parameter


def test_what_cannot_be_had_is_refused():
    with pytest.raises(ValueError, match=r"'uoro'; it must be one of bptt, rtrl, snap1"):
        SequenceRule("uoro", model_of("lru"))
    with pytest.raises(ValueError, match=r"HawkForCausalLM that also has the state `layers.0.*'truncated'.*stride"):
        SequenceRule("truncated", tiny_model("hawk"))
    with pytest.raises(ValueError, match=r"is a GRU, whose recurrence mixes"):
        SequenceRule("rtrl", model_of("memora+gru"))
    assert isinstance(SequenceRule("bptt", tiny_model("hawk")), SequenceRule)


@pytest.mark.parametrize("name", SEQUENCE_RULES)
def test_classifiers_learn_from_the_losses_of_all_steps(name):
    """The last layer's gradient is exact with `rtrl`, with the other rules it is not; all rules train the head."""
    torch.manual_seed(0)
    config = config_from_preset("lru-imdb", hidden_size=8, state_size=8, num_hidden_layers=2)
    model = AutoModelForSequenceClassification.from_config(config).double()
    input_ids, _, _ = batch()
    learned = {}
    for rule in (name, "bptt"):
        with SequenceRule(rule, model).block():
            loss = model(input_ids, labels=torch.tensor([0, 1, 1])).loss
        loss.backward()
        learned[rule] = gradients(model)
    last = "model.layers.1.recurrent_unit.input_projection.weight"
    assert relative_difference(learned[name]["score.weight"], learned["bptt"]["score.weight"]) < 1e-10
    exact = relative_difference(learned[name][last], learned["bptt"][last]) < 1e-10
    assert exact == (name in ("bptt", "rtrl", "snap1"))
