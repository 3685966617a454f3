"""`Mixture`: several sources read side by side, each by a fixed share of the streams."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from transformers import PreTrainedModel, TrainingArguments

from hf_recurrent.argument_checks import check_probabilities
from hf_recurrent.data.block_dataset import Block, BlockDataset, GroupReader
from hf_recurrent.data.episode_source import EpisodeSource, EvaluationShare

# Largest difference between a share of the streams and its probability, relative to the probability.
_TOLERANCE = 0.25
_MEANS = ("loss", "bits_per_byte", "network_bits_per_byte")
_SUMS = ("num_bytes", "num_episodes")


class Mixture(EpisodeSource):
    """Sources that are read side by side with fixed probabilities.

    Each stream reads one source for the whole run, and the streams are divided in the ratio of the probabilities. As
    every stream reads T tokens per block, the tokens of every step have that ratio too, whatever the lengths of the
    documents. Positions, order and resuming are the sources' own.

    Evaluation measures every source alone: the metrics of source i end in `_i`, counted from 1. Metrics without a
    number are the means weighted by the probabilities; `num_bytes` and `num_episodes` are sums.

    Args:
        sources: at least two sources with the same V and unit, such as [`Corpus`] objects.
        probabilities: share of each source, above 0, with the sum 1.

    Raises:
        ValueError: there are fewer than two sources, they differ in V or unit, or the probabilities do not fit.
    """

    def __init__(self, sources: Sequence[EpisodeSource], probabilities: Sequence[float]) -> None:
        check_probabilities("probabilities", probabilities, len(sources))
        self.sources, self.probabilities = list(sources), [float(value) for value in probabilities]
        first = self.sources[0]
        for source in self.sources[1:]:
            if (source.vocab_size, source.unit) != (first.vocab_size, first.unit):
                raise ValueError(
                    f"`sources` have {first.vocab_size} {first.unit}s ({first.name!r}) and {source.vocab_size} "
                    f"{source.unit}s ({source.name!r}); they must be the same."
                )
        self.name = ", ".join(source.name for source in self.sources)
        self.vocab_size, self.unit = first.vocab_size, first.unit
        content = repr([(source.fingerprint, share) for source, share in self._shares()])
        self.fingerprint = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        """Episodes of all sources; a TypeError if one has no end."""
        return sum(map(len, self.sources))

    def __repr__(self) -> str:
        return f"Mixture({self.sources!r}, {self.probabilities!r})"

    def _shares(self) -> list[tuple[EpisodeSource, float]]:
        return list(zip(self.sources, self.probabilities, strict=True))

    @property
    def tokens_per_epoch(self) -> int | float:
        """Tokens until the first source has been read once."""
        tokens = min(source.tokens_per_epoch / share for source, share in self._shares())
        return tokens if math.isinf(tokens) else round(tokens)

    def source_of_streams(self, num_streams: int) -> np.ndarray:
        """Number of the source that each stream reads: (num_streams,) int64.

        The streams of a source are spread evenly, so that groups and processes have nearly the same mixture.

        Raises:
            ValueError: there are too few streams for the probabilities.
        """
        exact = np.array(self.probabilities) * num_streams
        counts = np.floor(exact).astype(np.int64)
        order = np.argsort(counts - exact, kind="stable")  # largest remainders first
        counts[order[: num_streams - counts.sum()]] += 1
        for (source, share), count in zip(self._shares(), counts, strict=True):
            if not abs(count / num_streams - share) <= _TOLERANCE * share:
                raise ValueError(
                    f"`probabilities` has {share:g} for {source.name!r}, but of {num_streams} streams {count} would "
                    f"read it; use more streams (batch size, accumulation or processes), or other probabilities."
                )
        sources = np.empty(num_streams, dtype=np.int64)
        given = np.zeros(len(counts))
        for stream in range(num_streams):
            deficit = np.where(given < counts, counts * (stream + 1) / num_streams - given, -np.inf)
            sources[stream] = chosen = int(np.argmax(deficit))
            given[chosen] += 1
        return sources

    def blocks(
        self, num_streams: int, block_size: int, seed: int = 0, *, regime: str = "multi_stream", **options: Any
    ) -> BlockDataset:
        """Blocks of all streams, see [`MultiStreamDataset`]; a ValueError if there are too few streams."""
        return MixedBlocks(self, num_streams, block_size, seed, regime=regime, **options)

    def check_model(self, argument: str, model: PreTrainedModel, window: int | None = None) -> None:
        for source in self.sources:
            source.check_model(argument, model, window)

    def check_training(self, args: TrainingArguments, carries_state: bool) -> None:
        super().check_training(args, carries_state)
        for source in self.sources:
            source.check_training(args, carries_state)
        self.source_of_streams(args.num_streams)

    def first_anchor(self, context_length: int) -> int:
        return max(source.first_anchor(context_length) for source in self.sources)

    def evaluate(self, model: PreTrainedModel, share: EvaluationShare) -> dict[str, float]:
        """The sums of every source, with its number before the name."""
        return {
            f"{number}.{name}": value
            for number, source in enumerate(self.sources, 1)
            for name, value in source.evaluate(model, share).items()
        }

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """The metrics of every source, and their means weighted by the probabilities."""
        parts = []
        for number, source in enumerate(self.sources, 1):
            own = {key.partition(".")[2]: sums[key] for key in sums if key.partition(".")[0] == str(number)}
            parts.append(source.evaluation_metrics(own))
        found = {f"{name}_{number}": value for number, part in enumerate(parts, 1) for name, value in part.items()}
        common = set.intersection(*map(set, parts))
        means = {
            name: sum(share * part[name] for share, part in zip(self.probabilities, parts, strict=True))
            for name in _MEANS
            if name in common
        }
        return means | {name: sum(part[name] for part in parts) for name in _SUMS if name in common} | found

    def limit(self, max_tokens: int) -> "Mixture":
        """The same mixture, of each source at most its share of `max_tokens`."""
        limited = [source.limit(max(1, int(share * max_tokens))) for source, share in self._shares()]
        return Mixture(limited, self.probabilities)

    def describe(self, held_out: bool = False) -> str:
        return "; ".join(
            f"{share:g} of {source.name}: {source.describe(held_out)}" for source, share in self._shares()
        )

    def describe_result(self, metrics: dict[str, Any]) -> str:
        if "bits_per_byte" not in metrics:
            return super().describe_result(metrics)
        each = ", ".join(
            f"{metrics[f'bits_per_byte_{number}']:.3f} on {source.name}"
            for number, source in enumerate(self.sources, 1)
        )
        return f"{metrics['bits_per_byte']:.3f} bits per {self.unit} ({each})"


class MixedBlocks(BlockDataset):
    """Blocks of a [`Mixture`]: the rows of a batch come from the sources of their streams.

    See [`MultiStreamDataset`] for arguments, keys and errors.
    """

    corpus: Mixture

    def __init__(self, corpus: Mixture, *arguments: Any, regime: str = "multi_stream", **options: Any) -> None:
        self._regime = regime
        super().__init__(corpus, *arguments, **options)

    def prepare(self) -> None:
        source_of = self.corpus.source_of_streams(self.num_streams)
        self._parts = [self._parts_of(streams, source_of) for streams in self.stream_groups]

    def _parts_of(self, streams: np.ndarray, source_of: np.ndarray) -> list[tuple[np.ndarray, BlockDataset]]:
        """The rows of a group of streams that each source gives, and the blocks of that source."""
        parts = []
        for number, source in enumerate(self.corpus.sources):
            rows = np.flatnonzero(source_of[streams] == number)
            if not len(rows):
                continue
            own = np.flatnonzero(source_of == number)
            local = np.searchsorted(own, streams[rows])
            options = {"regime": self._regime, "stream_indices": local, "positions": self._positions[own]}
            if self._bookmarks is not None and (bookmarks := np.asarray(self._bookmarks)[own]).any():
                options["bookmarks"] = bookmarks
            blocks = source.blocks(len(own), self.block_size, self.seed, **options)
            if not isinstance(blocks, BlockDataset):
                raise ValueError(f"`sources` has {source.name!r}; its `blocks` must give a `BlockDataset`.")
            parts.append((rows, blocks))
        return parts

    def group_reader(self, group: int) -> GroupReader:
        return _MixedReader([(rows, blocks.group_reader(0)) for rows, blocks in self._parts[group]])


class _MixedReader:
    def __init__(self, parts: list[tuple[np.ndarray, GroupReader]]) -> None:
        self._readers = [reader for _, reader in parts]
        self._order = np.argsort(np.concatenate([rows for rows, _ in parts]))

    def block(self, index: int) -> Block:
        blocks = [reader.block(index) for reader in self._readers]
        marked = [block.bookmarks for block in blocks if block.bookmarks is not None]
        if marked:
            length = max(part.shape[1] for part in marked)
            for block in blocks:
                part = np.zeros((len(block.inputs), 0), np.uint8) if block.bookmarks is None else block.bookmarks
                block.bookmarks = np.pad(part, ((0, 0), (0, length - part.shape[1])))
        names = [field.name for field in fields(Block) if field.name != "bookmarks" or marked]
        joined = {name: np.concatenate([getattr(block, name) for block in blocks]) for name in names}
        return Block(**{name: part[self._order] for name, part in joined.items()})
