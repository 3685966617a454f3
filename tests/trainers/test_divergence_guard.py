"""NaN and infinite losses, gradients and weights: nothing is trained on them, and none is saved or hidden."""

import json
import math
from pathlib import Path

import pytest
import torch
from smt_cases import tiny_pair
from tiny_run import logged, tiny_corpora, tiny_trainer
from transformers import TrainerCallback

from hf_recurrent import SmtTrainer, SmtTrainingArguments
from hf_recurrent.checkpoints.files import list_checkpoints
from hf_recurrent.learning_rules.rules import NonFiniteLossError

PARAMETER = "model.layers.1.mlp.down_proj.weight"


class Spoil(TrainerCallback):
    """Multiplies the loss, a gradient or a weight of step `step` by a factor, `times` times."""

    def __init__(self, step, kind="loss", factor=math.nan, times=1, parameter=PARAMETER):
        self.step, self.kind, self.factor, self.times, self.name = step, kind, factor, times, parameter
        self.weight, self.before = None, None

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step != self.step - 1 or not self.times:
            return
        self.times -= 1
        self.before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        weight = model.get_parameter(self.name)
        if self.kind == "loss":
            handle = model.register_forward_hook(lambda *arguments: spoil_loss(*arguments, self.factor, handle))
        elif self.kind == "gradient":
            handle = weight.register_hook(lambda gradient: (handle.remove(), gradient * self.factor)[1])
        else:
            self.weight = weight

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self.weight is not None:
            self.weight.data[0] *= self.factor
            self.weight = None


def spoil_loss(model, inputs, output, factor, handle):
    output.loss = output.loss * factor
    handle.remove()
    return output


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.trained_model.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def steps_of(directory):
    return [int(path.rpartition("-")[2]) for path in list_checkpoints(directory)]


@pytest.fixture(scope="module", params=[(False, 1.0), (True, 0.0)], ids=["bptt, clipped", "online, unclipped"])
def whole(request, tmp_path_factory):
    """An uninterrupted run, the kind of its trainer and the limit of its gradients."""
    online, limit = request.param
    trainer = tiny_trainer(tmp_path_factory.mktemp("whole"), online=online, max_grad_norm=limit)
    trainer.train()
    return trainer, online, limit


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "factor", "words"),
    [
        ("loss", math.nan, "in step 8: the loss is nan and the gradient of"),
        pytest.param("loss", math.inf, "in step 8: the loss is inf and the gradient of", marks=pytest.mark.long),
        ("gradient", math.nan, f"in step 8: the gradient of `{PARAMETER}` is NaN or infinite"),
        pytest.param(
            "gradient",
            math.inf,
            f"in step 8: the gradient of `{PARAMETER}` is NaN or infinite",
            marks=pytest.mark.long,
        ),
    ],
)
def test_training_stops_before_the_weights_change(whole, tmp_path, kind, factor, words):
    uninterrupted, online, limit = whole
    spoil = Spoil(8, kind, factor)
    trainer = tiny_trainer(tmp_path, callbacks=[spoil], online=online, max_grad_norm=limit)
    with pytest.raises(
        NonFiniteLossError, match=rf"{words}.*last good checkpoint is '.*checkpoint-5'.*`learning_rate`"
    ):
        trainer.train()
    assert same(weights(trainer), spoil.before)
    assert steps_of(tmp_path) == [5]
    assert all(math.isfinite(loss) for loss in logged(trainer).values())
    again = tiny_trainer(tmp_path, online=online, max_grad_norm=limit)
    again.train(True)
    assert same(weights(again), weights(uninterrupted))


def test_a_teacher_that_diverges_stops_training_on_memories(tmp_path):
    student, teacher = tiny_pair(vocab_size=256)
    args = SmtTrainingArguments(
        output_dir=str(tmp_path), max_steps=6, block_size=16, context_length=8, future_length=4, use_cpu=True,
        per_device_train_batch_size=2, save_steps=2, disable_tqdm=True, eval_windows=0,
    )  # fmt: skip
    spoil = Spoil(4, "gradient")
    trainer = SmtTrainer(student, teacher, args, *tiny_corpora(), callbacks=[spoil])
    spoil.name = next(name for name, _ in trainer.model.named_parameters() if name.startswith("teacher."))
    with pytest.raises(NonFiniteLossError, match=r"in step 4: the gradient of `teacher\."):
        trainer.train()


