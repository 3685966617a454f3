"""Byte tokenizer: token id = byte value, 256 ids, no merges, no offset; every byte string round-trips.

`AlphabetTokenizer` maps single bytes to ids through a NumPy table. `ByteTokenizer` is the alphabet of all 256 bytes;
smaller alphabets are further subclasses that name their symbols.

`encode_bytes` and `decode_bytes` are exact. `decode` returns text that can be printed and sent: bytes that are not
UTF-8 become U+FFFD. In `str` input, "\\udc80" to "\\udcff" mean the bytes 0x80 to 0xFF, as Python's `surrogateescape`
writes them (https://peps.python.org/pep-0383/).
"""

import os
import re
from typing import Any

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.tokenization_utils_base import TruncationStrategy
from transformers.utils import PaddingStrategy, TensorType

from ..block.configuration_recurrent import Packaged

TOKENIZER_JSON = "tokenizer.json"
_BYTES_LIKE = (bytes, bytearray, memoryview)
_RARE_OPTIONS = (
    "is_split_into_words",
    "return_overflowing_tokens",
    "return_special_tokens_mask",
    "return_token_type_ids",
    "sanitize_control_tokens",
)
# Of a tokenizer, which one of the `tokenizers` library has too.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SETTINGS = ("model_input_names", "model_max_length", "padding_side", "truncation_side", "chat_template")
_VISIBLE = bytes_to_unicode()  # as in GPT-2 and `tokenizers`


