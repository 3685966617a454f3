"""Classifiers of every family: pooling, padding, loss, saving, training."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hf_recurrent import RecurrentSequenceClassifierOutput, config_from_preset

CLASSES, STEPS = 5, 14
# Family → sizes of a tiny model.
FAMILIES = {
    "memora": {"hidden_size": 16, "state_size": 24},
    "hawk": {"hidden_size": 16, "state_size": 24},
    "mgrade": {"hidden_size": 16},
    "lru": {"hidden_size": 16, "state_size": 24},
    "smt-rnn": {"hidden_size": 16},
}
each_family = pytest.mark.parametrize("family", FAMILIES)
each_pooling = pytest.mark.parametrize("pooling", ["mean", "last"])


def classifier(family: str, pooling: str = "mean", dtype: torch.dtype = torch.float64, **overrides):
    torch.manual_seed(0)
    config = config_from_preset(f"{family}-tiny", **FAMILIES[family], num_hidden_layers=2)
    config.num_labels, config.pooling = CLASSES, pooling
    for name, value in overrides.items():
        setattr(config, name, value)
    return AutoModelForSequenceClassification.from_config(config).to(dtype).eval()


def batch(rows: int = 3):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 256, (rows, STEPS), generator=generator)
    return ids, torch.randint(0, CLASSES, (rows,), generator=generator)


@each_family
@each_pooling
def test_logits_and_loss_are_those_of_the_pooled_outputs(family, pooling):
    model = classifier(family, pooling)
    ids, labels = batch()
    output = model(ids, labels=labels, output_hidden_states=True)
    assert isinstance(output, RecurrentSequenceClassifierOutput)
    hidden = model.model(ids).last_hidden_state
    assert torch.equal(output.hidden_states[-1], hidden)
    pooled = sum(hidden[:, t] for t in range(STEPS)) / STEPS if pooling == "mean" else hidden[:, -1]
    logits = pooled @ model.score.weight.T
    torch.testing.assert_close(output.logits, logits)
    expected = -sum(torch.log_softmax(logits[row], -1)[labels[row]] for row in range(3)) / 3
    torch.testing.assert_close(output.loss, expected)
    summed = model(ids, labels=labels, num_items_in_batch=torch.tensor(6)).loss
    torch.testing.assert_close(summed, expected / 2)
    plain = model(ids, labels=labels, return_dict=False)
    assert torch.equal(plain[0], output.loss)
    assert torch.equal(plain[1], output.logits)


@each_family
@each_pooling
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_each_alone(family, pooling, side):
    model = classifier(family, pooling)
    ids, _ = batch()
    mask = torch.zeros(3, STEPS, dtype=torch.long)
    for row, length in enumerate((1, 6, STEPS)):
        mask[row, slice(STEPS - length, None) if side == "left" else slice(0, length)] = 1
    together = model(ids, attention_mask=mask).logits
    for row in range(3):
        alone = model(ids[row : row + 1, mask[row].bool()]).logits[0]
        torch.testing.assert_close(together[row], alone, rtol=1e-10, atol=1e-10)


@each_family
def test_save_and_load(family, tmp_path):
    model = classifier(family, "last", torch.float32)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(loaded).__name__ == f"{family.title().replace('-', '')}ForSequenceClassification"
    assert loaded.config.pooling == "last"
    assert loaded.config.num_labels == CLASSES
    assert torch.equal(loaded(batch()[0]).logits, model(batch()[0]).logits)


@each_family
def test_learns_the_classes_of_a_batch(family):
    model = classifier(family, dtype=torch.float32).train()
    ids, labels = batch(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        output = model(ids, labels=labels)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        if learned := bool((output.logits.argmax(-1) == labels).all()):
            break
    assert learned


def test_bfloat16_pools_in_float32():
    model = classifier("mgrade", dtype=torch.float32)
    exact = model(batch()[0]).logits
    model = model.to(torch.bfloat16)
    output = model(batch()[0], labels=batch()[1])
    assert output.logits.dtype == torch.bfloat16
    assert output.loss.dtype == torch.float32
    assert (output.logits.float() - exact).abs().max() < 0.1 * exact.abs().max()


def test_regression_and_several_labels_as_in_transformers():
    ids, _ = batch()
    targets = torch.rand(3, CLASSES, dtype=torch.float64)
    model = classifier("mgrade", problem_type="regression")
    output = model(ids, labels=targets)
    torch.testing.assert_close(output.loss, ((output.logits - targets) ** 2).mean())
    model = classifier("mgrade", problem_type="multi_label_classification")
    output = model(ids, labels=targets.round())
    expected = torch.nn.functional.binary_cross_entropy_with_logits(output.logits, targets.round())
    torch.testing.assert_close(output.loss, expected)


def test_bad_input_is_named():
    ids, _ = batch()
    model = classifier("memora")
    mask = torch.ones(3, STEPS)
    mask[1] = 0
    with pytest.raises(ValueError, match="masks all of row 1"):
        model(ids, attention_mask=mask)
    with pytest.raises(ValueError, match="`attention_mask` has shape"):
        model(ids, attention_mask=mask[:2])
    with pytest.raises(ValueError, match="`pooling` is 'max'"):
        config_from_preset("hawk-tiny", pooling="max")
