"""`StreamedDocuments`: a dataset read document by document while it streams, without packing, with exact resuming."""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from hf_recurrent.data.block_dataset import Block, BlockDataset, make_block
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.dataset_sources import batch_rows, dataset_name, only_column, read_errors
from hf_recurrent.data.episode_source import EpisodeSource, EvaluationShare
from hf_recurrent.data.token_encoding import TokenEncoding

_ROWS_AT_ONCE = 64
_EVALUATED_BYTES = 10**6


class StreamedDocuments(EpisodeSource):
    """Documents of a `datasets.IterableDataset`, each an episode, read while it streams: nothing is packed or copied.

    Stream k of n reads the shards k, k + n, …, of the dataset, in its order, again and again. With fewer shards than
    streams, the streams of a shard take its documents in turns, and each of them reads the whole shard. So a dataset
    should have at least as many shards as there are streams. Documents that were interleaved (with probabilities) or
    shuffled by `datasets` are read in that order; each pass over the data is another epoch of it.

    A checkpoint holds the `state_dict` of the dataset for each stream, and resuming loads it: at most one shard is
    read again. A shuffle buffer has no such state, so its epoch is read again from the beginning; the documents are
    the same.

    Args:
        dataset: the dataset. Its documents must not depend on anything but its epoch.
        tokenizer, text_column, binary: see [`load_corpus`].
        name: name in messages and model cards; by default the dataset's.
        fingerprint: identifies the content; by default a hash of the first document and the number of shards.

    Raises:
        ValueError: the dataset has no such column or no document, or the tokenizer is unsuitable.
    """

    tokens_per_epoch = math.inf

    def __init__(
        self,
        dataset: Any,
        *,
        tokenizer: Any = None,
        text_column: str = "text",
        binary: bool = False,
        name: str | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self.name = dataset_name(dataset) if name is None else name
        self.dataset = only_column(self.name, dataset, text_column).with_format(None)
        self.text_column = text_column
        self.encoding = TokenEncoding(tokenizer, binary)
        self.vocab_size, self.end_token_id = self.encoding.vocab_size, self.encoding.end_token_id
        self._held_out: tuple[float, int, bool] | None = None
        if fingerprint is None:
            fingerprint = hashlib.blake2b(next(self._texts())[1], digest_size=16).hexdigest()
        content = [fingerprint, self.dataset.num_shards, text_column, self.encoding.key()]
        self.fingerprint = hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    def __repr__(self) -> str:
        return f"StreamedDocuments({self.name!r}, {self.dataset.num_shards} shards, V={self.vocab_size})"

    def split(
        self, validation_fraction: float = 0.05, seed: int = 0
    ) -> tuple["StreamedDocuments", "StreamedDocuments"]:
        """Split into training and held-out documents by a hash of each document, so that equal ones stay together.

        Raises:
            ValueError: the fraction is not between 0 and 1.
        """
        if not 0 < validation_fraction < 1:
            raise ValueError(f"`validation_fraction` is {validation_fraction}; it must be between 0 and 1.")
        return self._part(validation_fraction, seed, False), self._part(validation_fraction, seed, True)

    def _part(self, fraction: float, seed: int, is_held_out: bool) -> "StreamedDocuments":
        part = StreamedDocuments.__new__(StreamedDocuments)
        part.__dict__.update(self.__dict__)
        part._held_out = (fraction, seed, is_held_out)
        content = repr([self.fingerprint, part._held_out]).encode()
        part.fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()
        return part

    def keeps(self, text: bytes) -> bool:
        """True for a document of this part that is not empty."""
        if self._held_out is None or not text:
            return bool(text)
        fraction, seed, is_held_out = self._held_out
        rank = int.from_bytes(hashlib.blake2b(text, digest_size=8, salt=str(seed).encode()[:16]).digest())
        return (rank < fraction * 2**64) == is_held_out

    def rows(self, batch: dict[str, list], first: int) -> Iterator[tuple[str, bytes]]:
        """Name and text of every row of a batch, which begins with row `first`; empty texts are included."""
        return batch_rows(self.name, batch, self.text_column, first)

    def _texts(self) -> Iterator[tuple[str, bytes]]:
        """Name and text of every document, in the order of the dataset; a ValueError if there is none."""
        first, found = 0, False
        self.dataset.set_epoch(0)
        with read_errors(self.name):
            for batch in self.dataset.iter(batch_size=_ROWS_AT_ONCE):
                for name, text in self.rows(batch, first):
                    if self.keeps(text):
                        found = True
                        yield name, text
                first += len(batch[self.text_column])
        if not found:
            raise ValueError(f"{self.name} has no{' held-out' if self._held_out else ''} documents.")

    def limit(self, max_tokens: int) -> Corpus:
        """Read the first documents, at most `max_tokens` in total, into memory; the first is cut if it is longer."""
        documents, total = [], 0
        for _, text in self._texts():
            if total + len(text) > max_tokens:
                break
            documents.append(text)
            total += len(text)
        tokenizer, binary = self.encoding.tokenizer, self.end_token_id is None
        documents = documents or [text[:max_tokens]]
        return Corpus.from_documents(documents, tokenizer, name=self.name, binary=binary)

    @cached_property
    def _evaluated(self) -> Corpus:
        return self.limit(_EVALUATED_BYTES)

    # ---- As a source of episodes ----

    def blocks(
        self, num_streams: int, block_size: int, seed: int = 0, *, regime: str = "multi_stream", **options: Any
    ) -> "StreamedBlocks":
        """Blocks of all streams, see [`MultiStreamDataset`]; a ValueError for the regime "iid"."""
        if regime != "multi_stream":
            raise ValueError(f"`regime` is {regime!r}; documents that are not packed have only 'multi_stream'.")
        return StreamedBlocks(self, num_streams, block_size, seed, **options)

    def check_training(self, args: Any, carries_state: bool) -> None:
        super().check_training(args, carries_state)
        if args.dataloader_num_workers:
            raise ValueError(
                f"`dataloader_num_workers` is {args.dataloader_num_workers}; documents that are not packed are read "
                "in the process that trains, so it must be 0: each worker would read the whole dataset."
            )

    def evaluate(self, model: Any, share: EvaluationShare) -> dict[str, float]:
        """As [`Corpus`], on the first 10^6 bytes; [`limit`] gives another number of them."""
        return self._evaluated.evaluate(model, share)

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return self._evaluated.evaluation_metrics(sums)

    def describe(self, held_out: bool = False) -> str:
        return self._evaluated.describe(held_out) if held_out else f"streamed, {self.dataset.num_shards} shards"

    def describe_result(self, metrics: dict[str, Any]) -> str:
        return self._evaluated.describe_result(metrics)


@dataclass(frozen=True)
class Bookmark:
    """A place in the documents of a stream from which reading can begin.

    Attributes:
        documents: documents of the stream before this place.
        epoch: epoch of the dataset.
        rows: rows read in this epoch, those for other streams and empty ones included.
        state: `state_dict` of the dataset; None at the beginning of an epoch.
    """

    documents: int = 0
    epoch: int = 0
    rows: int = 0
    state: dict | None = None

    @cached_property
    def encoded(self) -> bytes:
        """JSON, which is stored with the position of a stream."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def decode(cls, row: np.ndarray) -> "Bookmark":
        """From (L,) uint8, padded with zeros; the beginning if it has nothing else."""
        text = row.tobytes().rstrip(b"\0")
        return cls(**json.loads(text)) if text else cls()


class StreamedBlocks(BlockDataset):
    """Blocks of [`StreamedDocuments`]; see [`MultiStreamDataset`] for arguments, keys and errors.

    Batches have `stream_bookmarks` (B, L) uint8, too: JSON with the state of the dataset of every stream, near its
    position after the block. Without `bookmarks`, `positions` are found by reading from the beginning. There is no
    random order, so the seed has no effect. DataLoader workers are refused.
    """

    corpus: StreamedDocuments

    def group_reader(self, group: int) -> "_GroupReader":
        if get_worker_info() is not None:
            raise ValueError("`num_workers` must be 0 for documents that are not packed.")
        streams, positions = self.stream_groups[group], self.group_positions[group]
        readers = [
            _StreamReader(self, int(stream), position, Bookmark() if mark is None else Bookmark.decode(mark))
            for stream, position, mark in zip(streams, positions.tolist(), self.group_bookmarks[group], strict=True)
        ]
        return _GroupReader(readers, self.block_size, self.corpus.encoding)


class _StreamReader:
    """The documents of one stream, and the place in them: `number`, `offset` and `bookmark`."""

    def __init__(self, blocks: StreamedBlocks, stream: int, position: list[int], bookmark: Bookmark) -> None:
        self._source, self._stream = blocks.corpus, stream
        dataset = self._source.dataset
        shards = max(1, min(dataset.num_shards, blocks.num_streams))
        self._dataset = dataset.shard(num_shards=shards, index=stream % shards, contiguous=False)
        # The streams of a shard take its documents in turns.
        self._turn, self._turns = stream // shards, len(range(stream % shards, blocks.num_streams, shards))
        self._is_exact = not _has_shuffle_buffer(self._dataset)
        self._documents = self._read(bookmark)
        self.number, self.offset = position
        for _ in range(self.number - bookmark.documents):
            next(self._documents)
        self.tokens, self.bookmark = next(self._documents)
        if self.offset >= len(self.tokens):
            raise ValueError(
                f"`positions` has offset {self.offset} in document {self.number} of stream {stream}, which has "
                f"{len(self.tokens)} bytes; it belongs to another dataset, which may have changed."
            )

    def _read(self, bookmark: Bookmark) -> Iterator[tuple[np.ndarray, Bookmark]]:
        """Tokens of every document from a bookmark on, endlessly, each with a bookmark at or before it."""
        source, documents = self._source, bookmark.documents
        while True:
            epoch, rows, first, is_whole = bookmark.epoch, bookmark.rows, documents, bookmark.rows == 0
            self._dataset.set_epoch(epoch)
            if bookmark.state is not None:
                self._dataset.load_state_dict(bookmark.state)
            with read_errors(source.name):
                for batch in self._dataset.iter(batch_size=_ROWS_AT_ONCE):
                    # Taken before the batch is used, as interleaved datasets read ahead.
                    state = self._dataset.state_dict() if self._is_exact else None
                    for name, text in source.rows(batch, rows):
                        mine = rows % self._turns == self._turn
                        rows += 1
                        if mine and source.keeps(text):
                            yield source.encoding.encode(text, name), bookmark
                            documents += 1
                    if state is not None:
                        bookmark = Bookmark(documents, epoch, rows, state)
            if is_whole and documents == first:
                raise ValueError(
                    f"{source.name} has no document for stream {self._stream}; use fewer streams (batch size, "
                    "accumulation or processes), or pack the dataset."
                )
            bookmark = Bookmark(documents, epoch + 1)

    def fill(self, tokens: np.ndarray, starts: np.ndarray) -> None:
        """Fill the rows (T + 1,) of a block, and move on by T tokens."""
        filled, size = 0, len(tokens) - 1
        while filled < size:
            offset = self.offset
            count = min(len(self.tokens) - offset, size - filled)
            tokens[filled : filled + count] = self.tokens[offset : offset + count]
            starts[filled] = offset == 0
            filled, self.offset = filled + count, offset + count
            if self.offset == len(self.tokens):
                self.number, self.offset = self.number + 1, 0
                self.tokens, self.bookmark = next(self._documents)
        tokens[size], starts[size] = self.tokens[self.offset], self.offset == 0


class _GroupReader:
    def __init__(self, readers: list[_StreamReader], block_size: int, encoding: TokenEncoding) -> None:
        self._readers, self._encoding, self._next = readers, encoding, 0
        self._shape = (len(readers), block_size + 1)

    def block(self, index: int) -> Block:
        """Block `index`, counted from the positions; indices must increase, and skipped blocks are read, too."""
        while self._next <= index:
            tokens, starts = np.empty(self._shape, self._encoding.dtype), np.zeros(self._shape, dtype=bool)
            for row, reader in enumerate(self._readers):
                reader.fill(tokens[row], starts[row])
            self._next += 1
        positions = np.array([(reader.number, reader.offset) for reader in self._readers], dtype=np.int64)
        marks = [reader.bookmark.encoded for reader in self._readers]
        length = max(map(len, marks))
        stored = np.frombuffer(b"".join(mark.ljust(length, b"\0") for mark in marks), np.uint8).reshape(-1, length)
        return make_block(tokens, starts, self._encoding.end_token_id, positions, stored.copy())


def _has_shuffle_buffer(dataset: Any) -> bool:
    """True if the dataset, or one that it was made from, has a shuffle buffer, whose content no state holds."""
    parts = [getattr(dataset, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        parts += [*getattr(part, "ex_iterables", ()), *([part.ex_iterable] if hasattr(part, "ex_iterable") else ())]
    return False
