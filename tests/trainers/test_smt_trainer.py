"""SmtTrainer and DmtTrainer as a whole: what is trained, saved, resumed, measured and refused."""

import json
import logging
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from smt_cases import tiny_pair
from tiny_run import logged, tiny_corpora
from transformers import AutoModel, AutoModelForCausalLM

from hf_recurrent import (
    DmtTrainer,
    DmtTrainingArguments,
    MultiStreamTrainer,
    MultiStreamTrainingArguments,
    Retrieval,
    SmtTrainer,
    SmtTrainingArguments,
)
from hf_recurrent.trainers.smt.metrics import measure_memories

COMMON = {
    "max_steps": 6, "logging_steps": 2, "save_steps": 4, "learning_rate": 1e-2, "per_device_train_batch_size": 4,
    "context_length": 6, "eval_windows": 5, "eval_block_size": 32, "report_to": "none", "use_cpu": True,
    "disable_tqdm": True, "save_total_limit": None, "timesteps": 2,
}  # fmt: skip


def smt_trainer(directory, pair=None, corpora=None, **arguments):
    student, teacher = pair or tiny_pair(vocab_size=256)
    options = {"future_length": 4, "block_size": 12, **COMMON, **arguments}
    return SmtTrainer(student, teacher, SmtTrainingArguments(str(directory), **options), *(corpora or tiny_corpora()))


def dmt_trainer(directory, pair=None, corpora=None, **arguments):
    student, teacher = pair or tiny_pair(vocab_size=256)
    options = {"rollout_length": 5, **COMMON, **arguments}
    return DmtTrainer(student, teacher, DmtTrainingArguments(str(directory), **options), *(corpora or tiny_corpora()))


def copies(modules):
    return [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]


def changed(before, module):
    return {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}


def test_smt_trains_the_teacher_and_the_update_and_hands_over_the_readout(tmp_path):
    student, teacher = pair = tiny_pair(vocab_size=256)
    before = copies(pair)
    trainer = smt_trainer(tmp_path, pair)
    trainer.train()
    assert changed(before[1], teacher) == set(before[1])
    assert {name for name in before[0] if name.startswith("model.memory_update")} <= changed(before[0], student)
    assert all(parameter.requires_grad for parameter in [*student.parameters(), *teacher.parameters()])
    memory = teacher.encode(torch.arange(12).view(2, 6))
    torch.testing.assert_close(
        student.readout(memory), teacher.decode(memory, torch.arange(6).view(2, 3))[:, 0], atol=1e-6, rtol=1e-6
    )
    for name in ("decoder_loss", "dynamics_loss", "uniformity", "teacher_loss", "bits_per_byte", "bytes_per_second"):
        assert len(logged(trainer, name)) == 3
    bits, nats = (list(logged(trainer, name).values()) for name in ("bits_per_byte", "teacher_loss"))
    assert bits == pytest.approx([value / math.log(2) for value in nats], rel=1e-6)


@pytest.mark.parametrize("build", [smt_trainer, dmt_trainer])
def test_resume_is_bit_for_bit(tmp_path, build):
    options = {"logging_steps": 3, "gradient_accumulation_steps": 2}
    whole = build(tmp_path / "whole", **options)
    whole.train()
    torch.manual_seed(99)
    again = build(tmp_path / "again", **options)
    again.train(str(tmp_path / "whole" / "checkpoint-4"))
    for name in ("loss", "bits_per_byte", "grad_norm"):
        assert logged(again, name) == logged(whole, name)
    for folder in ("", "teacher"):
        path = Path("checkpoint-6", folder, "model.safetensors")
        first, second = (load_file(tmp_path / run / path) for run in ("whole", "again"))
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_without_its_teacher_is_incomplete(tmp_path):
    smt_trainer(tmp_path, max_steps=4).train()
    (tmp_path / "checkpoint-4" / "teacher" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"`teacher/model\.safetensors` is missing"):
        smt_trainer(tmp_path / "other").train(str(tmp_path / "checkpoint-4"))


def test_what_is_saved_loads_and_generates(tmp_path):
    trainer = smt_trainer(tmp_path, max_steps=2)
    trainer.train()
    trainer.save_model()
    student = AutoModelForCausalLM.from_pretrained(tmp_path)
    teacher = AutoModel.from_pretrained(tmp_path / "teacher")
    assert student.generate(torch.tensor([[70, 71]]), max_new_tokens=5, min_new_tokens=5).shape == (1, 7)
    memory = torch.randn(2, 3, 16)
    torch.testing.assert_close(student.readout(memory), teacher.decode(memory, torch.zeros(2, 1, dtype=int))[:, 0])