def token_string(byte: int) -> str:
    """The string of the token of a byte."""
    # Byte 0 is its own string: special tokens are searched for in texts, where it must mean byte 0.
    return _VISIBLE[byte] if byte else "\x00"


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
        self, eos_token: str | None = "\x00", pad_token: str | None = "\x00", errors: str = "replace", **kwargs: Any
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

    def _encode_text(self, text: str | bytes, split_special_tokens: bool = False) -> np.ndarray:
        """Ids (T,) of a text or of bytes."""
        if not isinstance(text, str):
            return self.encode_bytes(text)
        found = None if split_special_tokens else self._added_token_pattern()
        if found is None:
            return self.encode_bytes(_to_utf8(text))
        pattern, id_of_group = found
        pieces, start = [], 0
        for match in pattern.finditer(text):
            pieces.append(self.encode_bytes(_to_utf8(text[start : match.start()])))
            pieces.append(np.array([id_of_group[match.lastindex - 1]]))
            start = match.end()
        return np.concatenate([*pieces, self.encode_bytes(_to_utf8(text[start:]))])

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        """Token strings of `text`: one per byte, and one per added token."""
        split_special_tokens = kwargs.get("split_special_tokens", self.split_special_tokens)
        return self.convert_ids_to_tokens(self._encode_text(text, split_special_tokens).tolist())

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [self._token_of_id[index] for index in self._encode_text(text, split_special_tokens=True)]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        ids = [self._convert_token_to_id_with_added_voc(token) for token in tokens]
        if None in ids:
            unknown = tokens[ids.index(None)]
            raise ValueError(f"`tokens` holds {unknown!r}, which is not in the vocabulary of {type(self).__name__}.")
        return self._decode(ids)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str | list[str]:
        """Text of one sequence of ids, or a list of texts for a batch; `errors` overrides the tokenizer's.

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

    def _encode_plus(self, text: Any, text_pair: Any = None, **options: Any) -> BatchEncoding:
        """Encode for `__call__` and `encode`, whose arguments are the options: on arrays, not on lists of tokens.

        Pairs, lists of words and the columns of `_RARE_OPTIONS` are left to the base class.
        """
        if options.get("return_offsets_mapping"):
            return self._encode_with_offsets(text, text_pair, options)
        if (max_length := options.get("max_length")) is not None and max_length < 0:
            raise ValueError(f"`max_length` is {max_length}; it must be at least 0.")
        batched = isinstance(text, (list, tuple)) and (
            not text or isinstance(text[0], (str, *_BYTES_LIKE, list, tuple))
        )
        rows = text if batched else [text]
        if (
            text_pair is not None
            or any(options.get(name) for name in _RARE_OPTIONS)
            or (batched and any(isinstance(row, (list, tuple)) and row and isinstance(row[0], str) for row in rows))
        ):
            return super()._encode_plus(text, text_pair, **options)
        columns = self._pad_rows([self._encode_row(row, options) for row in rows], options)
        lengths = [len(row) for row in columns["input_ids"]]
        if (kind := options.get("return_tensors")) is not None:
            return self._to_tensors(columns, lengths, bool(options.get("return_length")), TensorType(kind))
        data: dict[str, list] = {name: [_to_list(array) for array in column] for name, column in columns.items()}
        if options.get("return_length"):
            data["length"] = lengths
        return BatchEncoding(data if batched else {name: values[0] for name, values in data.items()})

    def _encode_with_offsets(self, text: Any, text_pair: Any, options: dict[str, Any]) -> BatchEncoding:
        try:
            return self.to_fast()._encode_plus(text, text_pair, **options)
        except (TypeError, UnicodeError) as error:
            raise ValueError(
                f"`text` is {text!r:.80}; with `return_offsets_mapping` it must be valid Unicode text, or a batch."
            ) from error

    def _encode_row(self, row: Any, options: dict[str, Any]) -> np.ndarray:
        """Ids (T,) of a text, bytes or a list of ids, truncated."""
        if isinstance(row, (str, *_BYTES_LIKE)):
            split_special_tokens = options.get("split_special_tokens")
            if split_special_tokens is None:
                split_special_tokens = self.split_special_tokens
            ids = self._encode_text(row, split_special_tokens)
        elif isinstance(row, (list, tuple)) and all(isinstance(index, (int, np.integer)) for index in row):
            ids = _id_array(row)
            self._check_ids(ids)
        else:
            raise ValueError(
                f"`text` is of type {type(row).__name__}; it must be a str, bytes, a list of token ids, a list of"
                " words with `is_split_into_words=True`, or for a batch a list of these."
            )
        strategy, max_length = options.get("truncation_strategy"), options.get("max_length")
        if max_length is not None and strategy in (TruncationStrategy.LONGEST_FIRST, TruncationStrategy.ONLY_FIRST):
            ids = ids[:max_length] if self.truncation_side == "right" else ids[max(0, len(ids) - max_length) :]
        self._eventual_warn_about_too_long_sequence(ids, max_length, options.get("verbose", True))
        return ids

    def _pad_rows(self, rows: list[np.ndarray], options: dict[str, Any]) -> dict[str, list[np.ndarray]]:
        """The ids and, if asked for, the attention mask of all rows."""
        columns = {"input_ids": rows}
        asked = options.get("return_attention_mask")
        if "attention_mask" in self.model_input_names if asked is None else asked:
            columns["attention_mask"] = [np.ones(len(ids), dtype=np.uint8) for ids in rows]
        strategy = options.get("padding_strategy", PaddingStrategy.DO_NOT_PAD)
        if strategy == PaddingStrategy.DO_NOT_PAD:
            return columns
        side = options.get("padding_side") or self.padding_side
        if side not in ("left", "right"):
            raise ValueError(f"`padding_side` is {side!r}; it must be 'left' or 'right'.")
        longest = max(map(len, rows), default=0)
        target = options["max_length"] if strategy == PaddingStrategy.MAX_LENGTH else longest
        if (multiple := options.get("pad_to_multiple_of")) is not None:
            target = -(-target // multiple) * multiple

        def padded(array: np.ndarray, value: int) -> np.ndarray:
            if (missing := target - len(array)) <= 0:
                return array
            pad = np.full(missing, value, dtype=array.dtype if value < 256 else np.int64)
            return np.concatenate([pad, array] if side == "left" else [array, pad])

        fill = {"input_ids": self.pad_token_id, "attention_mask": 0}
        return {name: [padded(array, fill[name]) for array in column] for name, column in columns.items()}

    def _to_tensors(
        self, columns: dict[str, list], lengths: list[int], return_length: bool, kind: TensorType
    ) -> BatchEncoding:
        """Columns as int64 tensors (B, T)."""
        if len(set(lengths)) > 1:
            raise ValueError(
                f"`return_tensors` is {kind.value!r}, but the rows have {min(lengths)} to {max(lengths)} tokens; they"
                " must be equally long: pass `padding=True`, or `truncation=True` and `max_length`."
            )
        shape = (len(lengths), lengths[0] if lengths else 0)
        tensors = {
            name: np.concatenate(column, dtype=np.int64).reshape(shape) if column else np.empty(shape, dtype=np.int64)
            for name, column in columns.items()
        }
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
        """The same tokenizer as a `tokenizers.Tokenizer`: byte-level BPE without merges, with all added tokens."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

        vocab = {token_string(byte): index for index, byte in enumerate(self.symbols)}
        other = None if self.other_symbol is None else token_string(self.other_symbol[0])
        result = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=other, fuse_unk=False))
        if self.aliases:
            result.normalizer = normalizers.Sequence(
                [normalizers.Replace(old.decode("ascii"), new.decode("ascii")) for old, new in self.aliases.items()]
            )
        result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        result.decoder = decoders.ByteLevel()
        if 0 in self.symbols:
            zero = AddedToken("\x00", special="\x00" in self.all_special_tokens, normalized=False)
            result.add_tokens([zero])
        # An added token with an id of the alphabet would replace the bytes of its characters.
        for index, token in sorted(self.added_tokens_decoder.items()):
            if index >= self.vocab_size:
                result.add_tokens([token])
        return result

    def to_fast(self) -> PreTrainedTokenizerFast:
        """The same tokenizer as a `PreTrainedTokenizerFast`: the same ids for valid Unicode, but no bytes in or out.

        It has the special and added tokens, the settings and the chat template of this one, and can be saved in its
        place.
        """
        named = {name: token for name in _NAMED_TOKENS if (token := getattr(self, name)) is not None}
        return PreTrainedTokenizerFast(
            tokenizer_object=self.to_tokenizers(),
            clean_up_tokenization_spaces=False,
            extra_special_tokens=[token for token in self.all_special_tokens if token not in named.values()],
            **named,
            **{name: getattr(self, name) for name in _SETTINGS},
        )

    @property
    def _tokenizer(self) -> Any:
        # Streaming in `transformers serve` takes it from any tokenizer; built anew, as tokens may have been added.
        return self.to_tokenizers()


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
