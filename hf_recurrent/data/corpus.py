"""`Corpus`: episodes concatenated in one array of token ids, usually memory-mapped."""

import hashlib
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_recurrent.data.block_dataset import BlockDataset
from hf_recurrent.data.document_order import hash_integers
from hf_recurrent.data.episode_losses import carried_token_losses, evaluation_mode, window_losses, zero_sums
from hf_recurrent.data.episode_source import EpisodeSource, EvaluationShare
from hf_recurrent.data.packing import open_packed
from hf_recurrent.data.quantities import count_of, with_unit
from hf_recurrent.data.streams import EvaluationStreams, IIDDataset, MultiStreamDataset
from hf_recurrent.data.token_encoding import TokenEncoding
from hf_recurrent.modeling.block.recurrent_state import supports_recurrent_state
from hf_recurrent.stock_models.with_state import with_state


class Corpus(EpisodeSource):
    """Episodes as token ids. `corpus[i]` is episode i, `len(corpus)` the number of episodes.

    Args:
        tokens: (total length,) uint8 or uint16 ids below `vocab_size`, all episodes concatenated.
        offsets: (episodes + 1,) integers, the start of each episode and the end of the last.
        vocab_size: V.
        end_token_id: target of the last byte of an episode; occurs in no episode. None for binary corpora, whose last
            bytes have no target.
        name: name in messages, model cards and progress bars.
        fingerprint: identifies the content; by default computed from it when first needed.
        unit: "byte", "symbol" or "pixel", the meaning of one token.

    Raises:
        ValueError: an array has another type or shape, or there are no episodes, or an empty one.
    """

    end_token_id: int | None

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        *,
        vocab_size: int = 256,
        end_token_id: int | None = 0,
        name: str = "corpus",
        fingerprint: str | None = None,
        unit: str = "byte",
    ) -> None:
        if tokens.ndim != 1 or tokens.dtype not in (np.uint8, np.uint16):
            raise ValueError(f"`tokens` is {tokens.dtype} {tokens.shape}; it must be one-dimensional uint8 or uint16.")
        offsets = np.asarray(offsets)
        if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or len(offsets) < 2:
            raise ValueError(f"`offsets` is {offsets.dtype} {offsets.shape}; it must be at least two integers.")
        if offsets[0] != 0 or offsets[-1] != len(tokens):
            raise ValueError(f"`offsets` go from {offsets[0]} to {offsets[-1]}; they must go from 0 to {len(tokens)}.")
        starts, ends = offsets[:-1], offsets[1:]
        if not (ends > starts).all():
            raise ValueError(f"`offsets` make episode {int(np.argmin(ends > starts))} empty; they must increase.")
        self._set(tokens, starts, ends, vocab_size=vocab_size, end_token_id=end_token_id, name=name, unit=unit)
        if fingerprint is not None:
            self.fingerprint = fingerprint

    def _set(self, store: np.ndarray, starts: np.ndarray, ends: np.ndarray, **properties: Any) -> "Corpus":
        # A selection shares the store of the corpus that it was made from: nothing large is copied.
        self._store, self.starts, self.ends = store, starts, ends
        self.store = np.asarray(store)  # the same memory; slices of a plain array cost less than slices of a memmap
        self.__dict__.update(properties)
        return self

    @classmethod
    def from_documents(
        cls, documents: Iterable[bytes | str], tokenizer: Any = None, *, name: str = "documents", binary: bool = False
    ) -> "Corpus":
        """Build a corpus in memory. Empty documents are skipped; text is encoded as UTF-8.

        Raises:
            ValueError: all documents are empty, or one contains the end id (byte 0) and `binary` is not set.
        """
        encoding = TokenEncoding(tokenizer, binary)
        pieces = []
        for number, document in enumerate(documents):
            data = document.encode("utf-8") if isinstance(document, str) else bytes(document)
            if data:
                pieces.append(encoding.encode(data, f"document {number}"))
        if not pieces:
            raise ValueError(f"Corpus {name!r} is empty; its documents must have at least one byte.")
        offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
        ids = {"vocab_size": encoding.vocab_size, "end_token_id": encoding.end_token_id}
        return cls(np.concatenate(pieces), offsets, name=name, **ids)

    @classmethod
    def open(cls, directory: Path, name: str, unit: str = "byte") -> "Corpus":
        """Open the corpus that [`pack_once`] wrote to a directory."""
        tokens, offsets, metadata = open_packed(directory)
        properties = {key: metadata[key] for key in ("vocab_size", "end_token_id", "fingerprint")}
        # Without `__init__`: packed corpora are consistent, and checking every offset would be slow.
        return cls.__new__(cls)._set(tokens, offsets[:-1], offsets[1:], name=name, unit=unit, **properties)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> np.ndarray:
        """Token ids of one episode, a read-only view, uint8 or uint16."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"`index` is {index}; the corpus has {len(self)} episodes.")
        episode = self.store[self.starts[index] : self.ends[index]]
        episode.flags.writeable = False
        return episode

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"Corpus({self.name!r}, {len(self):,} episodes, {self.num_bytes:,} bytes, V={self.vocab_size})"

    @cached_property
    def num_bytes(self) -> int:
        """Total length of the episodes, without end ids."""
        return int((self.ends - self.starts).sum())

    @property
    def tokens_per_epoch(self) -> int:
        return self.num_bytes

    @cached_property
    def offsets(self) -> np.ndarray:
        """Start of each episode if all are concatenated, and the end of the last: (episodes + 1,) int64."""
        return np.concatenate([[0], np.cumsum(self.ends - self.starts)]).astype(np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the content."""
        content = hashlib.blake2b(digest_size=16)
        content.update(f"{self.vocab_size} {self.end_token_id}".encode())
        content.update(self.offsets.tobytes())
        for episode in self:
            content.update(np.ascontiguousarray(episode))
        return content.hexdigest()

    def select(self, indices: Sequence[int] | np.ndarray) -> "Corpus":
        """Select episodes, in the given order, without copying them.

        Raises:
            ValueError: there is no index, or one is out of range.
        """
        chosen = np.asarray(indices)
        if chosen.ndim != 1 or not len(chosen) or chosen.dtype.kind not in "iu":
            raise ValueError(f"`indices` is {chosen.dtype} {chosen.shape}; it must be a list of at least one integer.")
        if chosen.min() < 0 or chosen.max() >= len(self):
            least, most = chosen.min(), chosen.max()
            raise ValueError(f"`indices` are from {least} to {most}; they must be from 0 to {len(self) - 1}.")
        return self._part(self.starts[chosen], self.ends[chosen])

    def split(self, validation_fraction: float = 0.05, seed: int = 0) -> tuple["Corpus", "Corpus"]:
        """Split into training and validation corpus, neither of them empty; every episode is in exactly one.

        The held-out episodes depend on the number of episodes, the seed and the fraction, not on the platform. A
        single episode is cut, and its last `validation_fraction` held out.

        Raises:
            ValueError: the fraction is not between 0 and 1, or there is a single episode of a single byte.
        """
        if not 0 < validation_fraction < 1:
            raise ValueError(f"`validation_fraction` is {validation_fraction}; it must be between 0 and 1.")
        total = len(self)
        if total == 1:
            return self._cut(validation_fraction)
        num_held_out = min(max(round(total * validation_fraction), 1), total - 1)
        ranks = hash_integers(seed, np.arange(total))  # all different
        held_out = np.zeros(total, dtype=bool)
        held_out[np.argpartition(ranks, num_held_out - 1)[:num_held_out]] = True
        return self.select(np.flatnonzero(~held_out)), self.select(np.flatnonzero(held_out))

    def _cut(self, validation_fraction: float) -> tuple["Corpus", "Corpus"]:
        length = self.num_bytes
        if length == 1:
            raise ValueError(f"Corpus {self.name!r} is one episode of one byte, which cannot be split.")
        border = self.starts[:1] + min(max(length - round(length * validation_fraction), 1), length - 1)
        return self._part(self.starts, border), self._part(border, self.ends)

    def _part(self, starts: np.ndarray, ends: np.ndarray) -> "Corpus":
        # A hash of this corpus's fingerprint: the content of the part is not read.
        content = hashlib.blake2b(self.fingerprint.encode(), digest_size=16)
        content.update(np.stack([starts, ends]).astype("<i8").tobytes())
        properties = {key: getattr(self, key) for key in ("vocab_size", "end_token_id", "name", "unit")}
        starts, ends = (np.asarray(part, dtype=np.int64) for part in (starts, ends))
        return Corpus.__new__(Corpus)._set(self._store, starts, ends, fingerprint=content.hexdigest(), **properties)

    def __getstate__(self) -> dict:
        # A memory-mapped file is pickled as its name: worker processes map it again.
        state = {key: value for key, value in self.__dict__.items() if key not in ("store", "_store")}
        store = self._store
        if isinstance(store, np.memmap) and isinstance(store.base, mmap.mmap) and store.filename is not None:
            state["_file"] = (os.fspath(store.filename), store.dtype, store.offset, store.shape)
        else:
            state["_store"] = store
        return state

    def __setstate__(self, state: dict) -> None:
        if "_file" in state:
            filename, dtype, offset, shape = state.pop("_file")
            state["_store"] = np.memmap(filename, dtype=dtype, mode="r", offset=offset, shape=shape)
        self.__dict__.update(state)
        self.store = np.asarray(self._store)

    # ---- As a source of episodes ----

    def blocks(
        self, num_streams: int, block_size: int, seed: int = 0, *, regime: str = "multi_stream", **options: Any
    ) -> BlockDataset:
        """[`MultiStreamDataset`], or [`IIDDataset`] for the regime "iid"."""
        dataset_class = MultiStreamDataset if regime == "multi_stream" else IIDDataset
        return dataset_class(self, num_streams, block_size, seed, **options)

    def limit(self, max_tokens: int) -> "Corpus":
        """Select whole episodes with at most `max_tokens` in total, taken in a fixed random order.

        Raises:
            ValueError: every episode is longer than `max_tokens`.
        """
        if self.num_bytes <= max_tokens:
            return self
        order = np.random.default_rng(0).permutation(len(self))
        lengths = self.ends - self.starts
        chosen, total = [], 0
        for index in order:
            if total + lengths[index] <= max_tokens:
                chosen.append(index)
                total += lengths[index]
        if not chosen:
            raise ValueError(f"`max_tokens` is {max_tokens}; the shortest episode has {lengths.min()} {self.unit}s.")
        return self.select(np.sort(chosen))

    def evaluate(self, model: PreTrainedModel, share: EvaluationShare) -> dict[str, float]:
        """Sum of `nats` over the episodes of a share, see [`evaluate_bits_per_byte`].

        With a count memory also `network_nats`, of the network alone.
        """
        corpus, sums = self, zero_sums(model)
        if share.count > 1:
            by_length = np.argsort(self.starts - self.ends, kind="stable")[share.index :: share.count]
            if not len(by_length):
                return sums
            corpus = self.select(np.sort(by_length))
        bar = tqdm(total=corpus.num_bytes, unit="B", unit_scale=True, desc="evaluating", disable=not share.progress)
        if share.carry_state and supports_recurrent_state(with_state(model)):
            batches = EvaluationStreams(corpus, share.batch_size, share.block_size)
            losses = carried_token_losses(model, batches, share.batch_size)
        else:
            losses = window_losses(model, corpus, share.batch_size, share.block_size)
        read = 0
        with evaluation_mode(model), torch.inference_mode(), bar:
            for block in losses:
                sums = {name: sums[name] + value for name, value in block.sums.items()}
                read += block.num_bytes
                bar.update(block.num_bytes)
                bits = sums["nats"] / math.log(2) / max(read, 1)
                bar.set_postfix_str(f"{bits:.3f} bits per {self.unit}", refresh=False)
        return sums

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        num_targets = self.num_bytes - (len(self) if self.end_token_id is None else 0)
        names = {"bits_per_byte": "nats", "network_bits_per_byte": "network_nats"}
        bits = {name: sums[part] / math.log(2) / self.num_bytes for name, part in names.items() if part in sums}
        size = {"num_bytes": int(self.num_bytes), "num_episodes": len(self)}
        return {"loss": sums["nats"] / max(num_targets, 1)} | bits | size

    def describe(self, held_out: bool = False) -> str:
        return f"{count_of(len(self), 'document')}, {with_unit(self.num_bytes, 'B')}"

    def describe_result(self, metrics: dict[str, Any]) -> str:
        words = f"{metrics['bits_per_byte']:.3f} bits per {self.unit}"
        if "network_bits_per_byte" in metrics:
            words += f" (network alone {metrics['network_bits_per_byte']:.3f})"
        if "num_episodes" not in metrics:
            return words
        documents = count_of(metrics["num_episodes"], "held-out document")
        return f"{words} on {documents} ({with_unit(metrics['num_bytes'], 'B')})"
