"""Positions and carried states of the streams in a checkpoint, stored by the global number of the stream.

Each process writes its streams to streams_rank*.safetensors; streams.json describes the run. Because streams are found
by global number, a run can be resumed with another number of processes.
"""

import os
from dataclasses import asdict, dataclass

import torch
from safetensors.torch import save_file

from hf_recurrent.checkpoints.files import read_json, write_json
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
            if "bookmarks" in file.keys():  # noqa: SIM118, a file is no dictionary
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
