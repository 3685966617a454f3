"""Models with tables and Muon: resuming, accumulation, processes and the guard are as for all other models."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from smt_cases import tiny_pair
from test_divergence_guard import Spoil, same, weights
from tiny_run import TABLE, Noise, logged, table_model, tiny_corpora, tiny_model, tiny_trainer

from hf_recurrent import SmtTrainer, SmtTrainingArguments
from hf_recurrent.learning_rules.joint_optimizer import JointOptimizer
from hf_recurrent.learning_rules.rules import NonFiniteLossError


def table_trainer(output_dir, **arguments):
    return tiny_trainer(output_dir, table_model(), matrix_optimizer="muon", **arguments)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    trainer = table_trainer(tmp_path_factory.mktemp("whole"), callbacks=[Noise()])
    trainer.train()
    return trainer


def optimizer_of(trainer):
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def test_each_kind_of_weight_has_its_optimizer(whole):
    names = {parameter: name for name, parameter in whole.model.named_parameters()}
    optimizer = optimizer_of(whole)
    assert isinstance(optimizer, JointOptimizer)
    found = {names[p]: group["optimizer"] for group in optimizer.param_groups for p in group["params"]}
    assert found.keys() == set(names.values())
    assert found[TABLE] == "RowwiseAdagrad"
    assert found["model.embed_tokens.weight"] == "AdamW"  # and the head, which is tied to it
    assert found["model.layers.0.recurrent_norm.weight"] == "AdamW"
    assert found["model.layers.1.mlp.down_proj.weight"] == "Muon"
    decays = {names[p] for group in optimizer.param_groups for p in group["params"] if group.get("weight_decay")}
    assert TABLE not in decays and "model.layers.1.mlp.down_proj.weight" in decays


def test_the_schedule_scales_all_rates(whole):
    rates = {group["optimizer"]: group["initial_lr"] for group in optimizer_of(whole).param_groups}
    assert rates == {"AdamW": 1e-2, "Muon": 0.02, "RowwiseAdagrad": 0.02}
    lasts = {group["lr"] / group["initial_lr"] for group in optimizer_of(whole).param_groups}
    assert max(lasts) - min(lasts) < 1e-12 and max(lasts) < 0.1  # the cosine's end
    (segment,) = whole.provenance.phases[0].segments
    assert segment.settings["optimizer"] == "AdamW, Muon, RowwiseAdagrad"
    assert {rate.settings["optimizer"]: rate.highest for rate in segment.rates}["RowwiseAdagrad"] == 0.02
    whole.create_model_card()
    card = Path(whole.args.output_dir, "README.md").read_text(encoding="utf-8")
    assert "AdamW, Muon, RowwiseAdagrad, β 0.9 and 0.95" in card and "; Muon 0 at first, " in card


def test_a_table_learns(whole):
    table = whole.model.get_parameter(TABLE)
    changed, has_gradient = table.abs().amax(1) > 0, optimizer_of(whole).state[table]["row_sums"] > 0
    assert 20 < changed.sum() <= has_gradient.sum() < len(table)
    assert not (changed & ~has_gradient).any()


def test_resume_is_bit_for_bit(whole, tmp_path):
    torch.manual_seed(5)
    trainer = table_trainer(tmp_path, callbacks=[Noise()])
    trainer.train(str(Path(whole.args.output_dir, "checkpoint-5")))
    assert logged(trainer) == logged(whole)
    assert same(weights(trainer), weights(whole))
    first, second = (
        load_file(Path(part.args.output_dir, "checkpoint-12", "optimizer.safetensors")) for part in (trainer, whole)
    )
    assert same(first, second)
    assert sum(name.endswith("row_sums") for name in first) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"matrix_optimizer": "adamw"}, "`matrix_optimizer` is 'adamw', but .* trained with 'muon'"),
        ({"matrix_optimizer": "sgd"}, "`matrix_optimizer` is 'sgd'; it must be one of adamw, muon"),
        ({"table_learning_rate": -1.0}, "`table_learning_rate` is -1.0"),
    ],
)
def test_bad_arguments(whole, tmp_path, arguments, words):
    with pytest.raises(ValueError, match=words):
        tiny_trainer(tmp_path, table_model(), **arguments).train(str(Path(whole.args.output_dir, "checkpoint-5")))


def test_a_resumed_run_takes_a_new_rate(whole, tmp_path):
    trainer = table_trainer(tmp_path, callbacks=[Noise()], table_learning_rate=0.5, weight_decay=0.0)
    trainer.train(str(Path(whole.args.output_dir, "checkpoint-5")))
    rates = {group["optimizer"]: group["initial_lr"] for group in optimizer_of(trainer).param_groups}
    assert rates == {"AdamW": 1e-2, "Muon": 0.02, "RowwiseAdagrad": 0.5}
    assert not any(group.get("weight_decay") for group in optimizer_of(trainer).param_groups)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "arguments",
    [
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"gradient_checkpointing": True},
        {"torch_compile": True, "torch_compile_backend": "eager"},
    ],
    ids=["accumulation", "checkpointing", "compiled"],
)
def test_other_ways_to_compute_a_step_train_the_same(tmp_path, arguments):
    plain = table_trainer(tmp_path / "plain")
    plain.train()
    trainer = table_trainer(tmp_path / "other", **arguments)
    trainer.train()
    assert logged(trainer) == pytest.approx(logged(plain), rel=1e-5)


def test_mixed_precision_trains(tmp_path):
    trainer = table_trainer(tmp_path, bf16=True)
    trainer.train()
    assert logged(trainer)[12] < logged(trainer)[3]


@pytest.mark.parametrize("online", [False, True], ids=["bptt", "online"])
@pytest.mark.parametrize("limit", [1.0, 0.0], ids=["clipped", "unclipped"])
def test_a_bad_gradient_of_a_table_stops_training(tmp_path, online, limit):
    spoil = Spoil(8, "gradient", parameter=TABLE)
    trainer = table_trainer(tmp_path, callbacks=[spoil], max_grad_norm=limit, online=online)
    with pytest.raises(NonFiniteLossError, match=f"in step 8: the gradient of `{TABLE}` is NaN or infinite"):
        trainer.train()
    assert same(weights(trainer), spoil.before)


def test_tables_are_not_part_of_the_norm(tmp_path):
    """At the first step the tables are zero, and the other gradients are as in a model without them."""
    plain = tiny_trainer(tmp_path / "plain", tiny_model(), max_steps=1, logging_steps=1, save_strategy="no")
    trainer = table_trainer(tmp_path / "tables", max_steps=1, logging_steps=1, save_strategy="no")
    for each in (plain, trainer):
        each.train()
    assert logged(trainer, "grad_norm") == pytest.approx(logged(plain, "grad_norm"))
    assert math.isfinite(logged(trainer)[1])


def test_rate_factors_have_groups_of_their_own(tmp_path):
    model = tiny_model("lru-tiny", ngram_orders=[2], ngram_rows=64)
    optimizer = tiny_trainer(tmp_path, model, matrix_optimizer="muon").create_optimizer()
    rates = {(group["optimizer"], group["lr"]) for group in optimizer.param_groups if group["params"]}
    assert rates == {("AdamW", 1e-2), ("AdamW", 0.5e-2), ("Muon", 0.02), ("RowwiseAdagrad", 0.02)}
    slow = next(group for group in optimizer.param_groups if group["lr"] == 0.5e-2)
    assert len(slow["params"]) == len(model.parameter_learning_rate_factors())


def test_memories_of_a_teacher_train_with_muon(tmp_path):
    student, teacher = tiny_pair(vocab_size=256)
    args = SmtTrainingArguments(
        output_dir=str(tmp_path), max_steps=4, block_size=16, context_length=8, future_length=4, use_cpu=True,
        per_device_train_batch_size=2, save_strategy="no", disable_tqdm=True, eval_windows=0, logging_steps=1,
        matrix_optimizer="muon",
    )  # fmt: skip
    trainer = SmtTrainer(student, teacher, args, *tiny_corpora())
    trainer.train()
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    groups = optimizer_of(trainer).param_groups
    matrices = {names[p] for group in groups if group["optimizer"] == "Muon" for p in group["params"]}
    assert any(name.startswith("teacher.") for name in matrices) and not any("head" in name for name in matrices)
    assert math.isfinite(logged(trainer)[4])


@pytest.fixture(scope="module")
def two(launch, tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    result = launch(directory, 4, 1, "--tables", processes=2)
    result.directory = directory
    return result


@pytest.mark.long
def test_two_processes_train_as_one(two, tmp_path):
    trainer = table_trainer(tmp_path / "one", per_device_train_batch_size=4, gradient_accumulation_steps=2)
    trainer.train()
    assert logged(trainer) == two.losses  # the same groups of streams, added up in the same order
    assert same(weights(trainer), two.weights)


@pytest.mark.long
def test_resume_of_two_processes(two, launch, tmp_path):
    again = launch(tmp_path / "two", 4, 1, "--tables", "--resume", two.directory / "checkpoint-5", processes=2)
    assert again.losses == two.losses and same(again.weights, two.weights)
    trainer = table_trainer(tmp_path / "one", per_device_train_batch_size=4, gradient_accumulation_steps=2)
    trainer.train(str(two.directory / "checkpoint-5"))
    assert logged(trainer) == two.losses and same(weights(trainer), two.weights)
