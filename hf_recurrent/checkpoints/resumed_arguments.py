"""Trainer state and arguments of a checkpoint; arguments that differ in a resumed run act, are refused, or are named.

The files have nothing that belongs to this machine: checkpoints may be uploaded.
"""

import json
import os
from dataclasses import replace
from typing import Any

from transformers import TrainerState, TrainingArguments

from hf_recurrent.checkpoints.files import read_json, reading_checkpoint, write_json

TRAINER_STATE_FILE, ARGUMENTS_FILE = "trainer_state.json", "training_args.json"
_LOCAL = {"output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "local_rank"}
_COUNTS = ("global_step", "max_steps", "logging_steps", "eval_steps", "save_steps", "num_input_tokens_seen")
_FIXED = """
    auto_find_batch_size bf16_full_eval block_size context_length count_bytes data_seed deepspeed fp16_full_eval fsdp
    fsdp_config future_length greater_is_better ignore_data_skip label_names label_smoothing_factor
    logging_nan_inf_filter matrix_optimizer method metric_for_best_model optim optim_args optim_target_modules
    parallelism_config regime rollout_length seed start_share timesteps
"""
_IGNORED = """
    average_tokens_across_devices batch_eval_metrics dataloader_drop_last dataloader_in_order
    dataloader_multiprocessing_context do_eval do_predict do_train eval_accumulation_steps eval_do_concat_batches
    eval_use_gather_object group_by_length include_for_metrics length_column_name prediction_loss_only
    remove_unused_columns train_sampling_strategy
"""
# All others act from the resumed step on, and are named.
FIXED, IGNORED = frozenset(_FIXED.split()), frozenset(_IGNORED.split())
# The learning rate follows the new schedule from the resumed step on.
SCHEDULE = frozenset((
    "learning_rate", "matrix_learning_rate", "table_learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs",
    "warmup_steps", "warmup_ratio",
))  # fmt: skip
# Hyperparameters of an optimizer's groups, as the current arguments set them.
HYPERPARAMETERS = {"weight_decay": "weight_decay", "betas": "adam_beta1 adam_beta2", "eps": "adam_epsilon"}
# Schedules that do not depend on the number of steps.
_ENDLESS = ("constant", "constant_with_warmup")


def save_trainer_state(state: TrainerState, args: TrainingArguments, directory: str | os.PathLike) -> None:
    """Write `trainer_state.json` and `training_args.json`, without local paths."""
    # The best checkpoint is found again by its step.
    replace(state, best_model_checkpoint=None).save_to_json(os.path.join(directory, TRAINER_STATE_FILE))
    write_json(shareable_arguments(args), os.path.join(directory, ARGUMENTS_FILE))


def load_trainer_state(checkpoint: str | os.PathLike) -> TrainerState:
    """Read `trainer_state.json`; raise a ValueError if it is missing or damaged."""
    with reading_checkpoint(os.path.join(checkpoint, TRAINER_STATE_FILE)) as path:
        state = TrainerState.load_from_json(path)
        for name in _COUNTS:
            value = getattr(state, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 2**63:
                raise ValueError(f"`{path}` is damaged: `{name}` is {value!r}.")
        if not isinstance(state.log_history, list) or not all(isinstance(entry, dict) for entry in state.log_history):
            raise ValueError(f"`{path}` is damaged: `log_history` must be a list of dictionaries.")
        if not isinstance(state.stateful_callbacks, dict) or "TrainerControl" not in state.stateful_callbacks:
            raise ValueError(f"`{path}` is damaged: `stateful_callbacks` must have a `TrainerControl`.")
    return state


def shareable_arguments(args: TrainingArguments) -> dict[str, Any]:
    """JSON values of the arguments, without tokens, directories and other local paths."""
    values = json.loads(json.dumps(args.to_dict(), default=str))
    return {
        name: value
        for name, value in values.items()
        if name not in _LOCAL and not name.endswith("_token")
        if not (isinstance(value, str) and (value.startswith(("~", ".")) or os.path.isabs(value)))
    }


def changed_arguments(checkpoint: str | os.PathLike, args: TrainingArguments) -> dict[str, tuple[Any, Any]]:
    """Arguments with another value than in a checkpoint: name → (value there, value now).

    Empty for a checkpoint of an earlier version, which has no file of arguments.
    """
    path = os.path.join(checkpoint, ARGUMENTS_FILE)
    if not os.path.isfile(path):
        return {}
    before, now = read_json(path), json.loads(json.dumps(shareable_arguments(args)))
    if not isinstance(before, dict):
        raise ValueError(f"The checkpoint file `{path}` is damaged: it must be an object.")
    return {name: (before[name], now[name]) for name in now if name in before and before[name] != now[name]}


def check_changes(checkpoint: str | os.PathLike, changes: dict[str, tuple[Any, Any]]) -> None:
    """Raise a ValueError if an argument has changed that must not."""
    for name, (before, now) in changes.items():
        if name in FIXED:
            raise ValueError(
                f"`{name}` is {now!r}, but the checkpoint {os.fspath(checkpoint)!r} was trained with {before!r}; a "
                f"resumed run cannot change it. {new_run_hint(checkpoint)}"
            )


def describe_changes(changes: dict[str, tuple[Any, Any]], is_finished: bool) -> str:
    """Sentences that name the changed arguments, those without effect as such."""
    ignored = [f"`{name}`" for name in sorted(changes.keys() & IGNORED)]
    applied = [
        f"`{name}` {now!r} (before: {before!r})"
        for name, (before, now) in sorted(changes.items())
        if name not in IGNORED
    ]
    begin = "The resumed run continues with"
    if is_finished:
        begin = "The run is finished, so only changed arguments of evaluation and output act:"
    sentences = [f"{begin} {', '.join(applied)}."] if applied else []
    return " ".join([*sentences, f"Without effect on a resumed run: {', '.join(ignored)}."] if ignored else sentences)


def check_length(checkpoint: str | os.PathLike, args: TrainingArguments, steps: int) -> bool:
    """True if the number of steps has changed.

    Raises:
        ValueError: there are fewer than the checkpoint has done, or a finished run cannot be made longer.
    """
    state = read_json(os.path.join(checkpoint, TRAINER_STATE_FILE))
    done, before = state["global_step"], state["max_steps"]
    if steps == before:
        return False
    name = "max_steps" if args.max_steps > 0 else "train_bytes" if args.train_bytes else "num_train_epochs"
    given = f"`{name}` is {getattr(args, name):g}, which is {steps:,} steps"
    if steps < done:
        raise ValueError(f"{given}; the checkpoint {os.fspath(checkpoint)!r} is at step {done:,}.")
    if done >= before and args.lr_scheduler_type.value not in _ENDLESS:
        raise ValueError(
            f"{given}, but the run of {os.fspath(checkpoint)!r} has ended after {before:,}, and its learning rate "
            f"with it. {new_run_hint(checkpoint)}"
        )
    return True


def new_run_hint(checkpoint: str | os.PathLike) -> str:
    """A hint for training the model of a checkpoint with other settings."""
    directory = os.path.dirname(os.path.normpath(checkpoint)) or os.curdir
    return f"To train its model further, start a new run with --model {directory}"
