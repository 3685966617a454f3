"""A source of one's own, as in docs/tasks/extend.md: trained, resumed, evaluated and reported like a corpus."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, set_seed

from hf_recurrent import (
    Block,
    BlockDataset,
    Corpus,
    DmtTrainer,
    DmtTrainingArguments,
    EpisodeSource,
    FlipFlop,
    MultiStreamTrainer,
    MultiStreamTrainingArguments,
    OnlineTrainer,
    OnlineTrainingArguments,
    SmtRnnForCausalLM,
    SmtTeacherModel,
    SmtTrainer,
    SmtTrainingArguments,
    config_from_preset,
)


class SensorBlocks(BlockDataset):
    """Blocks of a sensor's readings; stream k reads channel k."""

    def group_reader(self, group):
        return SensorReader(self, group)


class SensorReader:
    def __init__(self, blocks, group):
        self.sensor, self.block_size = blocks.corpus, blocks.block_size
        self.channels, self.begin = blocks.stream_groups[group], blocks.group_positions[group][:, 1]

    def block(self, index):
        time = (self.begin + index * self.block_size)[:, None] + np.arange(self.block_size + 1)
        readings = self.sensor.readings(self.channels[:, None], time)
        positions = np.stack([np.zeros_like(time[:, -1]), time[:, -1]], axis=1)
        resets = time[:, :-1] == 0
        return Block(readings[:, :-1], readings[:, 1:], resets, np.ones_like(resets), positions)


class Sensor(EpisodeSource):
    """An endless series of 6-bit readings a channel."""

    name, fingerprint, vocab_size, tokens_per_epoch, unit = "sensor", "sensor, version 1", 64, math.inf, "symbol"

    def readings(self, channel, time):
        return np.round(31.5 + 31.5 * np.sin(0.3 * time + channel)).astype(np.int64)

    def blocks(self, *arguments, regime="multi_stream", **options):
        return SensorBlocks(self, *arguments, **options)

    def evaluate(self, model, share):
        nats, count = 0.0, 0
        for channel in range(1000 + share.index, 1004, share.count):
            series = torch.from_numpy(self.readings(channel, np.arange(65)))[None]
            with torch.no_grad():
                logits = model(series[:, :-1]).logits
            nats += torch.nn.functional.cross_entropy(logits[0], series[0, 1:], reduction="sum").item()
            count += 64
        return {"nats": nats, "count": count}

    def evaluation_metrics(self, sums):
        return {"loss": sums["nats"] / sums["count"]}


def arguments(directory, kind=MultiStreamTrainingArguments, **options):
    defaults = {
        "per_device_train_batch_size": 4,
        "block_size": 8,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_steps": 3,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return kind(str(directory), **defaults | options)


def tiny_model():
    set_seed(0)
    config = config_from_preset("memora-tiny", vocab_size=64, hidden_size=16, state_size=16, num_hidden_layers=1)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("trainer_class", "arguments_class"),
    [(MultiStreamTrainer, MultiStreamTrainingArguments), (OnlineTrainer, OnlineTrainingArguments)],
)
def test_a_sensor_trains_resumes_and_is_evaluated(tmp_path, trainer_class, arguments_class):
    def trainer(directory):
        args = arguments(tmp_path / directory, arguments_class)
        return trainer_class(tiny_model(), args, Sensor(), Sensor())

    whole = trainer("whole")
    before = whole.evaluate()["eval_loss"]
    whole.train()
    assert whole.evaluate()["eval_loss"] < before
    resumed = trainer("resumed")
    resumed.train(str(tmp_path / "whole" / "checkpoint-3"))
    ours, theirs = (t.model.state_dict() for t in (resumed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_sensor_trains_memories(tmp_path):
    set_seed(0)
    rnn = SmtRnnForCausalLM(config_from_preset("smt-rnn-tiny", vocab_size=64))
    teacher = SmtTeacherModel(config_from_preset("smt-teacher-tiny", vocab_size=64))
    shared = {"context_length": 4, "eval_windows": 4, "save_strategy": "no", "max_steps": 2, "block_size": 12}
    args = arguments(tmp_path, SmtTrainingArguments, future_length=4, **shared)
    SmtTrainer(rnn, teacher, args, Sensor(), Sensor()).train()
    args = arguments(tmp_path, DmtTrainingArguments, rollout_length=4, **shared)
    trainer = DmtTrainer(rnn, teacher, args, Sensor(), Sensor())
    trainer.train()
    assert {"eval_loss", "eval_drift", "eval_teacher_loss"} <= trainer.evaluate().keys()


def test_defaults_name_the_problem(tmp_path):
    with pytest.raises(ValueError, match="`train_corpus` 'sensor' is endless; give `max_steps` or `train_bytes`"):
        MultiStreamTrainer(tiny_model(), arguments(tmp_path, max_steps=-1), Sensor())
    small = AutoModelForCausalLM.from_config(config_from_preset("memora-tiny", vocab_size=8))
    with pytest.raises(ValueError, match=r"`train_corpus` 'sensor' has 64 token ids, but .* only 8"):
        MultiStreamTrainer(small, arguments(tmp_path), Sensor())
    with pytest.raises(TypeError, match="abstract"):
        type("Unfinished", (EpisodeSource,), {})()
    assert Sensor().describe() == "endless symbols"


def test_the_arguments_of_a_caller_stay_as_they_are(tmp_path):
    task = FlipFlop(length=10)
    rnn = SmtRnnForCausalLM(config_from_preset("smt-rnn-tiny", vocab_size=task.vocab_size))
    teacher = SmtTeacherModel(config_from_preset("smt-teacher-tiny", vocab_size=task.vocab_size))
    args = arguments(tmp_path, SmtTrainingArguments, context_length=4, future_length=4, block_size=None)
    before = args.to_dict()
    trainer = SmtTrainer(rnn, teacher, args, task, task)
    assert args.to_dict() == before and trainer.args.block_size == 10


@pytest.mark.parametrize("source", [Corpus.from_documents([b"abc", b"de"]), FlipFlop(length=4), Sensor()])
def test_held_out_blocks_are_the_same_at_every_call(source):
    first, second = (source.held_out_blocks(3, 4) for _ in range(2))
    assert first.keys() == {"input_ids", "shift_labels", "reset_mask"}
    assert all(torch.equal(first[name], second[name]) and first[name].shape == (3, 4) for name in first)
