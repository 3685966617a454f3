"""Rows: trackers that follow a run of ours, without a network, and read back what they stored."""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from client_rows import row
from tiny_checkpoints import tiny_model

from hf_recurrent import Corpus, MultiStreamTrainer, MultiStreamTrainingArguments

LOGGED = ("loss", "bits_per_byte", "grad_norm", "learning_rate", "bytes_per_second", "bytes_seen")


def train(folder: Path, tracker: str, **overrides) -> list[float]:
    """Four steps of our trainer with a tracker; returns the losses that it logged."""
    options = {"max_steps": 4, "logging_steps": 1, "block_size": 16, "per_device_train_batch_size": 2, "use_cpu": True}
    options |= {"report_to": tracker, "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-2} | overrides
    corpus = Corpus.from_documents([b"some text to read " * 20, b"and some more " * 20])
    trainer = MultiStreamTrainer(
        tiny_model(), MultiStreamTrainingArguments(str(folder), **options), train_corpus=corpus
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@contextmanager
def environment(**values: str):
    """Variables that a tracker reads when it is imported or begins."""
    assert "trackio" not in sys.modules, "trackio reads its folder when it is imported"
    with mock.patch.dict(os.environ, values):
        yield


@row("tensorboard", "`--report_to tensorboard`: losses, bits per byte, rates, read from the event file")
def tensorboard_run(folder):
    losses = train(folder, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = folder.rglob("events.out.tfevents.*")
    stored = EventAccumulator(str(events)).Reload()
    assert {f"train/{name}" for name in LOGGED} <= set(stored.Tags()["scalars"])
    values = [event.value for event in stored.Scalars("train/loss")]
    assert len(values) == len(losses) == 4
    assert all(abs(value - loss) < 1e-3 for value, loss in zip(values, losses, strict=True))


@row("trackio", "`--report_to trackio`: the same, from its local database")
def trackio_run(folder):
    with environment(TRACKIO_DIR=str(folder / "trackio")):
        losses = train(folder / "run", "trackio", project="ours", run_name="first")
        from trackio.sqlite_storage import SQLiteStorage

        rows = SQLiteStorage.get_logs("ours", SQLiteStorage.get_runs("ours")[0])
    values = [row["train/loss"] for row in rows if "train/loss" in row]
    assert values == losses and len(losses) == 4
    assert {f"train/{name}" for name in LOGGED} <= set().union(*rows)


@row("wandb", "`--report_to wandb`, offline: the same, from the file that `wandb sync` uploads")
def wandb_run(folder):
    folders = {"WANDB_DIR": str(folder), "WANDB_CACHE_DIR": str(folder), "WANDB_CONFIG_DIR": str(folder)}
    with environment(WANDB_MODE="offline", WANDB_SILENT="true", **folders):
        losses = train(folder / "run", "wandb", project="ours", run_name="first")
        import wandb

        wandb.finish()
        wandb.teardown()  # wait until wandb's own process has written the file
    (file,) = folder.rglob("run-*.wandb")
    stored = file.read_bytes()  # records with names and values as text
    assert all(f"train/{name}".encode() in stored for name in LOGGED)
    assert len(losses) == 4 and all(json.dumps(loss).encode() in stored for loss in losses)
