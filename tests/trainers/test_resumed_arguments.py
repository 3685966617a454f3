"""A changed argument acts on a resumed run, is refused, or is named as without effect."""

import dataclasses
import json

import pytest
from tiny_run import logged, tiny_trainer

from hf_recurrent import (
    DmtTrainingArguments,
    MultiStreamTrainingArguments,
    OnlineTrainingArguments,
    SmtTrainingArguments,
)
from hf_recurrent.checkpoints import resumed_arguments
from hf_recurrent.checkpoints.files import list_checkpoints
from hf_recurrent.checkpoints.resumed_arguments import (
    ARGUMENTS_FILE,
    FIXED,
    IGNORED,
    changed_arguments,
    check_changes,
    describe_changes,
)

FIELDS = sorted(field.name for field in dataclasses.fields(MultiStreamTrainingArguments) if field.init)


def test_the_tables_name_arguments_of_trainers():
    arguments = (OnlineTrainingArguments, SmtTrainingArguments, DmtTrainingArguments)
    known = {field.name for kind in arguments for field in dataclasses.fields(kind)}
    known |= {"group_by_length"}  # of older versions of transformers
    assert not FIXED & IGNORED and not (FIXED | IGNORED) - known


@pytest.fixture
def now(tmp_path):
    return MultiStreamTrainingArguments(str(tmp_path / "run"), use_cpu=True, report_to="none", max_steps=10)


@pytest.mark.parametrize("name", FIELDS)
def test_a_changed_argument_is_refused_or_named(name, now, tmp_path):
    values = resumed_arguments.shareable_arguments(now)
    if name not in values:
        pytest.skip("of this machine, and not in a checkpoint")
    before = "another value" if not isinstance(values[name], bool) else not values[name]
    (tmp_path / ARGUMENTS_FILE).write_text(json.dumps(values | {name: before}))
    changes = changed_arguments(tmp_path, now)
    assert changes == {name: (before, json.loads(json.dumps(values[name])))}
    if name in FIXED:
        with pytest.raises(ValueError, match=rf"^`{name}` is .*; a resumed run cannot change it. .*--model"):
            check_changes(tmp_path, changes)
        return
    check_changes(tmp_path, changes)
    words = describe_changes(changes, is_finished=False)
    if name in IGNORED:
        assert words == f"Without effect on a resumed run: `{name}`."
    else:
        assert words.startswith(f"The resumed run continues with `{name}` ")


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    trainer = tiny_trainer(tmp_path_factory.mktemp("started"), max_steps=6, save_steps=2)
    trainer.train()
    return trainer


def resumed(started, tmp_path, step=2, **arguments):
    trainer = tiny_trainer(tmp_path, **{"max_steps": 6, "save_steps": 2} | arguments)
    trainer.train(f"{started.args.output_dir}/checkpoint-{step}")
    return trainer


@pytest.mark.parametrize(
    ("arguments", "place", "expected"),
    [
        ({"adam_beta2": 0.5}, "betas", [0.9, 0.5]),
        ({"adam_epsilon": 1e-3}, "eps", 1e-3),
        ({"weight_decay": 0.7}, "weight_decay", 0.7),
    ],
)
def test_hyperparameters_of_the_optimizer_act(started, tmp_path, arguments, place, expected):
    first, second = resumed(started, tmp_path, **arguments).provenance.phases[0].segments
    assert (first.last_step, second.first_step) == (2, 2)
    assert second.rates[0].settings[place] == expected != first.rates[0].settings[place]


@pytest.mark.parametrize(
    "arguments",
    [{"lr_scheduler_type": "linear"}, {"warmup_steps": 4}, {"max_steps": 12}, {"learning_rate": 1.0}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_a_new_schedule_acts_at_its_step(started, tmp_path, arguments):
    trainer = resumed(started, tmp_path / "a", **arguments)
    whole = tiny_trainer(tmp_path / "b", **{"max_steps": 6, "save_steps": 2} | arguments)
    whole.train()
    after = trainer.provenance.phases[0].segments[-1]
    assert after.rates[0].last == whole.provenance.phases[0].segments[0].rates[0].last
    assert logged(trainer, "learning_rate")[3] == logged(whole, "learning_rate")[3]


def test_intervals_act(started, tmp_path):
    trainer = resumed(started, tmp_path, save_steps=1, logging_steps=1)
    assert len(list_checkpoints(tmp_path)) == 4
    steps = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert steps == [3, 4, 5, 6]


def test_a_schedule_with_a_past_of_its_own_cannot_change(tmp_path):
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2}
    started = tiny_trainer(tmp_path / "a", max_steps=4, save_steps=2, **options)
    started.train()
    with pytest.raises(ValueError, match="is 'reduce_lr_on_plateau', whose rates follow from its past"):
        resumed(started, tmp_path / "b", **options, learning_rate=1.0)


def test_the_same_arguments_are_one_segment(started, tmp_path):
    (segment,) = resumed(started, tmp_path).provenance.phases[0].segments
    assert (segment.first_step, segment.last_step, segment.resumed) == (0, 6, 1)
    whole = started.provenance.phases[0].segments[0]
    assert segment.rates == whole.rates and segment.read == whole.read


def test_the_best_model_has_the_record_of_its_own_step(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    # The best is the first: here, the higher loss is better.
    options |= {"metric_for_best_model": "loss", "greater_is_better": True}
    trainer = tiny_trainer(tmp_path, max_steps=6, save_steps=2, **options)
    trainer.train()
    best = trainer.state.best_global_step
    assert best == 2
    (phase,) = trainer.provenance.phases
    (result,) = trainer.provenance.current_results()
    assert phase.steps == result.step == best and trainer.provenance.gaps == []
    assert len(trainer.provenance.results) == 3
    found = trainer.evaluate()["eval_bits_per_byte"]
    assert result.metrics["bits_per_byte"] == pytest.approx(found)
