"""Files of a training checkpoint next to the model: optimizer, schedule, random states, arguments, streams.

Each process writes positions and carried states of its streams to streams_rank*.safetensors; streams.json describes
the run. Streams are found by their global number, so a run can be resumed with another number of processes.

All files are checked before use, and written without anything that belongs to this machine: checkpoints may be
uploaded.
"""

import json
import os
import random
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import TrainerState, TrainingArguments

from hf_recurrent.checkpoints.files import load_tree, read_json, reading_checkpoint, save_tree, write_json
from hf_recurrent.checkpoints.optimizer_state import load_optimizer_state, optimizer_state, own_part_of_state
from hf_recurrent.checkpoints.privacy import public_data_name
from hf_recurrent.checkpoints.tensor_files import open_tensors
from hf_recurrent.modeling.block.recurrent_state import RecurrentState

STREAMS_FILE = "streams.json"
_STATE = "state."


@dataclass
class StreamRun:
    """Properties of a run that must be equal for its streams to continue, except for `num_processes`."""

    num_streams: int
    block_size: int
    regime: str
    data_seed: int
    corpus_name: str
    corpus_fingerprint: str
    num_processes: int


def save_stream_run(run: StreamRun, global_step: int, directory: str | os.PathLike) -> None:
    """Write the properties of a run; its corpus without the folders, because checkpoints may be uploaded."""
    stored = {**asdict(run), "corpus_name": public_data_name(run.corpus_name), "global_step": global_step}
    write_json(stored, os.path.join(directory, STREAMS_FILE))


def save_streams(
    directory: str | os.PathLike,
    rank: int,
    stream_indices: torch.Tensor,
    positions: torch.Tensor,
    state: RecurrentState,
    bookmarks: torch.Tensor | None = None,
) -> None:
    """Write one process's streams: numbers (B,), positions (B, 2), state tensors (B, …), bookmarks (B, L) uint8."""
    tensors = {f"{_STATE}{name}": tensor for name, tensor in state.items()}
    tensors |= {"stream_indices": stream_indices, "positions": positions}
    tensors |= {} if bookmarks is None else {"bookmarks": bookmarks}
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, _path(directory, rank))


def check_stream_run(directory: str | os.PathLike, run: StreamRun) -> StreamRun:
    """Return the run that wrote a checkpoint.

    Raises:
        ValueError: `run` cannot continue its streams.
    """
    stored = read_json(os.path.join(directory, STREAMS_FILE))
    stored = StreamRun(**{name: stored[name] for name in asdict(run)})
    checkpoint = f"The checkpoint `{os.fspath(directory)}`"
    if stored.num_streams != run.num_streams:
        raise ValueError(
            f"{checkpoint} has {stored.num_streams} streams, but `per_device_train_batch_size` * processes * "
            f"`gradient_accumulation_steps` is {run.num_streams}; they must be equal."
        )
    for name in ("block_size", "regime", "data_seed"):
        before, now = getattr(stored, name), getattr(run, name)
        if before != now:
            raise ValueError(
                f"{checkpoint} was trained with `{name}` {before!r}, but it is {now!r} now; they must be equal."
            )
    if stored.corpus_fingerprint != run.corpus_fingerprint:
        raise ValueError(
            f"{checkpoint} was trained on the corpus {stored.corpus_name!r} (fingerprint {stored.corpus_fingerprint})"
            f", but this corpus is {run.corpus_name!r} (fingerprint {run.corpus_fingerprint}); they must be the same."
        )
    return stored


def load_positions(directory: str | os.PathLike, run: StreamRun) -> torch.Tensor:
    """Positions of all streams by global number, (num_streams, 2) int64."""
    positions = torch.full((run.num_streams, 2), -1, dtype=torch.int64)
    for rank in range(run.num_processes):
        with open_tensors(_path(directory, rank)) as file:
            positions[file.get_tensor("stream_indices")] = file.get_tensor("positions")
    if (positions < 0).any():
        missing = int((positions < 0).any(1).nonzero()[0])
        raise ValueError(f"The checkpoint `{os.fspath(directory)}` is damaged: no position of stream {missing}.")
    return positions


def load_bookmarks(directory: str | os.PathLike, run: StreamRun) -> torch.Tensor | None:
    """Bookmarks of all streams by global number, (num_streams, L) uint8, padded with zeros; None if there are none."""
    parts = []
    for rank in range(run.num_processes):
        with open_tensors(_path(directory, rank)) as file:
            if "bookmarks" in file.keys():  # noqa: SIM118, a file is not a dictionary
                parts.append((file.get_tensor("stream_indices"), file.get_tensor("bookmarks")))
    if not parts:
        return None
    bookmarks = torch.zeros(run.num_streams, max(part.shape[1] for _, part in parts), dtype=torch.uint8)
    for streams, part in parts:
        bookmarks[streams, : part.shape[1]] = part
    return bookmarks


def load_states(directory: str | os.PathLike, run: StreamRun, stream_indices: torch.Tensor) -> RecurrentState:
    """Carried tensors of the streams `stream_indices` (B,), in that order; empty if none were carried."""
    state: RecurrentState = {}
    for rank in range(run.num_processes):
        with open_tensors(_path(directory, rank)) as file:
            rows, stored = (stream_indices[:, None] == file.get_tensor("stream_indices")).nonzero(as_tuple=True)
            for name in file.keys() if len(rows) else ():
                if name.startswith(_STATE):
                    short, tensor = name.removeprefix(_STATE), file.get_tensor(name)
                    if short not in state:
                        state[short] = tensor.new_zeros(len(stream_indices), *tensor.shape[1:])
                    state[short][rows] = tensor[stored]
    return state


def _path(directory: str | os.PathLike, rank: int) -> str:
    return os.path.join(directory, f"streams_rank{rank}.safetensors")


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