@pytest.mark.parametrize("last", [8, 10])
def test_bad_weights_are_never_saved_and_replace_no_good_ones(tmp_path, last):
    """A weight that an update has made infinite ends training at the next loss, or at the checkpoint before it."""
    trainer = tiny_trainer(tmp_path, callbacks=[Spoil(last, "weight", math.inf)], save_total_limit=1)
    with pytest.raises(NonFiniteLossError, match=r"diverged (in|at) step.*checkpoint-5"):
        trainer.train()
    assert steps_of(tmp_path) == [5]
    with pytest.raises(NonFiniteLossError, match=f"the weight `{PARAMETER}` is NaN or infinite"):
        trainer.save_model()
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.long), 2])
def test_rollback_continues_with_half_the_rate(tmp_path, kind, times):
    trainer = tiny_trainer(tmp_path, callbacks=[Spoil(8, kind, times=times)], on_divergence="rollback")
    trainer.train()
    assert trainer.state.global_step == 12
    factor = 0.5**times
    whole = tiny_trainer(tmp_path / "whole")
    whole.train()
    rates, expected = logged(trainer, "learning_rate"), logged(whole, "learning_rate")
    assert rates[3] == expected[3]
    assert [rates[step] for step in (9, 12)] == pytest.approx([factor * expected[step] for step in (9, 12)])
    assert logged(trainer, "loss").keys() == logged(whole, "loss").keys()
    # The rate is part of the checkpoints after it: resuming from one of them is the same run.
    again = tiny_trainer(tmp_path / "again", on_divergence="rollback")
    again.train(str(tmp_path / "checkpoint-10"))
    assert same(weights(again), weights(trainer))


def test_rollback_ends(tmp_path):
    trainer = tiny_trainer(tmp_path, callbacks=[Spoil(8, times=100)], on_divergence="rollback")
    with pytest.raises(NonFiniteLossError, match=r"diverged 6 times with ever smaller learning rates"):
        trainer.train()


def test_rollback_without_a_checkpoint_stops(tmp_path):
    trainer = tiny_trainer(tmp_path, callbacks=[Spoil(3)], on_divergence="rollback")
    with pytest.raises(NonFiniteLossError, match=r"in step 3.*no checkpoint before it.*`learning_rate`"):
        trainer.train()


def test_rollback_skips_a_damaged_checkpoint(tmp_path):
    class Damage(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6:
                path = Path(args.output_dir, "checkpoint-5", "model.safetensors")
                path.write_bytes(path.read_bytes()[:-1])

    callbacks = [Spoil(8), Damage()]
    trainer = tiny_trainer(tmp_path, callbacks=callbacks, on_divergence="rollback", save_steps=1)
    trainer.train()
    assert logged(trainer, "loss").keys() == {3, 6, 9, 12}


def test_the_log_never_shows_another_loss(tmp_path):
    trainer = tiny_trainer(tmp_path, callbacks=[Spoil(7)], logging_steps=1)
    with pytest.raises(NonFiniteLossError):
        trainer.train()
    assert sorted(logged(trainer)) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="`logging_nan_inf_filter` is True"):
        tiny_trainer(tmp_path / "b", logging_nan_inf_filter=True)
    with pytest.raises(ValueError, match="`on_divergence` is 'ignore'; it must be one of stop, rollback"):
        tiny_trainer(tmp_path / "b", on_divergence="ignore")


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(tmp_path, monkeypatch):
    from hf_recurrent.trainers import checkpointing

    trainer = tiny_trainer(tmp_path)
    written = []

    def write(*arguments, **fields):
        written.append(arguments)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        return original(*arguments, **fields)

    original = checkpointing.write_manifest
    monkeypatch.setattr(checkpointing, "write_manifest", write)
    with pytest.raises(OSError, match=r"checkpoint-10' cannot be written: No space left on device\. Earlier"):
        trainer.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-5"]


def test_checkpoints_hold_no_local_path(tmp_path):
    trainer = tiny_trainer(
        tmp_path, eval_strategy="steps", eval_steps=5, load_best_model_at_end=True, hub_token="hf_secret",
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint.startswith(str(tmp_path))
    for path in tmp_path.rglob("*.json"):
        text = path.read_text()
        assert str(tmp_path) not in text, path
        assert str(Path.home()) not in text, path
        assert "hf_secret" not in text, path
        json.loads(text)
    again = tiny_trainer(tmp_path, eval_strategy="steps", eval_steps=5, load_best_model_at_end=True)
    again.train(True)
    assert again.state.best_model_checkpoint == trainer.state.best_model_checkpoint
