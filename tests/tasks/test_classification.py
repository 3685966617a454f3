"""Data sets with labels go into the stock Trainer with the classifiers of this package, as they are."""

import os
import struct

import numpy as np
import pytest
import torch
from torch.utils.data import Subset
from transformers import Trainer, TrainingArguments, set_seed

from hf_recurrent import (
    ByteTexts,
    FlipFlop,
    ListOps,
    MemoraConfig,
    MemoraForSequenceClassification,
    MgradeConfig,
    MgradeForCausalLM,
    MgradeForSequenceClassification,
    MultiStreamTrainer,
    MultiStreamTrainingArguments,
    collate_sequences,
    sequential_mnist,
)


def train(model, dataset, output_dir, **arguments):
    args = TrainingArguments(
        os.fspath(output_dir), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", **arguments
    )
    trainer = Trainer(
        model, args, train_dataset=dataset, eval_dataset=Subset(dataset, range(4)), data_collator=collate_sequences
    )
    trainer.train()
    return trainer


def test_list_ops_and_texts(tmp_path):
    set_seed(0)
    for dataset in (
        ListOps(16, min_length=4, max_length=20),
        ByteTexts([b"bad", b"really good", b"no", b"yes"], [0, 1, 0, 1], ["neg", "pos"]),
    ):
        config = MemoraConfig(
            vocab_size=dataset.vocab_size,
            hidden_size=8,
            state_size=8,
            num_hidden_layers=1,
            num_labels=dataset.num_labels,
        )
        trainer = train(MemoraForSequenceClassification(config), dataset, tmp_path, max_steps=2)
        assert 0 < trainer.evaluate()["eval_loss"] < 10


def test_pixels_as_real_values(tmp_path):
    """Dark and bright images are told apart after a few steps, so values and labels belong together."""
    labels = np.arange(32, dtype=np.uint8) % 2
    images = (np.random.default_rng(0).integers(0, 60, (32, 4, 4)) + 180 * labels[:, None, None]).astype(np.uint8)
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
        (tmp_path / f"train-{name}-ubyte").write_bytes(header + array.tobytes())
    set_seed(0)
    config = MgradeConfig(input_size=1, hidden_size=8, num_hidden_layers=1, num_labels=10)
    trainer = train(
        MgradeForSequenceClassification(config),
        sequential_mnist(tmp_path),
        tmp_path / "run",
        max_steps=40,
        learning_rate=2e-2,
        per_device_train_batch_size=16,
    )
    output = trainer.predict(sequential_mnist(tmp_path))
    assert (output.predictions.argmax(-1) == labels).mean() > 0.95


def test_mgrade_trains_on_a_task(tmp_path):
    set_seed(0)
    task = FlipFlop(length=16, num_validation_examples=8)
    model = MgradeForCausalLM(MgradeConfig(vocab_size=task.vocab_size, hidden_size=8, num_hidden_layers=1))
    args = MultiStreamTrainingArguments(
        os.fspath(tmp_path), max_steps=3, block_size=10, use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    trainer = MultiStreamTrainer(model, args, task, task)
    trainer.train()
    assert torch.isfinite(torch.tensor(trainer.evaluate()["eval_loss"]))


@pytest.mark.parametrize("name", ["input_ids", "input_values"])
def test_padding(name):
    shape = () if name == "input_ids" else (2,)
    items = [{name: torch.ones(size, *shape), "labels": size} for size in (3, 1)]
    batch = collate_sequences(items)
    assert batch[name].shape == (2, 3, *shape) and batch[name].sum() == 4 * max(1, *shape, 1)
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]] and batch["labels"].tolist() == [3, 1]
