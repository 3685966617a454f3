"""Models, data and training shared by the experiments' rows."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_recurrent import (
    Corpus,
    EpisodeSource,
    MultiStreamTrainer,
    MultiStreamTrainingArguments,
    Task,
    config_from_preset,
    evaluate_bits_per_byte,
    load_corpus,
)
from papers.engine.durations import short_trainings
from papers.engine.experiment import Settings
from papers.engine.row_checkpoints import TimedCheckpoints, current_checkpoints

# Fields of `TrainingArguments`, as a row's `arguments`.
CONSTANT_RATE: Settings = {"lr_scheduler_type": "constant", "warmup_steps": 0}
# The papers' text, for [`split_corpus`].
TINY_STORIES: Settings = {
    "corpus": "hub:roneneldan/TinyStories", "held_out_split": "validation", "eval_bytes": 10_000_000
}  # fmt: skip


@contextmanager
def measured_run(earlier: float = 0.0) -> Iterator[dict[str, Any]]:
    """A record that gets the device, and at the end of the block its `seconds`, with an `earlier` part's."""
    record: dict[str, Any] = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"}
    start = time.perf_counter() - earlier
    yield record
    record["seconds"] = round(time.perf_counter() - start, 2)


def new_model(auto_class: Any, config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A new model of a configuration by one of transformers' Auto classes, initialised with the seed."""
    set_seed(seed)
    return auto_class.from_config(config)


def build_model(preset: str, vocab_size: int, seed: int, **overrides: Any) -> PreTrainedModel:
    """A new language model of a preset's sizes, initialised with the seed."""
    return new_model(AutoModelForCausalLM, config_from_preset(preset, vocab_size=vocab_size, **overrides), seed)


def new_classifier(settings: Settings) -> PreTrainedModel:
    """A new sequence classifier by a row's `preset`, `options` and `seed`."""
    config = config_from_preset(settings["preset"], **settings["options"])
    return new_model(AutoModelForSequenceClassification, config, settings["seed"])


def split_corpus(settings: Settings) -> tuple[Corpus, Corpus]:
    """Training and held-out text by a row's `corpus` and `eval_bytes`, cut to `episode_bytes` where it has them.

    The held-out text of a Hub dataset is its split `held_out_split`, if the row has one; else a part of the documents.
    In tuning, it is a part of the training text.
    """
    source, own_split = settings["corpus"], settings.get("held_out_split")
    if own_split and source.startswith("hub:"):
        corpus, held_out = load_corpus(source), load_corpus(source, split=own_split)
    else:
        corpus, held_out = load_corpus(source).split()
    if settings.get("is_tuning"):
        corpus, held_out = corpus.split()
    if settings.get("episode_bytes"):
        corpus, held_out = (cut_documents(part, settings["episode_bytes"]) for part in (corpus, held_out))
    return corpus, held_out.limit(settings["eval_bytes"])


def steps_of(settings: Settings, corpus: Corpus, step_bytes: int) -> int:
    """Optimizer steps by a row's `steps`, its `bytes`, or its `epochs` of a corpus, at `step_bytes` bytes each."""
    if "steps" in settings:
        return settings["steps"]
    num_bytes = settings["bytes"] if "bytes" in settings else settings["epochs"] * corpus.num_bytes
    return max(int(num_bytes // step_bytes), 1)


def cut_documents(corpus: Corpus, num_bytes: int) -> Corpus:
    """Excerpts of `num_bytes` bytes, each an episode."""
    return Corpus.from_documents(
        document[start : start + num_bytes].tobytes()
        for document in corpus
        for start in range(0, len(document), num_bytes)
    )


def train(
    model: PreTrainedModel,
    data: EpisodeSource,
    settings: Settings,
    held_out: EpisodeSource | None = None,
    trainer: Any = MultiStreamTrainer,
    arguments_class: type[MultiStreamTrainingArguments] = MultiStreamTrainingArguments,
    **arguments: Any,
) -> dict[str, Any]:
    """Train by a row's `learning_rate`, `seed` and `arguments`, which are other fields of `arguments_class`; see
    [`run_trainer`] for the rest. `held_out` is evaluated if the arguments ask for it."""
    return run_trainer(
        lambda args: trainer(model, args, train_corpus=data, eval_corpus=held_out),
        arguments_class,
        learning_rate=settings["learning_rate"],
        seed=settings["seed"],
        **arguments,
        **settings.get("arguments", {}),
    )


def train_in_streams(
    preset: str,
    fields: Settings,
    settings: Settings,
    block_size: int,
    *trainer: Any,
    evaluate: Callable[[PreTrainedModel, Corpus], Any] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Train a new model of a preset on a row's `corpus`, in its `streams`; `trainer` and `arguments` as for [`train`].

    Returns:
        The results of [`train`], the `bytes` read, and as `value` the result of `evaluate` on held-out text: by
        default its bits per byte.
    """
    corpus, held_out = split_corpus(settings)
    model = build_model(preset, corpus.vocab_size, settings["seed"], **fields)
    step_bytes = settings["streams"] * block_size * arguments.get("gradient_accumulation_steps", 1)
    steps = steps_of(settings, corpus, step_bytes)
    sizes = {"per_device_train_batch_size": settings["streams"], "block_size": block_size}
    results = train(model, corpus, settings, None, *trainer, steps=steps, **sizes, **arguments)
    num_bytes = settings.get("bytes", steps * step_bytes)
    return {"bytes": num_bytes, **results, "value": (evaluate or held_out_bits)(model, held_out)}


def logged(trainer: Trainer, name: str) -> dict[int, float]:
    """Optimizer step → a measurement in the trainer's log."""
    return {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}


def held_out_bits(model: PreTrainedModel, held_out: Corpus, **options: Any) -> float:
    """Bits per byte, over whole episodes in 32 streams; `options` are other ones of `evaluate_bits_per_byte`."""
    options = {"num_streams": 32, "block_size": 512, "progress": False, **options}
    return evaluate_bits_per_byte(model, held_out, **options)["bits_per_byte"]


def train_on_task(model: PreTrainedModel, task: Task, settings: Settings, **options: Any) -> dict[str, Any]:
    """Train on a task, one example per block, by a row's `steps`, `batch_size`, `learning_rate` and `seed`.

    Args:
        options: further arguments of [`train`].
    """
    sizes = {"per_device_train_batch_size": settings["batch_size"], "block_size": task.length}
    return train(model, task, settings, steps=settings["steps"], **sizes, **options)


def run_trainer(
    build: Callable[[Any], Trainer],
    arguments_class: type[TrainingArguments],
    *,
    steps: int,
    measure: Callable[[Any], Any] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Train, in a temporary directory or with the checkpoints of the row that runs.

    Args:
        build: makes the trainer from its arguments.
        steps: optimizer steps.
        measure: called with the trainer after its last step; not counted in the seconds.
        arguments: other fields of `arguments_class`.

    Returns:
        `num_parameters`, `seconds`, `device`, and the result of `measure` as `measured`.
    """
    row, short = current_checkpoints(), short_trainings()
    with tempfile.TemporaryDirectory() as temporary:
        directory = str(row.next_training()) if row else temporary
        trainer = build(training_arguments(arguments_class, directory, steps, arguments))
        checkpoint, earlier = None, 0.0
        if row:
            timed = TimedCheckpoints(Path(directory), row.row_name)
            checkpoint, earlier = timed.checkpoint, timed.seconds
            trainer.add_callback(timed)
        if short:
            trainer.add_callback(short)
        with measured_run(earlier) as record:
            trainer.train(resume_from_checkpoint=checkpoint)
        if short:
            short.count(trainer)
        measured = {} if measure is None else {"measured": measure(trainer)}
    return {"num_parameters": sum(weight.numel() for weight in trainer.model.parameters()), **record, **measured}


def training_arguments(
    arguments_class: type[TrainingArguments], directory: str, steps: int, arguments: dict[str, Any]
) -> TrainingArguments:
    """The arguments of a run of `steps` optimizer steps with `arguments` as further fields."""
    defaults = {
        "output_dir": directory,
        "max_steps": steps,
        "bf16": torch.cuda.is_available(),
        "logging_steps": max(steps // 10, 1),
        "save_strategy": "no",
        "save_total_limit": 2,  # the older one is complete while the newer one is written
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return arguments_class(**{**defaults, **arguments})