def test_accumulation_is_the_mean_of_its_parts(tmp_path):
    """Eight rows at once, and four twice: the same rows, anchors and cuts; uniformity alone compares within a part."""
    losses = [
        dynamics_losses(tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size)
        for size in (8, 4)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def dynamics_losses(directory, **options):
    trainer = smt_trainer(directory, decoder_weight=0, uniformity_weight=0, logging_steps=1, max_steps=3, **options)
    trainer.train()
    return logged(trainer, "dynamics_loss")


def test_tasks_are_read_example_by_example(tmp_path):
    task = Retrieval(length=10, vocab_size=8)
    student, teacher = tiny_pair(vocab_size=8)
    trainer = smt_trainer(tmp_path, (student, teacher), (task, task), block_size=None, timesteps=0, context_length=99)
    trainer.train()
    metrics = trainer.evaluate()
    assert {"eval_accuracy", "eval_drift", "eval_one_step_drift", "eval_teacher_accuracy"} <= set(metrics)
    assert trainer.args.block_size == 10


def test_a_perfect_student_has_no_drift():
    """The teacher is asked for contexts of one byte, which the student can be made to know."""
    student, teacher = tiny_pair(vocab_size=8)
    inputs = torch.randint(8, (6, 9), generator=torch.Generator().manual_seed(0))
    student.model.update = lambda memory, ids, *_: teacher.encode(ids.reshape(-1, 1)).view(*ids.shape, 3, 16)
    student.model.unroll = lambda memory, ids, *_: student.model.update(None, ids)
    student.load_readout(teacher)
    resets = torch.zeros_like(inputs, dtype=torch.bool)
    resets[:, 0] = True
    metrics = measure_memories(student, teacher, inputs, inputs.roll(-1, 1), resets, start=0, context_length=1)
    assert metrics["drift"] < 1e-9
    assert metrics["one_step_drift"] < 1e-9
    assert metrics["rollout_loss"] == pytest.approx(metrics["teacher_loss"], rel=1e-5)


@pytest.mark.long
def test_smt_learns_retrieval_and_dmt_lowers_the_drift(tmp_path):
    task = Retrieval(length=5, vocab_size=4, num_validation_examples=128)
    pair = tiny_pair(vocab_size=4)
    options = {
        "corpora": (task, task), "timesteps": 0, "per_device_train_batch_size": 16, "eval_windows": 128,
        "save_strategy": "no", "logging_steps": 50,
    }  # fmt: skip
    trainer = smt_trainer(tmp_path, pair, block_size=None, max_steps=200, **options)
    trainer.train()
    before = trainer.evaluate()
    assert before["eval_teacher_accuracy"] > 0.95
    trainer = dmt_trainer(tmp_path, pair, max_steps=80, **{**options, "learning_rate": 2e-3})
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_drift"] < before["eval_drift"]
    assert after["eval_accuracy"] > 0.9


def test_backpropagation_through_time_of_the_same_network(tmp_path):
    """The stream trainer carries the memory like any other state."""
    student, _ = tiny_pair(vocab_size=256)
    args = MultiStreamTrainingArguments(
        str(tmp_path), block_size=8, max_steps=4, learning_rate=1e-2, logging_steps=1, per_device_train_batch_size=4,
        report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", eval_block_size=32,
    )  # fmt: skip
    trainer = MultiStreamTrainer(student, args, *tiny_corpora())
    trainer.train()
    losses = list(logged(trainer).values())
    assert losses[-1] < losses[0]
    assert trainer.evaluate()["eval_bits_per_byte"] > 0


def test_gradient_checkpointing_and_bfloat16(tmp_path):
    plain = smt_trainer(tmp_path / "a", max_steps=2)
    plain.train()
    saving = smt_trainer(tmp_path / "b", max_steps=2, gradient_checkpointing=True)
    saving.train()
    assert logged(saving) == pytest.approx(logged(plain), rel=1e-6)
    rounded = smt_trainer(tmp_path / "c", max_steps=2, bf16=True)
    rounded.train()
    assert logged(rounded) == pytest.approx(logged(plain), rel=0.02)
    assert logged(rounded) != logged(plain)


def test_a_gru_is_warned_of(tmp_path, caplog):
    logging.getLogger("transformers").propagate = True
    logging.getLogger("hf_recurrent").propagate = True
    with caplog.at_level("WARNING"):
        smt_trainer(tmp_path, tiny_pair(vocab_size=256, backbone="gru", memory_norm=False))
    assert "collapse" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 9}, r"`block_size` is 9; it must be 10 or more \(`context_length` 6 \+ `future_length` 4\)"),
        ({"dynamics_weight": -0.1}, "`dynamics_weight` is -0.1; it must be 0 or more"),
        ({"per_device_train_batch_size": 1}, "uniformity compares sequences"),
        ({"regime": "multi_stream"}, "`regime` is 'multi_stream'; it must be iid"),
        ({"start_share": 1.5}, "`start_share` is 1.5"),
        ({"future_length": 0}, "`future_length` is 0"),
        ({"uniformity_over": "bytes"}, "must be one of tokens, states"),
    ],
)
def test_bad_arguments(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        smt_trainer(tmp_path, **arguments)


def test_models_that_do_not_match(tmp_path):
    student, _ = tiny_pair(vocab_size=256)
    _, teacher = tiny_pair(vocab_size=256, num_memory_tokens=4)
    for build in (smt_trainer, dmt_trainer):
        with pytest.raises(ValueError, match="`num_memory_tokens` is 3 and the teacher's"):
            build(tmp_path, (student, teacher))
    with pytest.raises(ValueError, match=r"`block_size` is 10; it must be 11 or more \(.*`rollout_length` 5\)"):
        dmt_trainer(tmp_path, block_size=10)


def test_training_arguments_are_written_as_json(tmp_path):
    smt_trainer(tmp_path, max_steps=4).train()
    stored = json.loads((tmp_path / "checkpoint-4" / "training_args.json").read_text())
    assert stored["future_length"] == 4
