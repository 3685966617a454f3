"""`StreamProgress`: how far the streams of this process have come; `CarriedState`: what they carry.

In a checkpoint, streams.json describes the run, and streams_rank*.safetensors has the streams of a process. They are
found by their global number, so a run can be resumed with another number of processes.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

from hf_recurrent.checkpoints.files import read_json, write_json
from hf_recurrent.checkpoints.privacy import public_data_name
from hf_recurrent.checkpoints.tensor_files import open_tensors
from hf_recurrent.data.episode_source import EpisodeSource
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, check_state, join_states, select_state
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments

STREAMS_FILE = "streams.json"
_STATE = "state."


class CarriedState:
    """Carried tensors, batch first, of each group of streams (one micro-batch of one process).

    A group is identified by the global number of its first stream. `zero` maps batch size and device to the tensors
    that new streams start from.
    """

    def __init__(self, zero: Callable[[int, torch.device | str], RecurrentState], device: torch.device):
        self.zero, self.device = zero, device
        self.groups: dict[int, RecurrentState] = {}

    def get(self, group: int, batch_size: int) -> RecurrentState:
        """Tensors of a group; zero before its first block."""
        if group not in self.groups:
            self.groups[group] = self.zero(batch_size, self.device)
        return self.groups[group]

    def set(self, group: int, state: RecurrentState) -> None:
        """Replace the tensors of a group."""
        self.groups[group] = state

    def clear(self) -> None:
        """Drop all groups, so that every stream starts from zero."""
        self.groups.clear()

    def save(self, groups: list[int]) -> RecurrentState:
        """Concatenate the tensors of several groups, in the given order."""
        return join_states([self.groups[group] for group in groups])

    def load(self, state: RecurrentState, streams: torch.Tensor, group_size: int) -> None:
        """Restore tensors of [`save`] for the streams (B,) of this process, `group_size` of them in a group.

        Raises:
            ValueError: a tensor is missing, unknown or has another shape.
        """
        zero = self.zero(len(streams), "meta")
        check_state(state, {name: tensor.shape for name, tensor in zero.items()}, integer_parts=None)
        for rows in torch.arange(len(streams)).split(group_size):
            part = select_state(state, rows).items()
            self.set(int(streams[rows[0]]), {name: value.to(self.device, zero[name].dtype) for name, value in part})


class StreamProgress:
    """Positions and carried tensors of this process's streams, and the episodes that have begun since the last log."""

    def __init__(self, args: MultiStreamTrainingArguments, source: EpisodeSource | None, carried: CarriedState | None):
        self.args, self.source, self.carried = args, source, carried
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        if self.carried is not None:
            self.carried.clear()
        self.positions: dict[int, torch.Tensor] = {}  # by the number of the stream, after its last trained block
        self.bookmarks: dict[int, torch.Tensor] = {}  # likewise, if the batches have them
        self.start: dict[str, np.ndarray] = {}  # positions and bookmarks of all streams, in a resumed run
        self.resets = 0

    @property
    def streams(self) -> torch.Tensor:
        """Global numbers of this process's streams, in the order of its micro-batches."""
        batch_size, processes = self.args.per_device_train_batch_size, self.args.world_size
        first = torch.arange(self.args.gradient_accumulation_steps) * processes + self.args.process_index
        return (first[:, None] * batch_size + torch.arange(batch_size)).flatten()

    def advance(self, batch: dict[str, Any]) -> None:
        """Record a trained block. Not when the batch is fetched: prefetched batches have not been trained on."""
        self.resets += int(batch["reset_mask"].sum())
        streams = batch["stream_indices"].tolist()
        self.positions |= zip(streams, batch["stream_positions"], strict=True)
        if "stream_bookmarks" in batch:
            self.bookmarks |= zip(streams, batch["stream_bookmarks"], strict=True)

    def save(self, directory: str, step: int) -> None:
        """Write position and carried tensors of every stream; called by every process."""
        if self.args.should_save:  # without the folders of the corpus, because checkpoints may be uploaded
            run = self._run | {"corpus_name": public_data_name(self.source.name), "global_step": step}
            write_json(run, os.path.join(directory, STREAMS_FILE))
        streams = self.streams.tolist()
        tensors = {
            "stream_indices": self.streams,
            "positions": torch.stack([self.positions[each] for each in streams]),
        }
        if self.bookmarks:  # of a mixture, some streams may have none
            none = torch.zeros(0, dtype=torch.uint8)
            marks = [self.bookmarks.get(stream, none).cpu() for stream in streams]
            tensors["bookmarks"] = pad_sequence(marks, batch_first=True)
        if self.carried is not None:
            state = self.carried.save(streams[:: self.args.per_device_train_batch_size])
            tensors |= {f"{_STATE}{name}": tensor for name, tensor in state.items()}
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        save_file(tensors, _path(directory, self.args.process_index))

    def load(self, checkpoint: str) -> None:
        """Check that the streams are the same, then restore positions and carried tensors.

        Raises:
            ValueError: this run cannot continue the streams of the checkpoint.
        """
        positions = torch.full((self.args.num_streams, 2), -1, dtype=torch.int64)
        bookmarks: list[tuple[torch.Tensor, torch.Tensor]] = []
        state: RecurrentState = {}
        for rank in range(self._check_run(checkpoint)):
            with open_tensors(_path(checkpoint, rank)) as file:
                indices = file.get_tensor("stream_indices")
                positions[indices] = file.get_tensor("positions")
                if "bookmarks" in file.keys():  # noqa: SIM118, a file is not a dictionary
                    bookmarks.append((indices, file.get_tensor("bookmarks")))
                if self.carried is not None:
                    _add_states(state, file, self.streams[:, None] == indices)
        if (positions < 0).any():
            missing = int((positions < 0).any(1).nonzero()[0])
            raise ValueError(f"The checkpoint `{checkpoint}` is damaged: no position of stream {missing}.")
        self.start = {"positions": positions.numpy()}
        if bookmarks:
            length = max(marks.shape[1] for _, marks in bookmarks)
            padded = torch.zeros(len(positions), length, dtype=torch.uint8)
            for indices, marks in bookmarks:
                padded[indices, : marks.shape[1]] = marks
            self.start["bookmarks"] = padded.numpy()
        if self.carried is None:
            return
        try:
            self.carried.load(state, self.streams, self.args.per_device_train_batch_size)
        except ValueError as error:
            raise ValueError(f"The checkpoint {checkpoint!r} has the states of another model: {error}") from error

    @property
    def _run(self) -> dict[str, Any]:
        """Properties that must be equal for the streams to continue, except for `num_processes`."""
        return {
            "num_streams": self.args.num_streams,
            "block_size": self.args.block_size,
            "regime": self.args.regime,
            "data_seed": self.args.stream_seed,
            "corpus_name": self.source.name,
            "corpus_fingerprint": self.source.fingerprint,
            "num_processes": self.args.world_size,
        }

    def _check_run(self, checkpoint: str) -> int:
        """Number of processes of the run that wrote a checkpoint; a ValueError if its streams are others."""
        run, stored = self._run, read_json(os.path.join(checkpoint, STREAMS_FILE))
        stored = {name: stored[name] for name in run}
        named = f"The checkpoint `{checkpoint}`"
        if stored["num_streams"] != run["num_streams"]:
            raise ValueError(
                f"{named} has {stored['num_streams']} streams, but `per_device_train_batch_size` * processes * "
                f"`gradient_accumulation_steps` is {run['num_streams']}; they must be equal."
            )
        for name in ("block_size", "regime", "data_seed"):
            if stored[name] != run[name]:
                raise ValueError(
                    f"{named} was trained with `{name}` {stored[name]!r}, but it is {run[name]!r} now; they must be "
                    "equal."
                )
        if stored["corpus_fingerprint"] != run["corpus_fingerprint"]:
            before, now = (
                f"{each['corpus_name']!r} (fingerprint {each['corpus_fingerprint']})" for each in (stored, run)
            )
            raise ValueError(
                f"{named} was trained on the corpus {before}, but this corpus is {now}; they must be the same."
            )
        return stored["num_processes"]


def _add_states(state: RecurrentState, file: Any, is_stream: torch.Tensor) -> None:
    """Add the carried tensors of the streams (B,) that a file has; `is_stream` is (B, streams of the file)."""
    rows, stored = is_stream.nonzero(as_tuple=True)
    for name in file.keys() if len(rows) else ():
        if name.startswith(_STATE):
            short, tensor = name.removeprefix(_STATE), file.get_tensor(name)
            if short not in state:
                state[short] = tensor.new_zeros(len(is_stream), *tensor.shape[1:])
            state[short][rows] = tensor[stored]


def _path(directory: str, rank: int) -> str:
    return os.path.join(directory, f"streams_rank{rank}.safetensors")
