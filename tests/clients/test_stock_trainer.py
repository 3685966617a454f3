"""transformers' own `Trainer` trains, evaluates and picks the best checkpoint of our models without `label_names`."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    EvalPrediction,
    Trainer,
    TrainingArguments,
)

from hf_recurrent import config_from_preset

FAMILIES = ["memora", "hawk", "mgrade", "lru", "smt-rnn"]
STEPS = 12


def config(family, **overrides):
    return config_from_preset(f"{family}-tiny", hidden_size=16, num_hidden_layers=1, **overrides)


def rows(count, label=None):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 5, (count, STEPS), generator=generator)
    return [{"input_ids": row, "labels": row if label is None else label} for row in ids]


def arguments(tmp_path, **overrides):
    options = {
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(str(tmp_path), **options | overrides)


def accuracy(prediction: EvalPrediction):
    logits, labels = prediction.predictions, prediction.label_ids
    if logits.ndim == 3:  # of a language model, whose labels are its inputs
        logits, labels = logits[:, :-1], labels[:, 1:]
    return {"accuracy": float(np.mean(logits.argmax(-1) == labels))}


@pytest.mark.parametrize("family", FAMILIES)
def test_language_models(family, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(family))
    trainer = Trainer(
        model, arguments(tmp_path), train_dataset=rows(16), eval_dataset=rows(6), compute_metrics=accuracy
    )
    assert trainer.label_names == ["labels"]
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    assert trainer.state.best_model_checkpoint is not None
    assert after["eval_accuracy"] == pytest.approx(trainer.state.best_metric)
    assert trainer.predict(rows(6)).predictions.shape == (6, STEPS, 256)


@pytest.mark.parametrize("family", FAMILIES)
def test_classifiers(family, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config(family, num_labels=3))
    data = [row | {"labels": torch.tensor(int(row["input_ids"][0]) % 3)} for row in rows(16)]
    trainer = Trainer(model, arguments(tmp_path), train_dataset=data, eval_dataset=data[:6], compute_metrics=accuracy)
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] == pytest.approx(trainer.state.best_metric)


def test_classifiers_accept_use_cache():
    model = AutoModelForSequenceClassification.from_config(config("hawk")).eval()
    ids = torch.ones(2, 3, dtype=torch.long)
    for use_cache in (False, True, None):
        assert torch.equal(model(ids, use_cache=use_cache).logits, model(ids).logits)
