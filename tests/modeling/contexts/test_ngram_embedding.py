"""Embeddings of hashed n-grams: the hash, the tables and their gradients. Exactness: `test_state_equivalence.py`."""

import re

import pytest
import torch
from model_cases import each_family, tiny_config, tiny_model
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_recurrent.modeling.contexts.ngram_embedding import (
    NGRAM_BASE,
    NGRAM_MODULUS,
    hashed_rows,
    ngram_rows,
    read_ngrams,
    table_parameters,
)


def rows_by_definition(ids: list[int], start: int, config) -> list[int]:
    """The rows at the last of `ids`, in an episode that began at `start`."""
    rows = []
    for number, order in enumerate(config.ngram_orders):
        total = 0
        for lag in range(order):
            position = len(ids) - 1 - lag
            byte = ids[position] + 1 if position >= start else 0
            total += pow(NGRAM_BASE, lag + 1, NGRAM_MODULUS) * byte
        rows.append(total % NGRAM_MODULUS % config.ngram_rows + number * config.ngram_rows)
    return rows


def test_rows_equal_the_definition():
    config = tiny_config("memora", ngram_orders=[2, 4, 7], ngram_rows=1 << 12)
    ids = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(0))
    resets = torch.zeros(2, 20, dtype=torch.bool)
    resets[0, 9] = resets[1, 0] = resets[1, 1] = True
    rows, recent = read_ngrams(config, ids, torch.zeros(2, 6), resets)
    for row in range(2):
        for step in range(20):
            start = max((t for t in range(step + 1) if resets[row, t]), default=0)
            assert rows[row, step].tolist() == rows_by_definition(ids[row, : step + 1].tolist(), start, config)
    assert torch.equal(recent, (ids[:, -6:] + 1).float())


def test_rows_are_spread_evenly():
    """Distinct n-grams collide as often as random rows do."""
    windows = torch.cartesian_prod(*[torch.arange(1, 97)] * 2)
    rows = 1 << 14
    used = len(hashed_rows(windows, [2], rows).unique())
    expected = rows * (1 - (1 - 1 / rows) ** len(windows))
    assert used > 0.95 * expected


def test_largest_ids_do_not_overflow():
    windows = torch.full((1, 32), float(2**24))
    expected = sum(pow(NGRAM_BASE, lag, NGRAM_MODULUS) * 2**24 for lag in range(1, 33)) % NGRAM_MODULUS % 2**20
    assert hashed_rows(windows, [32], 2**20).item() == expected


def test_any_number_in_a_state_selects_rows():
    windows = torch.tensor([[-1.0, -3e30, 5.0], [0.0, 0.0, 5.9], [torch.inf, 0.0, 5.0]])
    rows = hashed_rows(windows, [2, 3], 64)
    assert torch.equal(rows[0], rows[1])
    assert rows[:, 0].min() >= 0 and rows[:, 0].max() < 64 <= rows[:, 1].min() and rows[:, 1].max() < 128


def test_the_operator_is_the_function():
    windows = torch.randint(0, 257, (3, 4, 5)).float()
    arguments = (windows, [3, 5, 7, 11, 13], [2, 5], 64)
    assert torch.equal(torch.ops.hf_recurrent.ngram_rows(*arguments), ngram_rows(*arguments))
    torch.library.opcheck(torch.ops.hf_recurrent.ngram_rows.default, arguments)


