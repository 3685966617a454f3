"""Encoding of the bytes of documents as token ids, and the check of these ids."""

import hashlib
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
        self._tokenizer = tokenizer
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
        """The ids of `data`, a piece of the document `name`: (T,).

        Raises:
            ValueError: a byte outside the alphabet, an id of V or more, or the end id within the document.
        """
        if self._tokenizer is None:
            ids = np.frombuffer(data, dtype=np.uint8)
        else:
            try:
                ids = np.asarray(self._tokenizer.encode_bytes(data))
            except ValueError as error:
                raise ValueError(f"{name} cannot be encoded: {error}") from error
            if len(ids) and ids.max() >= self.vocab_size:
                raise ValueError(f"{name} holds token id {ids.max()}; ids must be below {self.vocab_size}.")
        if self.end_token_id is not None and (ids == self.end_token_id).any():
            raise ValueError(
                f"{name} holds token id {self.end_token_id} (byte 0 in byte corpora), which ends an episode; "
                "pass `binary=True` if it is data."
            )
        return ids.astype(self.dtype, copy=False)

    def key(self) -> list:
        """JSON that determines the ids."""
        if self._tokenizer is None:
            return [None, self.end_token_id]
        table = hashlib.sha256()
        for byte in range(256):
            try:
                table.update(np.asarray(self._tokenizer.encode_bytes(bytes([byte]))).astype("<i8").tobytes())
            except ValueError:
                table.update(b"outside")
        return [type(self._tokenizer).__name__, self.vocab_size, self.end_token_id, table.hexdigest()]
