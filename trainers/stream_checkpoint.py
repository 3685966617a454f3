"""Where every stream stands, in a checkpoint: position and carried state by the stream's global number.

Each process writes the streams that it reads to streams_rank*.safetensors; streams.json says what the run was. Because
rows are found by global number, another number of processes can continue.
"""

import os
from dataclasses import asdict, dataclass

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_recurrent.checkpoint_files import read_json, write_json
from hf_recurrent.modeling.recurrent_state import RecurrentState

STREAMS_FILE = "streams.json"
_STATE = "state."


@dataclass
class StreamRun:
    """What has to be the same for streams to continue; `num_processes` may change."""

    num_streams: int
    block_size: int
    regime: str
    data_seed: int
    corpus_name: str
    corpus_fingerprint: str
    num_processes: int


def streams_rank_file(rank: int) -> str:
    return f"streams_rank{rank}.safetensors"


def save_stream_run(run: StreamRun, global_step: int, directory: str | os.PathLike) -> None:
    write_json({**asdict(run), "global_step": global_step}, os.path.join(directory, STREAMS_FILE))


def save_streams(
    directory: str | os.PathLike,
    rank: int,
    stream_indices: torch.Tensor,
    positions: torch.Tensor,
    state: RecurrentState,
) -> None:
    """Write one process's streams: numbers (B,), positions (B, 2) and the state, whose first dimension is B."""
    tensors = {f"{_STATE}{name}": tensor for name, tensor in state.items()}
    tensors |= {"stream_indices": stream_indices, "positions": positions}
    save_file(
        {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()},
        os.path.join(directory, streams_rank_file(rank)),
    )


def check_stream_run(directory: str | os.PathLike, run: StreamRun) -> StreamRun:
    """The run that wrote a checkpoint; ValueError where `run` cannot continue its streams."""
    stored = read_json(os.path.join(directory, STREAMS_FILE))
    stored = StreamRun(**{name: stored[name] for name in asdict(run)})
    if stored.num_streams != run.num_streams:
        raise ValueError(
            f"The checkpoint `{os.fspath(directory)}` has {stored.num_streams} streams, but "
            "`per_device_train_batch_size` * processes * `gradient_accumulation_steps` is "
            f"{run.num_streams}; they must be equal."
        )
    for name in ("block_size", "regime", "data_seed"):
        if getattr(stored, name) != getattr(run, name):
            raise ValueError(
                f"The checkpoint `{os.fspath(directory)}` was trained with `{name}` {getattr(stored, name)!r}, but it "
                f"is {getattr(run, name)!r} now; they must be equal."
            )
    if stored.corpus_fingerprint != run.corpus_fingerprint:
        raise ValueError(
            f"The checkpoint `{os.fspath(directory)}` was trained on the corpus {stored.corpus_name!r} (fingerprint "
            f"{stored.corpus_fingerprint}), but this corpus is {run.corpus_name!r} (fingerprint "
            f"{run.corpus_fingerprint}); resuming needs the same documents."
        )
    return stored


def load_positions(directory: str | os.PathLike, run: StreamRun) -> torch.Tensor:
    """Positions of all streams, (num_streams, 2) int64 by global number."""
    positions = torch.full((run.num_streams, 2), -1, dtype=torch.int64)
    for rank in range(run.num_processes):
        with _open(directory, rank) as file:
            positions[file.get_tensor("stream_indices")] = file.get_tensor("positions")
    if (positions < 0).any():
        missing = int((positions < 0).any(1).nonzero()[0])
        raise ValueError(
            f"The checkpoint `{os.fspath(directory)}` has no position of stream {missing}: it is damaged."
        )
    return positions


def load_states(directory: str | os.PathLike, run: StreamRun, stream_indices: torch.Tensor) -> RecurrentState:
    """The carried states of the streams `stream_indices` (B,), in that order; empty where none was carried."""
    row_of = {int(stream): row for row, stream in enumerate(stream_indices)}
    state: RecurrentState = {}
    for rank in range(run.num_processes):
        with _open(directory, rank) as file:
            stored = file.get_tensor("stream_indices").tolist()
            pairs = [(row, row_of[stream]) for row, stream in enumerate(stored) if stream in row_of]
            names = [name for name in file.keys() if name.startswith(_STATE)]  # noqa: SIM118 (not a dictionary)
            if not pairs:
                continue
            source, target = (torch.tensor(rows) for rows in zip(*pairs, strict=True))
            for name in names:
                tensor = file.get_tensor(name)
                short = name.removeprefix(_STATE)
                if short not in state:
                    state[short] = torch.zeros(len(stream_indices), *tensor.shape[1:], dtype=tensor.dtype)
                state[short][target] = tensor[source]
    return state


def _open(directory: str | os.PathLike, rank: int):
    path = os.path.join(directory, streams_rank_file(rank))
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"The checkpoint file `{path}` is missing or damaged: {error}.") from error
