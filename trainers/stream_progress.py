"""`StreamProgress`: how far the streams of this process have come; `CarriedState`: what they carry."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from hf_recurrent.checkpoints.training_files import (
    StreamRun,
    check_stream_run,
    load_bookmarks,
    load_positions,
    load_states,
    save_stream_run,
    save_streams,
)
from hf_recurrent.data.episode_source import EpisodeSource
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, check_state, join_states, select_state
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments


class CarriedState:
    """Carried tensors, batch first, of each group of streams (one micro-batch of one process).

    A group is identified by the global number of its first stream. `zero` maps batch size and device to the tensors
    that new streams start from.
    """

    def __init__(self, zero: Callable[[int, torch.device | str], RecurrentState], device: torch.device):
        self.zero, self.device = zero, device
        self._groups: dict[int, RecurrentState] = {}

    @property
    def groups(self) -> list[int]:
        """Groups that carry tensors, sorted."""
        return sorted(self._groups)

    def get(self, group: int, batch_size: int) -> RecurrentState:
        """Tensors of a group; zero before its first block."""
        if group not in self._groups:
            self._groups[group] = self.zero(batch_size, self.device)
        return self._groups[group]

    def set(self, group: int, state: RecurrentState) -> None:
        """Replace the tensors of a group."""
        self._groups[group] = state

    def clear(self) -> None:
        """Drop all groups, so that every stream starts from zero."""
        self._groups.clear()

    def save(self, groups: list[int]) -> RecurrentState:
        """Concatenate the tensors of several groups, in the given order."""
        return join_states([self._groups[group] for group in groups])

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
        if self.args.should_save:
            save_stream_run(self._run, step, directory)
        streams = self.streams
        groups = streams[:: self.args.per_device_train_batch_size].tolist()
        state = {} if self.carried is None else self.carried.save(groups)
        positions = torch.stack([self.positions[stream] for stream in streams.tolist()])
        bookmarks = None
        if self.bookmarks:  # of a mixture, some streams may have none
            none = torch.zeros(0, dtype=torch.uint8)
            marks = [self.bookmarks.get(stream, none).cpu() for stream in streams.tolist()]
            bookmarks = pad_sequence(marks, batch_first=True)
        save_streams(directory, self.args.process_index, streams, positions, state, bookmarks)

    def load(self, checkpoint: str) -> None:
        """Check that the streams are the same, then restore positions and carried tensors.

        Raises:
            ValueError: this run cannot continue the streams of the checkpoint.
        """
        stored = check_stream_run(checkpoint, self._run)
        self.start = {"positions": load_positions(checkpoint, stored).numpy()}
        if (bookmarks := load_bookmarks(checkpoint, stored)) is not None:
            self.start["bookmarks"] = bookmarks.numpy()
        if self.carried is None:
            return
        try:
            state = load_states(checkpoint, stored, self.streams)
            self.carried.load(state, self.streams, self.args.per_device_train_batch_size)
        except ValueError as error:
            raise ValueError(f"The checkpoint {checkpoint!r} has the states of another model: {error}") from error

    @property
    def _run(self) -> StreamRun:
        return StreamRun(
            num_streams=self.args.num_streams,
            block_size=self.args.block_size,
            regime=self.args.regime,
            data_seed=self.args.stream_seed,
            corpus_name=self.source.name,
            corpus_fingerprint=self.source.fingerprint,
            num_processes=self.args.world_size,
        )
