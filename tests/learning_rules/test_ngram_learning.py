"""Learning with hashed n-grams: rules, compiled blocks and readings, the learner and its files."""

import pytest
import torch
from model_cases import tiny_model

from hf_recurrent import AdaptiveSettings, OnlineLearner, SequenceRule, compress, decompress
from hf_recurrent.learning_rules.rules import build_learning_rule

TEXT = bytes(range(65, 91)) * 3 + b"\0" + b"abcabc" * 6
TABLES = ("model.embed_ngrams.weight", "model.output_ngrams.weight")
RULES = {"rtrl": "memora+ngrams", "snap1": "memora+gru+ngrams", "truncated": "hawk+ngrams", "spatial": "memora+ngrams"}


def learner(rule="rtrl", plain=False, **settings):
    model = tiny_model(RULES[rule])
    made = OnlineLearner(model, rule=rule, learning_rate=1e-3, table_learning_rate=0.05, **settings)
    if plain:
        made.learn_in_plain_torch()
    return made


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stride", [1, 4])
def test_the_compiled_block_learns_what_plain_torch_learns(rule, stride):
    pytest.importorskip("hf_recurrent.kernels.block_cpu")
    compiled, plain = (learner(rule, plain=plain, stride=stride, update_every=2) for plain in (False, True))
    start = {name: weight.detach().clone() for name, weight in compiled.model.named_parameters()}
    first, second = compiled.read(TEXT), plain.read(TEXT)
    assert compiled.slow_because is None
    assert first.bits_per_byte == pytest.approx(second.bits_per_byte, rel=1e-4)
    for (name, weight), other in zip(compiled.model.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=2e-3, atol=2e-4, msg=name)
        assert not torch.equal(weight, start[name]) or "bias" in name, name


def test_only_read_rows_change():
    made = learner()
    before = made.model.model.embed_ngrams.weight.detach().clone()
    made.read(b"ab")
    made.read(b"c")
    changed = (made.model.model.embed_ngrams.weight != before).any(1).sum()
    assert 0 < changed <= 2 * 3  # the last byte waits for its successor


@pytest.mark.parametrize("plain", [False, True])
def test_a_saved_learner_continues_bit_for_bit(tmp_path, plain):
    whole, half = (learner(stride=2, update_every=3, plain=plain) for _ in range(2))
    whole.read(TEXT)
    half.read(TEXT[:47])
    half.save(tmp_path)
    loaded = OnlineLearner.load(tmp_path)
    if plain:
        loaded.learn_in_plain_torch()
    loaded.read(TEXT[47:])
    assert loaded.updates == whole.updates
    for (name, weight), other in zip(loaded.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(weight, other), name


def test_a_reading_computes_the_step():
    pytest.importorskip("hf_recurrent.kernels.block_cpu")
    from hf_recurrent.learning_rules.compiled_program import CompiledReading

    model = tiny_model("memora+ngrams")
    reading, ids = CompiledReading(model), torch.randint(256, (1, 9))
    for token in ids[0].tolist():
        reading.read(token)
    expected = model(ids)
    torch.testing.assert_close(reading.logits[0], expected.logits[0, -1], rtol=1e-4, atol=1e-4)
    assert torch.equal(reading.state["ngrams"], expected.state["ngrams"])


def test_tables_get_the_gradient_of_the_embedded_inputs():
    """With real-time recurrent learning, as the embedding: the gradient inside the block."""
    model = tiny_model("memora+ngrams", torch.float64)
    rule = build_learning_rule("rtrl", model)
    ids, labels = torch.randint(256, (2, 2, 5))
    rule.learn(rule.init_carried(2), model.init_state(2), ids, labels, None, 10)
    found = {name: model.get_parameter(name).grad.clone() for name in TABLES}
    model.zero_grad()
    model(ids, shift_labels=labels, num_items_in_batch=10).loss.backward()
    for name in TABLES:
        torch.testing.assert_close(found[name], model.get_parameter(name).grad)


def test_sequence_rules_accept_ngrams():
    model = tiny_model("memora+ngrams", torch.float64)
    ids = torch.randint(256, (2, 6))
    with SequenceRule("rtrl", model).block():
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert model.model.embed_ngrams.weight.grad.any()


def test_a_gradient_that_is_not_finite_changes_nothing():
    made = learner(plain=True)
    made.read(b"abc")
    table = made.model.model.embed_ngrams.weight
    before = table.detach().clone()
    table.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(ValueError, match="nothing was learned"):
        made.read(b"d")
    assert torch.equal(table, before)


@pytest.mark.long
@pytest.mark.parametrize("compiled", [True, False])
def test_compression_learns_tables(compiled):
    if compiled:
        pytest.importorskip("hf_recurrent.kernels.block_cpu")
    model, data = tiny_model("memora+ngrams"), b"abc def " * 20
    before = model.model.embed_ngrams.weight.detach().clone()
    archive = compress(data, model, adaptive=AdaptiveSettings(stride=4, compiled=compiled))
    assert not torch.equal(model.model.embed_ngrams.weight, before)
    assert decompress(archive, tiny_model("memora+ngrams")) == data
