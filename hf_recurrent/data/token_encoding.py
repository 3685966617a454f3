"""Encoding of the bytes of documents as token ids, and the check of these ids."""

import hashlib
from functools import cached_property
from typing import Any

import numpy as np


class TokenEncoding:
    """Bytes to checked token ids.

    Args:
        tokenizer: any object with `encode_bytes(data) -> ids`, one id per byte whatever its neighbours, `vocab_size`
            and `eos_token_id`. `None`: ids are the bytes, V = 256, and byte 0 ends an episode.
        binary: no end id; every id may be data.

    Raises:
        ValueError: the tokenizer does not encode single bytes, or has no end id although `binary` is False.
    """

    def __init__(self, tokenizer: Any = None, binary: bool = False) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = 256
        self.end_token_id: int | None = None if binary else 0
        if tokenizer is not None:
            if not hasattr(tokenizer, "encode_bytes"):
                raise ValueError(
                    f"`tokenizer` is of type {type(tokenizer).__name__}; it must have `encode_bytes`, like "
                    "ByteTokenizer and DNATokenizer."
                )
            self.vocab_size = int(tokenizer.vocab_size)
            if not binary:
                if tokenizer.eos_token_id is None:
                    raise ValueError(
                        f"`tokenizer` is a {type(tokenizer).__name__} without an `eos_token_id` to end episodes; "
                        "set one, or pass `binary=True`."
                    )
                self.end_token_id = int(tokenizer.eos_token_id)
        self.dtype = np.dtype(np.uint8 if self.vocab_size <= 256 else np.uint16)

    def encode(self, data: bytes, name: str) -> np.ndarray:
        """The ids of `data`, a piece of the document `name`: (T,)."""
        table, refused = self._table
        # Searching for a single byte is much faster than removing several.
        if refused in data if len(refused) == 1 else len(data.translate(None, refused)) != len(data):
            raise self._error(next(byte for byte in data if byte in refused), name)
        if self.dtype == np.uint16:
            return table[np.frombuffer(data, dtype=np.uint8)]
        return np.frombuffer(data if self.tokenizer is None else data.translate(table.tobytes()), dtype=np.uint8)

    def key(self) -> list:
        """JSON that determines the ids."""
        if self.tokenizer is None:
            return [None, self.end_token_id]
        table = hashlib.sha256()
        for ids in self._ids_of_bytes:
            table.update(b"outside" if ids is None else ids.astype("<i8").tobytes())
        return [type(self.tokenizer).__name__, self.vocab_size, self.end_token_id, table.hexdigest()]

    @cached_property
    def _ids_of_bytes(self) -> list[np.ndarray | None]:
        """The ids of each of the 256 bytes; None for those outside the alphabet."""
        found: list[np.ndarray | None] = []
        for byte in range(256):
            try:
                ids = [byte] if self.tokenizer is None else self.tokenizer.encode_bytes(bytes([byte]))
                found.append(np.asarray(ids))
            except ValueError:
                found.append(None)
        return found

    @cached_property
    def _table(self) -> tuple[np.ndarray, bytes]:
        """The id of every byte (256,), and the bytes that a document must not hold."""
        table, refused = np.zeros(256, dtype=self.dtype), bytearray()
        for byte, ids in enumerate(self._ids_of_bytes):
            if ids is None or not 0 <= ids[0] < self.vocab_size or ids[0] == self.end_token_id:
                refused.append(byte)
            else:
                table[byte] = ids[0]
        return table, bytes(refused)

    def _error(self, byte: int, name: str) -> ValueError:
        ids = self._ids_of_bytes[byte]
        if ids is None:
            kind = type(self.tokenizer).__name__
            return ValueError(f"{name} cannot be encoded: byte {bytes([byte])!r} is not in the alphabet of {kind}.")
        if ids[0] == self.end_token_id:
            return ValueError(
                f"{name} holds token id {self.end_token_id} (byte 0 in byte corpora), which ends an episode; "
                "pass `binary=True` if it is data."
            )
        return ValueError(f"{name} holds token id {ids[0]}; ids must be below {self.vocab_size}.")
