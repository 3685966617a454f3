"""A corpus: episodes, one after another, in one row of token ids that usually lies in a memory-mapped file."""

import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hf_recurrent.data.document_order import hash_integers
from hf_recurrent.data.packing import FORMAT, fingerprint, open_packed, pack_once
from hf_recurrent.data.pixel_readers import has_test_files, pixel_format
from hf_recurrent.data.sources import resolve
from hf_recurrent.data.token_encoding import TokenEncoding


class Corpus:
    """Episodes as token ids. `corpus[i]` is episode i, `len(corpus)` their number.

    Args:
        tokens: (total length,) uint8 or uint16 ids below `vocab_size`, all episodes one after another.
        offsets: (episodes + 1,) integers, where each episode begins, and the end of the last.
        vocab_size: V.
        end_token_id: the id that the last byte of an episode predicts; it occurs in no episode. `None` for binary
            corpora, where episodes end without one.
        name: for messages, model cards and progress bars.
        fingerprint: tells the content from any other; calculated from the content when it is first asked for, if
            not given.

    Raises:
        ValueError: an array of another type or shape, no episode, or an empty one.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        *,
        vocab_size: int = 256,
        end_token_id: int | None = 0,
        name: str = "corpus",
        fingerprint: str | None = None,
    ) -> None:
        if tokens.ndim != 1 or tokens.dtype not in (np.uint8, np.uint16):
            raise ValueError(f"tokens is {tokens.dtype} {tokens.shape}, allowed is a row of uint8 or uint16")
        offsets = np.asarray(offsets)
        if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or len(offsets) < 2:
            raise ValueError(f"offsets is {offsets.dtype} {offsets.shape}, allowed are at least two integers")
        if offsets[0] != 0 or offsets[-1] != len(tokens):
            raise ValueError(f"offsets run from {offsets[0]} to {offsets[-1]}, allowed is from 0 to {len(tokens)}")
        starts, ends = offsets[:-1], offsets[1:]
        if not (ends > starts).all():
            raise ValueError(f"offsets do not grow at episode {int(np.argmin(ends > starts))}: episodes are not empty")
        self._set(tokens, starts, ends, vocab_size, end_token_id, name, fingerprint)

    def _set(
        self,
        store: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        vocab_size: int,
        end_token_id: int | None,
        name: str,
        fingerprint: str | None,
    ) -> None:
        # A selection shares the store of the corpus it was made from, so that nothing large is ever copied.
        self._store, self.starts, self.ends = store, starts, ends
        self.store = np.asarray(store)  # the same memory; slices of a plain array cost less than those of a memmap
        self.vocab_size, self.end_token_id, self.name = vocab_size, end_token_id, name
        if fingerprint is not None:
            self.fingerprint = fingerprint

    @classmethod
    def from_documents(
        cls, documents: Iterable[bytes | str], tokenizer: Any = None, *, name: str = "documents", binary: bool = False
    ) -> "Corpus":
        """A corpus in memory. Empty documents are left out; text is encoded as UTF-8.

        Raises:
            ValueError: all documents are empty, or one holds the end id (byte 0) although `binary` is not set.
        """
        encoding = TokenEncoding(tokenizer, binary)
        pieces = []
        for number, document in enumerate(documents):
            data = document.encode("utf-8") if isinstance(document, str) else bytes(document)
            if data:
                pieces.append(encoding.encode(data, f"document {number}"))
        if not pieces:
            raise ValueError(f"corpus {name!r} is empty: there is not one byte in its documents")
        offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
        return cls(
            np.concatenate(pieces),
            offsets,
            vocab_size=encoding.vocab_size,
            end_token_id=encoding.end_token_id,
            name=name,
        )

    @classmethod
    def _open(cls, directory: Path, name: str) -> "Corpus":
        tokens, offsets, metadata = open_packed(directory)
        corpus = cls.__new__(cls)  # what packing wrote is consistent: looking at every offset again would be slow
        corpus._set(
            tokens,
            offsets[:-1],
            offsets[1:],
            metadata["vocab_size"],
            metadata["end_token_id"],
            name,
            metadata["fingerprint"],
        )
        return corpus

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> np.ndarray:
        """The token ids of one episode, a read-only view of uint8 or uint16."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"episode {index} of {len(self)}")
        episode = self.store[self.starts[index] : self.ends[index]]
        episode.flags.writeable = False
        return episode

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"Corpus({self.name!r}, {len(self):,} episodes, {self.num_bytes:,} bytes, V={self.vocab_size})"

    @cached_property
    def num_bytes(self) -> int:
        """The length of all episodes together, without end ids."""
        return int((self.ends - self.starts).sum())

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where each episode begins in `tokens`, and the end of the last: (episodes + 1,) int64."""
        return np.concatenate([[0], np.cumsum(self.ends - self.starts)]).astype(np.int64)

    @cached_property
    def tokens(self) -> np.ndarray:
        """All episodes one after another. Memory-mapped as a whole corpus is; of a selection whose episodes do not
        lie side by side this is a copy, made when it is first asked for. Streams never ask for it."""
        if (self.starts[1:] == self.ends[:-1]).all():
            first, last = int(self.starts[0]), int(self.ends[-1])
            return self._store if last - first == len(self._store) else self.store[first:last]
        return np.concatenate(list(self))

    @cached_property
    def fingerprint(self) -> str:
        """Tells the content of this corpus from that of any other."""
        content = hashlib.blake2b(digest_size=16)
        content.update(f"{self.vocab_size} {self.end_token_id}".encode())
        content.update(self.offsets.tobytes())
        for episode in self:
            content.update(np.ascontiguousarray(episode))
        return content.hexdigest()

    def select(self, indices: Sequence[int] | np.ndarray) -> "Corpus":
        """The corpus of these episodes, in this order. Nothing is copied but 16 bytes for each.

        Raises:
            ValueError: no index, or one outside the corpus.
        """
        chosen = np.asarray(indices)
        if chosen.ndim != 1 or not len(chosen) or chosen.dtype.kind not in "iu":
            raise ValueError(f"indices is {chosen.dtype} {chosen.shape}, allowed is a list of at least one integer")
        if chosen.min() < 0 or chosen.max() >= len(self):
            raise ValueError(
                f"indices run from {chosen.min()} to {chosen.max()}, allowed are 0 to {len(self) - 1} (all episodes)"
            )
        return self._part(self.starts[chosen], self.ends[chosen])

    def split(self, validation_fraction: float = 0.05, seed: int = 0) -> tuple["Corpus", "Corpus"]:
        """Training and validation corpus: every episode is in exactly one of them, and neither is empty.

        Which episodes are held out depends on their number, the seed and the fraction, and on no platform. A corpus
        of one episode (one big book) is cut: its last `validation_fraction` is held out.

        Raises:
            ValueError: a fraction that is not between 0 and 1, or a single episode of a single byte.
        """
        if not 0 < validation_fraction < 1:
            raise ValueError(f"validation_fraction is {validation_fraction}, allowed is more than 0 and less than 1")
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
            raise ValueError(f"corpus {self.name!r} is one episode of one byte, which cannot be split")
        place = self.starts[:1] + min(max(length - round(length * validation_fraction), 1), length - 1)
        return self._part(self.starts, place), self._part(place, self.ends)

    def _part(self, starts: np.ndarray, ends: np.ndarray) -> "Corpus":
        part = Corpus.__new__(Corpus)
        # The fingerprint comes from this corpus's own, so that a part of a large one is never read through.
        content = hashlib.blake2b(self.fingerprint.encode(), digest_size=16)
        content.update(np.stack([starts, ends]).astype("<i8").tobytes())
        part._set(
            self._store,
            np.asarray(starts, dtype=np.int64),
            np.asarray(ends, dtype=np.int64),
            self.vocab_size,
            self.end_token_id,
            self.name,
            content.hexdigest(),
        )
        return part

    def __getstate__(self) -> dict:
        # Sent to a worker process, a mapped file is its name, not its content.
        state = {key: value for key, value in self.__dict__.items() if key not in ("store", "tokens", "_store")}
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


def load_corpus(
    source: str | os.PathLike | Sequence[str | os.PathLike] = "python",
    *,
    tokenizer: Any = None,
    text_column: str = "text",
    split: str = "train",
    config_name: str | None = None,
    streaming: bool = False,
    max_bytes: int | None = None,
    binary: bool = False,
    cache_dir: str | os.PathLike | None = None,
) -> Corpus:
    """Read documents and pack them, once, into a memory-mapped corpus.

    Args:
        source: one of these, or a list of them:

            * `"python"`: the source of the running Python's standard library, one file an episode;
            * a path, a glob pattern (`**` for folders) or a directory (all files below it). Formats by suffix, each
              also as .gz or .zst: .jsonl/.ndjson and .parquet (a row is an episode), .fasta/.fa/.fna (a record is
              an episode); any other file is text, UTF-8, one episode;
            * a directory written by `datasets.Dataset.save_to_disk`;
            * `"hub:owner/name"`: a dataset of the Hub, or a local folder of the same layout;
            * `"mnist:FOLDER"`: MNIST as it is published (IDX, also .gz), 784 grey levels an episode, V = 256;
            * `"images:FOLDER"`: all images below, each as 64 × 64 binary pixels, of which 2 × 2 are a token: 1024 an
              episode, V = 16. With the folders `train` and `test` in it, those are its splits. Needs Pillow.
        tokenizer: `ByteTokenizer`, `DNATokenizer` or another of that kind; without one the ids are the bytes. Not
            for images, whose tokens are given and have no end id.
        text_column: where rows have their text.
        split: the split of a dataset; of images, "train" or "test".
        config_name: the configuration of a Hub dataset ("sample-10BT").
        streaming: read a Hub dataset over the network while packing, without downloading it first. What was packed
            is used again; a dataset that changed on the Hub since is not noticed.
        max_bytes: take documents in order while they fit in, never a part of one.
        binary: byte 0 is data: files are raw bytes, and episodes have no end byte.
        cache_dir: where packed corpora lie; by default `hf_recurrent/corpora` in the Hugging Face cache.

    A packed corpus is found again as long as the names, sizes and times of the files and the options are the same.
    Empty documents are left out. Packing needs constant memory, and shows a progress bar when it takes long.

    Raises:
        FileNotFoundError: the source is not there.
        ValueError: the source is empty, damaged, not UTF-8, holds byte 0 without `binary`, or has no such column or
            split; the message names the file and what is allowed.
        ImportError: an optional package is missing.
    """
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes is {max_bytes}, allowed is at least 1, or None for all")
    if not isinstance(source, str | os.PathLike):
        source = list(source)
    pixels = pixel_format(source)
    encoding = TokenEncoding(tokenizer, binary) if pixels is None else pixels.encoding()
    parts = resolve(
        source,
        text_column=text_column,
        split=split,
        config_name=config_name,
        streaming=streaming,
        binary=binary,
    )
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else ", ".join(map(os.fspath, source))
    options = [FORMAT, encoding.key(), text_column, max_bytes, binary]
    directory = _cache_directory(cache_dir) / fingerprint([options, [part.key() for part in parts]])
    documents = (document for part in parts for document in part.documents())
    pack_once(directory, lambda: documents, encoding, name, max_bytes)
    return Corpus._open(directory, name)


def load_splits(
    source: str | os.PathLike | Sequence[str | os.PathLike] = "python",
    *,
    validation_fraction: float = 0.05,
    split_seed: int = 0,
    split: str = "train",
    **options: Any,
) -> tuple[Corpus, Corpus]:
    """Training and validation corpus of a source.

    Images that come with test files (`mnist:`, `images:`) are validated on all of those; of anything else, a part is
    held out by [`Corpus.split`].

    Args:
        source, split, options: see [`load_corpus`].
        validation_fraction, split_seed: see [`Corpus.split`].

    Raises:
        FileNotFoundError, ValueError, ImportError: those of [`load_corpus`] and [`Corpus.split`].
    """
    train = load_corpus(source, split=split, **options)
    if split == "train" and has_test_files(source):
        return train, load_corpus(source, split="test", **options)
    return train.split(validation_fraction, split_seed)


def _cache_directory(cache_dir: str | os.PathLike | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "hf_recurrent" / "corpora"
