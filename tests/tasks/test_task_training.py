"""Tasks in place of corpora: training, exact resume, evaluation, with and without a state to carry."""

import math
import os

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, set_seed

from hf_recurrent import (
    Copying,
    FlipFlop,
    MultiStreamTrainer,
    MultiStreamTrainingArguments,
    Parity,
    config_from_preset,
    evaluate_task,
)
from hf_recurrent.tasks.task import count_answers

TASK = FlipFlop(length=24, p_ignore=0.5, num_validation_examples=20)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_model(preset="memora-tiny", **overrides):
    set_seed(7)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
    if preset.startswith(("memora", "hawk")):
        sizes["state_size"] = 16
    return AutoModelForCausalLM.from_config(config_from_preset(preset, **sizes | overrides))


def tiny_trainer(output_dir, model=None, task=TASK, evaluated=TASK, **arguments):
    defaults = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 6,
        "block_size": 10,
        "eval_block_size": 7,
        "max_steps": 8,
        "learning_rate": 1e-2,
        "logging_steps": 3,
        "save_steps": 4,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = MultiStreamTrainingArguments(output_dir=os.fspath(output_dir), **defaults | arguments)
    return MultiStreamTrainer(model or tiny_model(), args, task, evaluated)


def logged(trainer, key="loss"):
    return {entry["step"]: entry[key] for entry in trainer.state.log_history if key in entry}


def assert_same_weights(first, second):
    first, second = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("preset", ["memora-tiny", "hawk-tiny"])
def test_resume_is_bit_for_bit(tmp_path, preset):
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    whole = tiny_trainer(tmp_path / "whole", tiny_model(preset), **options)
    whole.train()
    torch.manual_seed(99)
    resumed = tiny_trainer(tmp_path / "resumed", tiny_model(preset), **options)
    resumed.train(str(tmp_path / "whole" / "checkpoint-4"))
    assert_same_weights(whole, resumed)
    assert set(logged(whole)) == {3, 6}
    for key in ("loss", "accuracy", "state_resets"):
        assert logged(resumed, key) == logged(whole, key)


def test_accumulation_and_workers_change_nothing(tmp_path):
    whole = tiny_trainer(tmp_path / "a", save_strategy="no")
    whole.train()
    split = tiny_trainer(
        tmp_path / "b",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        dataloader_num_workers=2,
        save_strategy="no",
    )
    split.train()
    assert logged(split, "accuracy") == logged(whole, "accuracy")
    assert logged(split) == pytest.approx(logged(whole), rel=1e-5)


def test_the_logged_accuracy_is_that_of_the_answers(tmp_path):
    """One step, one log: recomputed from the first block and the model before it was trained."""
    trainer = tiny_trainer(tmp_path, max_steps=1, logging_steps=1, save_strategy="no", seed=3)
    batch = next(iter(trainer.get_train_dataloader()))
    labels = batch["shift_labels"]
    with torch.no_grad():
        logits = tiny_model()(batch["input_ids"], reset_mask=batch["reset_mask"]).logits
    asked = labels != -100
    expected = (logits.argmax(-1)[asked] == labels[asked]).float().mean().item()
    trainer.train()
    assert logged(trainer, "accuracy")[1] == pytest.approx(expected)


def test_training_on_another_task_is_not_resumed(tmp_path):
    tiny_trainer(tmp_path, max_steps=4).train()
    other = tiny_trainer(tmp_path / "other", task=FlipFlop(length=24, p_ignore=0.5, seed=1))
    with pytest.raises(ValueError, match="flip_flop"):
        other.train(str(tmp_path / "checkpoint-4"))


def test_evaluation_is_what_one_counts_by_hand(tmp_path):
    model = tiny_model()
    trainer = tiny_trainer(tmp_path, model)
    metrics = trainer.evaluate()
    inputs, targets = map(torch.from_numpy, TASK.examples(np.arange(20), "validation"))
    model.eval()
    nats = right = answers = exact = 0
    with torch.no_grad():
        for row in range(20):
            logits = model(inputs[row : row + 1]).logits[0].log_softmax(-1)
            places = (targets[row] >= 0).nonzero().flatten().tolist()
            hits = [int(logits[place].argmax()) == int(targets[row, place]) for place in places]
            nats -= sum(float(logits[place, targets[row, place]]) for place in places)
            right, answers, exact = right + sum(hits), answers + len(hits), exact + all(hits)
    assert metrics["eval_accuracy"] == pytest.approx(right / answers)
    assert metrics["eval_exact_match"] == pytest.approx(exact / 20)
    assert metrics["eval_loss"] == pytest.approx(nats / answers, rel=1e-5)
    assert (metrics["eval_num_examples"], metrics["eval_num_answers"]) == (20, answers)
    alone = evaluate_task(model, TASK, 20, batch_size=3)
    assert {name: alone[name] for name in ("accuracy", "exact_match")} == {
        name: metrics[f"eval_{name}"] for name in ("accuracy", "exact_match")
    }
    sparse = {"sparse": FlipFlop(length=24, p_ignore=0.9, num_validation_examples=5), "same": TASK}
    named = trainer.evaluate(sparse)
    assert named["eval_same_accuracy"] == metrics["eval_accuracy"] and named["eval_sparse_num_examples"] == 5


