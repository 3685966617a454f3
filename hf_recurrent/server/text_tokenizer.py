"""A tokenizer of words as one of bytes: text to tokens, and each token as its bytes.

Text is decoded token by token, so that a stream never waits for more than the rest of a character, and a stop string
may begin and end anywhere.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"  # of SentencePiece


class TextTokenizer:
    """The methods of a byte tokenizer for another one, whose own attributes it has, too.

    The model may have more tokens, `vocab_size`, than the tokenizer; the others have no bytes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int):
        self.tokenizer, self._vocab_size = tokenizer, vocab_size

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # a copy has none yet
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def encode_bytes(self, text: bytes, *, begins: bool = False) -> np.ndarray:
        """The tokens of a text in UTF-8; raises a ValueError if it is not.

        `begins` adds the tokens that the tokenizer puts at the beginning and end of a text.
        """
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"it is not UTF-8 ({error}), and this model has no tokens of bytes.") from error
        return np.array(self.tokenizer(decoded, add_special_tokens=begins)["input_ids"], dtype=np.int64)

    def decode_bytes(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        """The bytes of tokens; special ones have none."""
        known = self.token_bytes
        return b"".join(known[token] for token in tokens)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of every token; none for special ones."""
        ids, added = range(min(len(self.tokenizer), self._vocab_size)), self.tokenizer.added_tokens_decoder
        names = self.tokenizer.convert_ids_to_tokens(list(ids))
        special = {*self.tokenizer.all_special_ids, *(token for token, text in added.items() if text.special)}
        of_name = self._bytes_of_names()
        found = [b""] * self._vocab_size
        for token, name in zip(ids, names, strict=True):
            if token in special or name is None:
                continue
            found[token] = added[token].content.encode() if token in added else of_name(token, name)
        return found

    def name(self, token: int) -> str:
        """A token as clients see it: its text, its parts as bytes, or the name of a special one."""
        data = self.token_bytes[token]
        if not data:
            name = self.tokenizer.convert_ids_to_tokens(token) if token < len(self.tokenizer) else None
            return f"<{token}>" if name is None else name
        return shown_bytes(data)

    def _bytes_of_names(self) -> Any:
        """The bytes of a token, given its id and name."""
        kinds = _decoder_kinds(self.tokenizer)
        if "ByteLevel" in kinds:
            byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
            return lambda token, name: b"".join(
                bytes([byte_of[letter]]) if letter in byte_of else letter.encode() for letter in name
            )
        if kinds & {"ByteFallback", "Metaspace", "Replace"}:
            return lambda token, name: (
                bytes([int(found[1], 16)]) if (found := _BYTE.fullmatch(name)) else name.replace(_SPACE, " ").encode()
            )
        # What the token adds to another one. A token that is part of a character has no bytes then.
        anchor = next(token for token in range(len(self.tokenizer)) if self._decoded([token]).strip().isalpha())
        before = self._decoded([anchor])

        def added(token: int, name: str) -> bytes:
            after = self._decoded([anchor, token])
            return after[len(before) :].encode() if after.startswith(before) else b""

        return added

    def _decoded(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


def shown_bytes(data: bytes) -> str:
    """The bytes of a token as OpenAI writes them: its text, or bytes:\\xNN for a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _decoder_kinds(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The types of a fast tokenizer's decoders; empty for another tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else json.loads(backend.to_str())["decoder"]
    return set() if decoder is None else {part["type"] for part in decoder.get("decoders", [decoder])}
