"""Byte tokenizer: token id = byte value, 256 ids, no merges, no offset; every byte string round-trips.

`AlphabetTokenizer` maps single bytes to ids through a NumPy table. `ByteTokenizer` is the alphabet of all 256 bytes;
smaller alphabets are further subclasses that name their symbols.

`encode_bytes` and `decode_bytes` are exact. `decode` returns text that can be printed and sent: bytes that are not
UTF-8 become U+FFFD. In `str` input, "\\udc80" to "\\udcff" mean the bytes 0x80 to 0xFF, as Python's `surrogateescape`
writes them (https://peps.python.org/pep-0383/).
"""

import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizer, PreTrainedTokenizerFast
from transformers.utils import PaddingStrategy, TensorType

from ..block.configuration_recurrent import Packaged
from .fast_tokenizer import to_fast, to_tokenizers, token_string

TOKENIZER_JSON = "tokenizer.json"
_BYTES_LIKE = (bytes, bytearray, memoryview)


def _character_spans(text: str) -> np.ndarray:
    """Character span (start, end) of every byte of `text`: (number of bytes, 2) int64."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    widths[(points >= 0xDC80) & (points <= 0xDCFF)] = 1  # an escaped byte
    starts = np.repeat(np.arange(len(points), dtype=np.int64), widths)
    return np.stack([starts, starts + 1], axis=1)


def _to_utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"`text` holds {text[error.start]!r} at character {error.start}, a lone surrogate; it must hold Unicode"
            " characters, or '\\udc80' to '\\udcff' for the bytes 0x80 to 0xff."
        ) from None


def _id_array(ids: Any) -> np.ndarray:
    """An int, or a sequence, array or tensor of integers, as a flat array."""
    if isinstance(ids, (list, tuple)):
        try:
            return np.frombuffer(bytes(ids), dtype=np.uint8)  # for ids below 256, much faster than np.asarray
        except (TypeError, ValueError):
            pass
    if hasattr(ids, "detach"):
        ids = ids.detach().cpu()
    array = np.asarray(ids).reshape(-1)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"`token_ids` holds {array.dtype} values such as {array[0]!r}; they must be integers.")
    return array if array.size else array.astype(np.uint8)


def _to_list(array: np.ndarray) -> list:
    return list(array.tobytes()) if array.dtype == np.uint8 else array.tolist()


class AlphabetTokenizer(Packaged, PreTrainedTokenizer):
    """Tokenizer whose tokens are single bytes of an alphabet. Subclasses set the class attributes.

    Byte 0, if it is in the alphabet, ends an episode and is the padding. Encoding adds no tokens; a text pair is the
    two texts concatenated. Padding is on the left by default, as generation needs it. Tokens added with `add_tokens`
    or `add_special_tokens` get ids from V on and are recognized in `str` input, never in `bytes` input.

    Args:
        eos_token, pad_token: `None` for corpora where byte 0 is data, as in binary files.
        errors: Python's error handler for bytes that are not UTF-8 in `decode`: "replace" (U+FFFD), "ignore",
            "surrogateescape" (exact, but cannot be printed or sent) or any other. A saved "surrogateescape" is loaded
            as "replace"; `from_pretrained(..., errors="surrogateescape")` asks for it.
    """

    symbols: bytes = b""
    """The byte of every id: V bytes, all different."""
    aliases: dict[bytes, bytes] = {}  # noqa: RUF012
    """Bytes outside the alphabet → the symbol that they are read as."""
    other_symbol: bytes | None = None
    """The symbol for all other bytes; `None`: they raise a ValueError."""

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012
    padding_side = "left"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        table = np.full(256, -1, dtype=np.int16)
        if cls.other_symbol is not None:
            table[:] = cls.symbols.index(cls.other_symbol)
        table[np.frombuffer(cls.symbols, dtype=np.uint8)] = np.arange(len(cls.symbols))
        for alias, symbol in cls.aliases.items():
            table[alias[0]] = cls.symbols.index(symbol)
        cls._outside = table < 0
        cls._id_of_byte = table.astype(np.uint8)
        cls._byte_of_id = np.frombuffer(cls.symbols, dtype=np.uint8)
        cls._token_of_id = tuple(token_string(byte) for byte in cls.symbols)
        cls._id_of_token = {token: index for index, token in enumerate(cls._token_of_id)}

    def __init__(
        self,
        eos_token: str | None = "\x00",
        pad_token: str | None = "\x00",
        errors: str = "replace",
        **kwargs: Any,
    ) -> None:
        if kwargs.get("special_tokens_pattern") not in (None, "none"):
            raise ValueError(
                f"`special_tokens_pattern` is {kwargs['special_tokens_pattern']!r}; it must be None or 'none', because"
                f" {type(self).__name__} adds no tokens."
            )
        self.errors = errors
        super().__init__(eos_token=eos_token, pad_token=pad_token, errors=errors, **kwargs)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> "AlphabetTokenizer":
        """Load a tokenizer; decoding to surrogates is never taken from a file, only from `errors` given here."""
        tokenizer = super().from_pretrained(*args, **kwargs)
        # "surrogateescape" was the default once, so the files of many checkpoints hold it.
        if "errors" not in kwargs and tokenizer.errors in ("surrogateescape", "surrogatepass"):
            tokenizer.errors = "replace"
        return tokenizer

    # Vocabulary

    @property
    def vocab_size(self) -> int:
        """V, without added tokens; `len(tokenizer)` counts them."""
        return len(self.symbols)

    def get_vocab(self) -> dict[str, int]:
        return {**self._id_of_token, **self._added_tokens_encoder}

    def _convert_token_to_id(self, token: str) -> int | None:
        unknown = None if self.other_symbol is None else self.symbols.index(self.other_symbol)
        return self._id_of_token.get(token, unknown)

    def _convert_id_to_token(self, index: int) -> str:
        self._check_ids(np.asarray([index]))
        return self._token_of_id[index]

    def _check_ids(self, ids: np.ndarray) -> None:
        """Raise a ValueError if an id is neither in the alphabet nor an added token."""
        if not ids.size or (ids.min() >= 0 and ids.max() < self.vocab_size):
            return
        known = set(self._added_tokens_decoder)
        bad = next((int(i) for i in np.unique(ids) if not 0 <= i < self.vocab_size and int(i) not in known), None)
        if bad is not None:
            raise ValueError(
                f"token id {bad} is not in the vocabulary of {type(self).__name__};"
                f" it must be from 0 to {len(self) - 1}."
            )

    # Bytes

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Ids of `data` (bytes, bytearray, memoryview or a uint8 array): (T,) uint8.

        Raises a ValueError for other types and for bytes outside a strict alphabet.
        """
        if not isinstance(data, _BYTES_LIKE) and not (isinstance(data, np.ndarray) and data.dtype == np.uint8):
            raise ValueError(f"`data` is of type {type(data).__name__}; it must be bytes or a uint8 array.")
        values = np.frombuffer(data, dtype=np.uint8)
        if self._outside.any() and (outside := self._outside[values]).any():
            at = int(outside.argmax())
            raise ValueError(
                f"byte {bytes([values[at]])!r} at position {at} is not in the alphabet of {type(self).__name__};"
                f" it must be one of {self.symbols!r}."
            )
        return self._id_of_byte[values]

    def decode_bytes(self, ids: Any, skip_special_tokens: bool = False) -> bytes:
        """Bytes of `ids` (a sequence, array or tensor); an added token becomes the UTF-8 bytes of its string.

        Raises a ValueError for ids that are not integers or not in the vocabulary.
        """
        ids = _id_array(ids)
        self._check_ids(ids)
        if skip_special_tokens:
            ids = ids[~np.isin(ids, self.all_special_ids)]
        added = np.flatnonzero(ids >= self.vocab_size)
        if not added.size:
            return self._byte_of_id[ids].tobytes()
        pieces, start = [], 0
        for at in added.tolist():
            pieces.append(self._byte_of_id[ids[start:at]].tobytes())
            pieces.append(_to_utf8(self._added_tokens_decoder[int(ids[at])].content))
            start = at + 1
        return b"".join(pieces) + self._byte_of_id[ids[start:]].tobytes()

    # Text

    def _added_token_pattern(self) -> tuple[re.Pattern, list[int]] | None:
        """A pattern with one group per added token with an id from V on, longest first, and the id of each group."""
        added = [(token, index) for index, token in self._added_tokens_decoder.items() if index >= self.vocab_size]
        if not added:
            return None
        added.sort(key=lambda item: -len(item[0].content))
        alternatives = []
        for token, _ in added:
            core = f"({re.escape(token.content)})"
            if token.single_word:
                core = f"(?<![^ ]){core}(?![^ ])"
            alternatives.append(("\\s*" if token.lstrip else "") + core + ("\\s*" if token.rstrip else ""))
        return re.compile("|".join(alternatives)), [index for _, index in added]

    def _encode_text(
        self, text: str | bytes, split_special_tokens: bool = False, with_spans: bool = False
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Ids (T,) and, on request, spans (T, 2): of characters for `str`, of bytes for `bytes`."""
        if not isinstance(text, str):
            ids = self.encode_bytes(text)
            positions = np.arange(len(ids), dtype=np.int64)
            return ids, np.stack([positions, positions + 1], axis=1) if with_spans else None
        found = None if split_special_tokens else self._added_token_pattern()
        if found is None:
            return self.encode_bytes(_to_utf8(text)), _character_spans(text) if with_spans else None

        pattern, id_of_group = found
        ids: list[np.ndarray] = []
        spans: list[np.ndarray] = []

        def add_plain(start: int, end: int) -> None:
            ids.append(self.encode_bytes(_to_utf8(text[start:end])))
            if with_spans:
                spans.append(_character_spans(text[start:end]) + start)

        start = 0
        for match in pattern.finditer(text):
            add_plain(start, match.start())
            ids.append(np.array([id_of_group[match.lastindex - 1]]))
            spans.append(np.array([match.span(match.lastindex)]))
            start = match.end()
        add_plain(start, len(text))
        return np.concatenate(ids), np.concatenate(spans) if with_spans else None

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        """Token strings of `text`: one per byte, and one per added token."""
        split_special_tokens = kwargs.get("split_special_tokens", self.split_special_tokens)
        return self.convert_ids_to_tokens(self._encode_text(text, split_special_tokens)[0].tolist())

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [self._token_of_id[index] for index in self._encode_text(text, split_special_tokens=True)[0]]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        ids = [self._convert_token_to_id_with_added_voc(token) for token in tokens]
        if None in ids:
            unknown = tokens[ids.index(None)]
            raise ValueError(f"`tokens` holds {unknown!r}, which is not in the vocabulary of {type(self).__name__}.")
        return self._decode(ids)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str | list[str]:
        """Text of one sequence of ids, or a list of texts for a batch; `errors` overrides that of the tokenizer.

        Raises a ValueError for ids that are not in the vocabulary.
        """
        flat = getattr(token_ids, "ndim", None) in (0, 1) or (
            isinstance(token_ids, (list, tuple)) and len(token_ids) > 0 and isinstance(token_ids[0], int)
        )
        # One sequence does not have to become a Python list.
        decode = self._decode if flat else super().decode
        return decode(token_ids, skip_special_tokens=skip_special_tokens, **kwargs)

    def _decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        errors: str | None = None,
        **kwargs: Any,
    ) -> str:
        # Tokenization has added no spaces, so cleaning up, as pipelines request, would change the text.
        data = self.decode_bytes(token_ids, skip_special_tokens=skip_special_tokens)
        return data.decode("utf-8", errors=errors or self.errors)

    # Batches

    def _encode_sequence(
        self, sequence: Any, is_split_into_words: bool, split_special_tokens: bool, with_spans: bool
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Ids and spans of one input: a text, bytes, a list of ids, or a list of words."""
        if isinstance(sequence, (str, *_BYTES_LIKE)):
            return self._encode_text(sequence, split_special_tokens, with_spans)
        if isinstance(sequence, (list, tuple)):
            if is_split_into_words and all(isinstance(word, (str, *_BYTES_LIKE)) for word in sequence):
                words = [self._encode_text(word, split_special_tokens, with_spans) for word in ["", *sequence]]
                ids = np.concatenate([ids for ids, _ in words])
                return ids, np.concatenate([spans for _, spans in words]) if with_spans else None
            if all(isinstance(index, (int, np.integer)) for index in sequence):
                if with_spans:
                    raise ValueError(
                        "`text` is a list of token ids; with `return_offsets_mapping` it must be text or bytes."
                    )
                ids = _id_array(sequence)
                self._check_ids(ids)
                return ids, None
        raise ValueError(
            f"`text` is of type {type(sequence).__name__}; it must be a str, bytes, a list of token ids, a list of"
            " words with `is_split_into_words=True`, or for a batch a list of these."
        )

    def _split_batch(self, text: Any, text_pair: Any, is_split_into_words: bool) -> tuple[bool, list[tuple[Any, Any]]]:
        """True for a batch, and the pairs (text, second text or None) of the input."""
        batched = isinstance(text, (list, tuple)) and (
            isinstance(text[0], (list, tuple) if is_split_into_words else (str, *_BYTES_LIKE, list, tuple))
            if text
            else not is_split_into_words
        )
        if not batched:
            return False, [(text, text_pair)]
        if text_pair is not None:
            if not isinstance(text_pair, (list, tuple)) or len(text_pair) != len(text):
                raise ValueError(
                    f"`text_pair` is {text_pair!r:.80}; it must be a list of {len(text)} texts, as `text`."
                )
            return True, list(zip(text, text_pair, strict=True))
        pairs = []
        for item in text:
            is_ids = isinstance(item, (list, tuple)) and all(isinstance(part, (int, np.integer)) for part in item)
            if not isinstance(item, (list, tuple)) or is_ids or (is_split_into_words and isinstance(item, list)):
                pairs.append((item, None))
            elif len(item) in (1, 2):
                pairs.append((item[0], item[1] if len(item) == 2 else None))
            else:
                raise ValueError(
                    f"`text` holds an item of {len(item)} sequences; it must be a text or a pair of texts."
                )
        return True, pairs

    def _encode_plus(
        self,
        text: Any,
        text_pair: Any = None,
        add_special_tokens: bool = True,
        padding_strategy: PaddingStrategy = PaddingStrategy.DO_NOT_PAD,
        truncation_strategy: Any = "do_not_truncate",
        max_length: int | None = None,
        stride: int = 0,
        is_split_into_words: bool = False,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | TensorType | None = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        return_overflowing_tokens: bool = False,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
        verbose: bool = True,
        split_special_tokens: bool | None = None,
        **kwargs: Any,
    ) -> BatchEncoding:
        """Encode for `__call__` and `encode`, on arrays instead of lists of tokens."""
        if kwargs.get("sanitize_control_tokens") and isinstance(text, str):
            from transformers.utils.chat_template_utils import encode_marked_chat

            text = encode_marked_chat(self, text)
        if max_length is not None and max_length < 0:
            raise ValueError(f"`max_length` is {max_length}; it must be at least 0.")
        truncation = getattr(truncation_strategy, "value", truncation_strategy)
        split_special_tokens = self.split_special_tokens if split_special_tokens is None else split_special_tokens
        asked = {
            "attention_mask": return_attention_mask,
            "token_type_ids": return_token_type_ids,
        }
        asked = {name: name in self.model_input_names if value is None else value for name, value in asked.items()}

        batched, pairs = self._split_batch(text, text_pair, is_split_into_words)
        rows, extras = [], []
        for first, second in pairs:
            parts = [
                self._encode_sequence(part, is_split_into_words, split_special_tokens, return_offsets_mapping)
                for part in (first, second)
                if part is not None or part is first
            ]
            overflow: Sequence[int] = ()
            removed = 0
            if truncation != "do_not_truncate" and max_length is not None:
                if return_overflowing_tokens and len(parts) == 2 and truncation == "longest_first":
                    raise ValueError(
                        "`truncation` is 'longest_first'; with `return_overflowing_tokens` and a text pair it must be"
                        " 'only_first' or 'only_second'."
                    )
                removed = max(0, sum(len(ids) for ids, _ in parts) - max_length)
                parts, overflow = self._truncate(parts, removed, truncation, stride)
            ids = parts[0][0] if len(parts) == 1 else np.concatenate([ids for ids, _ in parts])
            self._eventual_warn_about_too_long_sequence(ids, max_length, verbose)
            row = {"input_ids": ids}
            if asked["token_type_ids"]:
                row["token_type_ids"] = np.repeat(np.arange(len(parts), dtype=np.uint8), [len(p[0]) for p in parts])
            if asked["attention_mask"]:
                row["attention_mask"] = np.ones(len(ids), dtype=np.uint8)
            if return_special_tokens_mask:
                row["special_tokens_mask"] = np.zeros(len(ids), dtype=np.uint8)
            if return_offsets_mapping:
                row["offset_mapping"] = np.concatenate([spans for _, spans in parts])
            rows.append(row)
            extras.append((list(overflow), removed))

        lengths = [len(row["input_ids"]) for row in rows]
        if padding_strategy != PaddingStrategy.DO_NOT_PAD:
            target = max_length if padding_strategy == PaddingStrategy.MAX_LENGTH else max(lengths, default=0)
            if pad_to_multiple_of is not None:
                target = -(-target // pad_to_multiple_of) * pad_to_multiple_of
            rows = [self._pad_row(row, target, padding_side or self.padding_side) for row in rows]
            lengths = [len(row["input_ids"]) for row in rows]

        names = ["input_ids", *(name for name, wanted in asked.items() if wanted)]
        names += ["special_tokens_mask"] * return_special_tokens_mask + ["offset_mapping"] * return_offsets_mapping
        columns = {name: [row[name] for row in rows] for name in names}
        if return_tensors is not None:
            return self._to_tensors(columns, lengths, return_length, TensorType(return_tensors))
        data: dict[str, Any] = {name: [_to_list(array) for array in column] for name, column in columns.items()}
        if return_offsets_mapping:
            data["offset_mapping"] = [[tuple(span) for span in spans] for spans in data["offset_mapping"]]
        if return_overflowing_tokens:
            data["overflowing_tokens"] = [overflow for overflow, _ in extras]
            data["num_truncated_tokens"] = [removed for _, removed in extras]
        if return_length:
            data["length"] = lengths
        return BatchEncoding(data if batched else {name: values[0] for name, values in data.items()})

    def _truncate(
        self, parts: list[tuple[np.ndarray, np.ndarray | None]], removed: int, strategy: str, stride: int
    ) -> tuple[list[tuple[np.ndarray, np.ndarray | None]], list[int]]:
        """The parts without `removed` tokens, and those tokens with `stride` of the kept ones."""
        # transformers' own rule runs on positions instead of ids, so that ids and spans are cut alike.
        positions = [range(len(ids)) for ids, _ in parts]
        first, second, overflow = self.truncate_sequences(
            positions[0], positions[1] if len(parts) == 2 else None, removed, strategy, stride
        )
        cut_ids = parts[1 if strategy == "only_second" and len(parts) == 2 else 0][0]
        kept = [first] if second is None else [first, second]
        cut = [
            (ids[keep.start : keep.stop], None if spans is None else spans[keep.start : keep.stop])
            for (ids, spans), keep in zip(parts, kept, strict=True)
        ]
        return cut, [int(cut_ids[at]) for at in overflow]

    def _pad_row(self, row: dict[str, np.ndarray], target: int, side: str) -> dict[str, np.ndarray]:
        if side not in ("left", "right"):
            raise ValueError(f"`padding_side` is {side!r}; it must be 'left' or 'right'.")
        missing = target - len(row["input_ids"])
        if missing <= 0:
            return row
        fill = {
            "input_ids": self.pad_token_id,
            "token_type_ids": self.pad_token_type_id,
            "special_tokens_mask": 1,
        }
        padded = {}
        for name, array in row.items():
            value = fill.get(name, 0)
            dtype = array.dtype if value < 256 else np.int64
            pad = np.full((missing, *array.shape[1:]), value, dtype=dtype)
            padded[name] = np.concatenate([pad, array] if side == "left" else [array, pad])
        return padded

    def _to_tensors(
        self, columns: dict[str, list[np.ndarray]], lengths: list[int], return_length: bool, kind: TensorType
    ) -> BatchEncoding:
        """Columns as int64 tensors (B, T), spans (B, T, 2)."""
        if len(set(lengths)) > 1:
            raise ValueError(
                f"`return_tensors` is {kind.value!r}, but the rows have {min(lengths)} to {max(lengths)} tokens; they"
                " must be equally long: pass `padding=True`, or `truncation=True` and `max_length`."
            )
        tensors = {}
        for name, column in columns.items():
            shape = (0, 0) if not column else (len(column), *column[0].shape)
            tensors[name] = np.empty(shape, dtype=np.int64)
            for row, array in enumerate(column):
                tensors[name][row] = array
        if return_length:
            tensors["length"] = np.asarray(lengths, dtype=np.int64)
        if kind == TensorType.PYTORCH:
            import torch

            tensors = {name: torch.from_numpy(array) for name, array in tensors.items()}
        # BatchEncoding leaves tensors of the requested kind as they are and converts others (MLX).
        return BatchEncoding(tensors, tensor_type=kind)

    # Files

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write the `tokenizer.json` of the `tokenizers` library for other runtimes: the same ids for valid UTF-8.

        This class never reads it. Raises a FileNotFoundError if the directory is missing.
        """
        if not os.path.isdir(save_directory):
            raise FileNotFoundError(f"`save_directory` is {str(save_directory)!r}; directory not found.")
        name = f"{filename_prefix}-{TOKENIZER_JSON}" if filename_prefix else TOKENIZER_JSON
        path = os.path.join(save_directory, name)
        self.to_tokenizers().save(path)
        return (path,)

    # Other libraries

    def to_tokenizers(self) -> Any:
        """The same tokenizer as a `tokenizers.Tokenizer`: byte-level BPE without merges."""
        return to_tokenizers(self)

    def to_fast(self) -> PreTrainedTokenizerFast:
        """The same tokenizer as a `PreTrainedTokenizerFast`: the same ids for valid Unicode, but no bytes in or out.

        It has the special and added tokens, the settings and the chat template of this one, and can be saved in its
        place.
        """
        return to_fast(self)

    @property
    def _tokenizer(self) -> Any:
        # Streaming in `transformers serve` takes it from any tokenizer; built anew, as tokens may have been added.
        return to_tokenizers(self)


class ByteTokenizer(AlphabetTokenizer):
    """All bytes: token id = byte value, V = 256; byte 0 ends an episode and is the padding.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer("né")["input_ids"]
    [110, 195, 169]
    >>> tokenizer.decode([110, 195, 169])
    'né'
    """

    symbols = bytes(range(256))


# Checkpoints then include this file, and AutoTokenizer finds the class without the package.
ByteTokenizer.register_for_auto_class()
