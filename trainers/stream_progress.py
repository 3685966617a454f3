"""`StreamProgress`: how far the streams of this process have come."""

from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from hf_recurrent.checkpoints.stream_files import (
    StreamRun,
    check_stream_run,
    load_bookmarks,
    load_positions,
    load_states,
    save_stream_run,
    save_streams,
)
from hf_recurrent.data.episode_source import EpisodeSource
from hf_recurrent.trainers.carried_state import CarriedState
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments


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
