"""What the experiments' rows have in common: a model by preset, training on a corpus or a task, the device."""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed

from hf_recurrent import MultiStreamTrainer, MultiStreamTrainingArguments, Task, config_from_preset


def device_name() -> str:
    """What the rows are trained on, for the report."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "the CPU"


def build_model(preset: str, vocab_size: int, seed: int, **overrides: Any) -> PreTrainedModel:
    """A new model of a preset's sizes, initialised with the seed."""
    set_seed(seed)
    return AutoModelForCausalLM.from_config(config_from_preset(preset, vocab_size=vocab_size, **overrides))


def train(model: PreTrainedModel, data: Any, *, steps: int, seed: int, **arguments: Any) -> dict[str, Any]:
    """Train on a corpus or a task: what every row records of it.

    Args:
        arguments: fields of [`MultiStreamTrainingArguments`].
    """
    return run_trainer(
        lambda args: MultiStreamTrainer(model, args, train_corpus=data),
        MultiStreamTrainingArguments,
        steps=steps,
        seed=seed,
        **arguments,
    )


def run_trainer(
    build: Callable[[Any], MultiStreamTrainer],
    arguments_class: type[MultiStreamTrainingArguments],
    *,
    steps: int,
    seed: int,
    measure: Callable[[MultiStreamTrainer], Any] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Train in a folder that is gone afterwards: parameters, seconds, device, and as `measured` what `measure` found.

    Args:
        build: the trainer with these arguments.
        arguments: fields of `arguments_class`.
        measure: of the trainer behind its last step, not counted in the seconds.
    """
    with tempfile.TemporaryDirectory() as directory:
        trainer = build(
            arguments_class(
                **{
                    "output_dir": directory,
                    "max_steps": steps,
                    "seed": seed,
                    "bf16": torch.cuda.is_available(),
                    "logging_steps": max(steps // 10, 1),
                    "save_strategy": "no",
                    "eval_strategy": "no",
                    "report_to": "none",
                    "disable_tqdm": True,
                    **arguments,
                }
            )
        )
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        measured = {} if measure is None else {"measured": measure(trainer)}
    parameters = trainer.model.num_parameters()
    return {"num_parameters": parameters, "seconds": round(seconds, 2), "device": device_name(), **measured}


def train_on_task(model: PreTrainedModel, task: Task, settings: dict[str, Any]) -> dict[str, Any]:
    """Train on a task, an example a block, by a row's `steps`, `batch_size`, `learning_rate` and `seed`."""
    return train(
        model,
        task,
        steps=settings["steps"],
        seed=settings["seed"],
        per_device_train_batch_size=settings["batch_size"],
        block_size=task.length,
        learning_rate=settings["learning_rate"],
    )
