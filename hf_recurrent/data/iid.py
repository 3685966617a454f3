"""The IID baseline: blocks of T bytes at random starts in the corpus, each from a zero state."""

import itertools
from collections.abc import Iterator

import numpy as np
import torch

from hf_recurrent.data.block_dataset import BlockDataset
from hf_recurrent.data.block_reader import Block, to_batch
from hf_recurrent.data.document_order import hash_integers
from hf_recurrent.data.stream_arguments import worker_share
from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX

# Up to this T, blocks are gathered with one indexing operation; above it, with one slice each.
_GATHERED = 64
_BATCHES_AHEAD, _ROWS_AHEAD = 64, 2048


class IIDDataset(BlockDataset):
    """Endless complete batches of independent blocks; see [`MultiStreamDataset`] for arguments, keys and errors.

    A block is a contiguous part of the corpus, which wraps around; all starts are equally likely. `reset_mask` is true
    at the first byte of every block and of every episode in it. A block depends on the seed, its stream and the step
    only; `stream_positions` is (steps done, 0).
    """

    def prepare(self) -> None:
        if any(first[:, 1].any() for first in self.group_positions):
            raise ValueError("`positions` has an offset other than 0; it belongs to another regime.")
        self._ends = np.cumsum(self.corpus.ends - self.corpus.starts)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Batches from `positions` on; each iterator starts over."""
        worker, num_workers = worker_share()
        num_groups = len(self.stream_groups)
        size = len(self.stream_groups[0])
        # For small T, the overhead of calls dominates: many batches are made at once.
        ahead = max(1, min(_BATCHES_AHEAD, _ROWS_AHEAD // size)) if self.block_size <= _GATHERED else 1
        for first in itertools.count(worker, ahead * num_workers):
            batches = [divmod(first + number * num_workers, num_groups) for number in range(ahead)]
            together = self._block(
                np.concatenate([self.stream_groups[group] for _, group in batches]),
                np.concatenate([self.group_positions[group][:, 0] + index for index, group in batches]),
            )
            for number, (_, group) in enumerate(batches):
                part = slice(number * size, (number + 1) * size)
                yield to_batch(together.rows(part) if ahead > 1 else together, self.stream_groups[group])

    def _block(self, streams: np.ndarray, steps: np.ndarray) -> Block:
        corpus, size = self.corpus, self.block_size
        total = np.uint64(self._ends[-1])
        places = (hash_integers(self.seed, streams, steps) % total).astype(np.int64)
        episodes = np.searchsorted(self._ends, places, side="right")
        left = self._ends[episodes] - places  # bytes left in the episode
        begins = corpus.ends[episodes] - left
        shape = (len(streams), size + 1)
        tokens = np.empty(shape, dtype=corpus.store.dtype)
        starts = np.zeros(shape, dtype=bool)
        inside = np.flatnonzero(left > size)
        if size <= _GATHERED:
            tokens[inside] = corpus.store[begins[inside, None] + np.arange(size + 1)]
        else:
            for row, begin in zip(inside.tolist(), begins[inside].tolist(), strict=True):
                tokens[row] = corpus.store[begin : begin + size + 1]
        for row in np.flatnonzero(left <= size).tolist():
            self._cross_episodes(tokens[row], starts[row], int(episodes[row]), int(begins[row]))
        targets = tokens[:, 1:].astype(np.int64)
        np.putmask(targets, starts[:, 1:], IGNORE_INDEX if corpus.end_token_id is None else corpus.end_token_id)
        resets = starts[:, :-1].copy()
        resets[:, 0] = True
        return Block(
            inputs=tokens[:, :-1].astype(np.int64),
            targets=targets,
            resets=resets,
            attended=np.ones_like(resets),
            positions=np.stack([steps + 1, np.zeros_like(steps)], axis=1),
        )

    def _cross_episodes(self, tokens: np.ndarray, starts: np.ndarray, episode: int, begin: int) -> None:
        corpus, filled = self.corpus, 0
        while filled < len(tokens):
            if filled:
                starts[filled] = True
            count = min(int(corpus.ends[episode]) - begin, len(tokens) - filled)
            tokens[filled : filled + count] = corpus.store[begin : begin + count]
            filled += count
            episode = (episode + 1) % len(corpus)
            begin = int(corpus.starts[episode])