@each_family
def test_a_new_model_starts_as_without(family):
    config = tiny_config(family, ngram_orders=[2, 3], ngram_rows=32, ngram_output=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(256, (2, 12))
    assert torch.equal(model(ids).logits, tiny_model(family)(ids).logits)
    assert table_parameters(model) == 2 * 2 * 32 * config.hidden_size
    assert model.num_parameters() - table_parameters(model) == tiny_model(family).num_parameters()
    assert table_parameters(tiny_model(family)) == 0
    assert {"model.embed_ngrams.weight", "model.output_ngrams.weight"} <= model.parameters_without_weight_decay()


@each_family
def test_gradients_are_sparse_in_training(family):
    model = tiny_model(f"{family}+ngrams", torch.float64)
    ids = torch.randint(256, (2, 12))
    model(ids, labels=ids).loss.backward()
    dense = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model.train()(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        found = parameter.grad
        assert found.is_sparse == ("ngrams" in name)
        torch.testing.assert_close(found.to_dense(), dense[name])
    assert len(model.model.embed_ngrams.weight.grad.coalesce().indices()[0]) <= ids.numel() * 3


def test_gradient_checkpointing_keeps_gradients():
    model = tiny_model("memora+ngrams").train()
    ids = torch.randint(256, (2, 12))
    model(ids, labels=ids).loss.backward()
    expected = model.model.embed_ngrams.weight.grad.to_dense()
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    torch.testing.assert_close(model.model.embed_ngrams.weight.grad.to_dense(), expected)


@each_family
def test_hidden_states_end_with_the_output(family):
    output = tiny_model(f"{family}+ngrams").model(torch.randint(256, (2, 5)), output_hidden_states=True)
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)


@each_family
@torch.no_grad()
def test_generation_continues_from_its_state(family):
    model = tiny_model(f"{family}+ngrams")
    prompt = torch.randint(1, 256, (2, 6))
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    generated = model.generate(prompt, **settings)
    whole = model(generated.sequences)
    assert torch.equal(whole.logits[:, 5:-1].argmax(-1), generated.sequences[:, 6:])
    assert torch.equal(generated.state["ngrams"], whole.state["ngrams"])


def test_a_classifier_has_them_too():
    config = tiny_config("memora", ngram_orders=[2], ngram_rows=32, ngram_output=True, num_labels=3)
    model = AutoModelForSequenceClassification.from_config(config)
    ids = torch.randint(256, (2, 6))
    before = model(ids).logits
    torch.nn.init.normal_(model.model.output_ngrams.weight)
    assert not torch.equal(model(ids).logits, before)


@each_family
def test_saved_and_loaded(family, tmp_path):
    model = tiny_model(f"{family}+ngrams")
    model.save_pretrained(tmp_path)
    ids = torch.randint(256, (1, 6))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.config.ngram_orders == [2, 3, 5]
    assert torch.equal(AutoModel.from_pretrained(tmp_path)(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_embedded_inputs_are_refused():
    model = tiny_model("memora+ngrams")
    with pytest.raises(ValueError, match="has n-grams, which need `input_ids`"):
        model(inputs_embeds=torch.randn(1, 4, 16))
    state = model.init_state(1)
    del state["ngrams"]
    with pytest.raises(ValueError, match="has no `ngrams`"):
        model(torch.ones(1, 4, dtype=torch.long), state=state)


WRONG = {
    "it must be integers from 2 to 32": {"ngram_orders": [1, 2]},
    "`ngram_orders` is [2, 33]": {"ngram_orders": [2, 33]},
    "`ngram_orders` is ['2']": {"ngram_orders": ["2"]},
    "`ngram_orders` is 3; it must be list": {"ngram_orders": 3},
    "ascending, each order once": {"ngram_orders": [3, 2]},
    "`ngram_rows` is 100; it must be a power of two": {"ngram_rows": 100},
    "`ngram_rows` is 0": {"ngram_rows": 0},
    "`ngram_orders` is empty": {"ngram_output": True},
    "must be below 2^24": {"ngram_orders": [2], "vocab_size": 2**24},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_fields_are_named(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_config("memora", **WRONG[message])


def test_real_values_have_no_ngrams():
    with pytest.raises(ValueError, match="real values have no n-grams"):
        tiny_config("lru", ngram_orders=[2], input_size=3)


@pytest.mark.long
def test_compiled_by_torch():
    model = tiny_model("memora+ngrams").train()
    ids = torch.randint(256, (2, 12))
    expected = model(ids, labels=ids).loss
    compiled = torch.compile(model, backend="aot_eager", fullgraph=False)
    loss = compiled(ids, labels=ids).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert model.model.embed_ngrams.weight.grad is not None


def test_smt_updates_read_ngrams():
    """The memories of `forward` are those of updates with the last bytes, one by one and unrolled."""
    model = tiny_model("smt-rnn+ngrams", torch.float64)
    ids = torch.randint(256, (2, 8))
    resets = torch.zeros(2, 8, dtype=torch.bool)
    resets[1, 5] = True
    states, memories = [model.init_state(2)], []
    for step in range(8):
        states.append(model(ids[:, step : step + 1], state=states[-1], reset_mask=resets[:, step : step + 1]).state)
        before = {name: part.clone() for name, part in states[-2].items()}
        for part in before.values():
            part[resets[:, step]] = 0
        memories.append(model.update(before["memory"], ids[:, step], before["ngrams"]))
    expected = torch.stack([state["memory"] for state in states[1:]], 1)
    torch.testing.assert_close(torch.stack(memories, 1), expected)
    memory, ngrams = states[3]["memory"], states[3]["ngrams"]
    unrolled = model.unroll(memory, ids[:, 3:], resets[:, 3:], ngrams)
    torch.testing.assert_close(unrolled, expected[:, 3:])
    with pytest.raises(ValueError, match=re.escape("`state['ngrams']` has shape (2, 3)")):
        model.unroll(memory, ids[:, 3:], None, torch.zeros(2, 3))
