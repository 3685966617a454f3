"""Files of a training checkpoint next to the model: optimizer, schedule, random states, arguments.

All files are checked before use, and written without anything that belongs to this machine: checkpoints may be
uploaded.
"""

import json
import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import TrainerState, TrainingArguments

from hf_recurrent.checkpoints.files import load_tree, read_json, reading_checkpoint, save_tree, write_json
from hf_recurrent.checkpoints.optimizer_state import load_optimizer_state, optimizer_state, own_part_of_state

TRAINER_STATE_FILE, ARGUMENTS_FILE = "trainer_state.json", "training_args.json"
_LOCAL = {"output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "local_rank"}
_COUNTS = ("global_step", "max_steps", "logging_steps", "eval_steps", "save_steps", "num_input_tokens_seen")


# ---- Trainer state and arguments ----


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
        if name not in _LOCAL and not name.endswith("_token") and not _is_local_path(value)
    }


def _is_local_path(value: Any) -> bool:
    return isinstance(value, str) and (value.startswith(("~", ".")) or os.path.isabs(value))


# ---- Optimizer, schedule, gradient scaler ----


def save_optimizer(
    optimizer: Any, schedule: Any, scaler: Any, directory: str | os.PathLike, *, takes_part: bool, writes: bool
) -> None:
    """Write the state of an optimizer, of its schedule of learning rates, and of a gradient scaler (float16).

    Args:
        optimizer, schedule: of torch, or accelerate's wrappers of them.
        takes_part: False for a process that has no part of the states.
        writes: False for a process that only takes part in gathering them.
    """
    if takes_part:
        save_tree(optimizer_state(optimizer), directory, "optimizer", writes=writes)
    if writes:
        save_tree(schedule.state_dict(), directory, "scheduler")
        if scaler is not None:
            write_json(scaler.state_dict(), os.path.join(directory, "scaler.json"))


def load_optimizer(optimizer: Any, schedule: Any, scaler: Any, checkpoint: str | os.PathLike) -> None:
    """Restore the files of [`save_optimizer`].

    Raises:
        ValueError: a file is missing or damaged, or belongs to another optimizer or schedule.
    """
    with reading_checkpoint(checkpoint):
        load_optimizer_state(optimizer, load_tree(checkpoint, "optimizer", own_part_of_state(optimizer)))
        saved, own = load_tree(checkpoint, "scheduler"), schedule.state_dict()
        for name, value in saved.items():
            if type(value) is not type(own.get(name)) or (isinstance(value, list) and len(value) != len(own[name])):
                raise ValueError(f"{checkpoint!r} has another learning rate schedule: `{name}` is {value!r}.")
        schedule.load_state_dict(saved)
    path = os.path.join(checkpoint, "scaler.json")
    if scaler is not None and os.path.isfile(path):
        with reading_checkpoint(path):
            scaler.load_state_dict(read_json(path))


# ---- The state of a process ----


def random_states(device: torch.device) -> dict[str, Any]:
    """States of the random generators of this process, for [`save_tree`]."""
    kind, key, *numpy_state = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, key.tolist(), *numpy_state],
        "torch": torch.random.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if device.type == "cuda" else None,
    }


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore [`random_states`]."""
    random.setstate(states["python"])
    kind, key, *numpy_state = states["numpy"]
    np.random.set_state((kind, np.array(key, dtype=np.uint32), *numpy_state))
    torch.random.set_rng_state(states["torch"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"])


def sum_of_trees(trees: list[Any], times: int) -> Any:
    """`times` × the sum of numbers, tensors or dictionaries of them; None if all are None."""
    trees = [tree for tree in trees if tree is not None]
    if not trees:
        return None
    if isinstance(trees[0], dict):
        names = dict.fromkeys(name for tree in trees for name in tree)
        return {name: sum_of_trees([tree.get(name) for tree in trees], times) for name in names}
    return sum(trees[1:], trees[0]) * times