def test_shares_of_processes_add_up():
    model = tiny_model("hawk-tiny")
    whole = count_answers(model, TASK, np.arange(20), block_size=5)
    shares = [count_answers(model, TASK, np.arange(rank, 20, 3), batch_size=2) for rank in range(3)]
    shares.append(count_answers(model, TASK, np.arange(0)))
    for name, count in whole.items():
        assert sum(share[name] for share in shares) == pytest.approx(count, rel=1e-5)


def test_evaluation_leaves_training_untouched(tmp_path):
    first = tiny_trainer(tmp_path / "a", save_strategy="no")
    first.train()
    second = tiny_trainer(tmp_path / "b", save_strategy="no", eval_strategy="steps", eval_steps=2)
    second.train()
    assert_same_weights(first, second)
    assert len(logged(second, "eval_accuracy")) == 4 and second.model.training


@pytest.mark.parametrize("preset", ["llama-s0", "mamba2-s0"])
def test_stock_models_see_one_example_a_block(tmp_path, preset):
    overrides = {"mamba2-s0": {"hidden_size": 32, "num_heads": 2, "head_dim": 32}}.get(preset, {})
    task = Parity(length=6, num_validation_examples=16)
    model = tiny_model(preset, **overrides)
    trainer = tiny_trainer(tmp_path, model, task, task, block_size=6, save_strategy="no", max_steps=4)
    trainer.train()
    assert 0 <= logged(trainer, "accuracy")[3] <= 1
    assert trainer.evaluate()["eval_num_answers"] == 96
    if preset.startswith("mamba2"):  # carries its state, so that blocks may be shorter or longer
        tiny_trainer(tmp_path, model, task, task, save_strategy="no", max_steps=2).train()
        model = tiny_model("llama-s0")
    with pytest.raises(ValueError, match="`block_size` is 10, but the examples of 'parity' have 6 steps"):
        tiny_trainer(tmp_path, model, task, task)


def test_positions_of_a_stock_model(tmp_path):
    task = Parity(length=6)
    model = tiny_model("llama-s0", max_position_embeddings=8)
    tiny_trainer(tmp_path, model, task, task, block_size=6, eval_block_size=1024)
    with pytest.raises(ValueError, match="'parity' has examples of 9 steps; the model has 8 positions"):
        tiny_trainer(tmp_path, model, task, Parity(length=9), block_size=6)


def test_a_recurrent_model_without_its_state_needs_whole_examples(tmp_path):
    with pytest.raises(ValueError, match="must be equal where no state is carried"):
        tiny_trainer(tmp_path, regime="iid")
    tiny_trainer(tmp_path, regime="iid", block_size=24, max_steps=2, save_strategy="no").train()


def test_how_long_to_train(tmp_path):
    with pytest.raises(ValueError, match=r"'flip_flop' is endless; give `max_steps` or `train_bytes`"):
        tiny_trainer(tmp_path, max_steps=-1)
    by_bytes = tiny_trainer(tmp_path, max_steps=-1, train_bytes=100, save_strategy="no")
    by_bytes.train()
    assert by_bytes.state.global_step == math.ceil(100 / 40)
    finite = FlipFlop(length=24, num_examples=10)
    by_epochs = tiny_trainer(tmp_path, task=finite, max_steps=-1, num_train_epochs=2, save_strategy="no")
    by_epochs.train()
    assert by_epochs.state.global_step == 2 * 240 // 40 and by_epochs.state.epoch == 2


def test_a_vocabulary_that_is_too_small(tmp_path):
    task = Copying(num_symbols=20)
    with pytest.raises(ValueError, match=r"`train_corpus` 'copying' has 22 token ids, but .* only 8"):
        tiny_trainer(tmp_path, task=task)
    with pytest.raises(ValueError, match="`task` 'copying' has 22 token ids"):
        evaluate_task(tiny_model(), task)
    with pytest.raises(ValueError, match="`num_examples` is 0"):
        evaluate_task(tiny_model(), TASK, 0)


def test_a_short_task_is_learned(tmp_path):
    """Targets stand where the model predicts: the task is solved, and guessing gets a third."""
    task = Copying(num_tokens=2, delay=1, num_symbols=3, num_validation_examples=100)
    arguments = {"block_size": task.length, "max_steps": 200, "per_device_train_batch_size": 32}
    model = tiny_model(num_hidden_layers=2)
    trainer = tiny_trainer(tmp_path, model, task, task, **arguments, logging_steps=50, save_strategy="no")
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_accuracy"] > 0.95 and metrics["eval_exact_match"] > 0.9
    assert logged(trainer, "accuracy")[200] > 0.9 > logged(trainer, "accuracy")[50]
