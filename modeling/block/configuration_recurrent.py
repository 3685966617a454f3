"""Base class of the configurations of all recurrent families, and checks of their fields."""

import dataclasses
import importlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import UnionType
from typing import Any, Union, get_args, get_origin

from transformers import PreTrainedConfig

# Widths: torch's kernels count in 32 bits. Parts, such as layers and taps, are made one by one.
MOST_WIDTH, MOST_PARTS = 2**31 - 1, 2**16
# N-grams: hashes are sums below 2^63, and states hold ids exactly in float32.
MOST_ORDER, MOST_NGRAM_ROWS, MOST_NGRAM_IDS = 32, 2**28, 2**24
_CHECKED_TYPES = {bool, int, float, str, list, type(None)}


def check_types(config: PreTrainedConfig) -> None:
    """Raise a ValueError that names the first field that is not of its annotated type, or not finite."""
    for field in dataclasses.fields(config):
        allowed = get_args(field.type) if get_origin(field.type) in (Union, UnionType) else [field.type]
        kinds = tuple(get_origin(kind) or kind for kind in allowed)
        if not _CHECKED_TYPES.issuperset(kinds):
            continue
        value = getattr(config, field.name)
        if isinstance(value, bool):
            matches = bool in kinds
        else:
            matches = isinstance(value, kinds) or (isinstance(value, int) and float in kinds)
        if not matches:
            names = ("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ValueError(f"`{field.name}` is {value!r}; it must be {' or '.join(names)}.")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"`{field.name}` is {value!r}; it must be finite.")


def check_positive(config: PreTrainedConfig, *names: str, most: int = MOST_WIDTH) -> None:
    """Raise a ValueError that names the first of these fields that is not an integer from 1 to `most`."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` is {value!r}; it must be an integer of at least 1.")
        if value > most:
            raise ValueError(f"`{name}` is {value}; it must be at most {most}.")


def check_above_zero(config: PreTrainedConfig, *names: str) -> None:
    """Raise a ValueError that names the first of these fields that is neither None nor greater than 0."""
    for name in names:
        if (value := getattr(config, name)) is not None and not value > 0:
            raise ValueError(f"`{name}` is {value!r}; it must be greater than 0.")


def check_choice(config: PreTrainedConfig, name: str, allowed: Sequence[str]) -> None:
    """Raise a ValueError unless a field is one of the allowed names."""
    if (value := getattr(config, name)) not in allowed:
        raise ValueError(f"`{name}` is {value!r}; it must be one of {', '.join(allowed)}.")


def check_power_of_two(config: PreTrainedConfig, name: str, least: int, most: int, *, or_zero: bool = False) -> None:
    """Raise a ValueError unless a field is a power of two from `least` to `most`, or 0 where that is allowed."""
    value = getattr(config, name)
    if or_zero and value == 0:
        return
    if not isinstance(value, int) or not least <= value <= most or value & (value - 1):
        zero = "0 or " if or_zero else ""
        raise ValueError(f"`{name}` is {value!r}; it must be {zero}a power of two from {least} to {most}.")


def packaged(saved_class: type, *unit: Any) -> AbstractContextManager[str]:
    """Inside the block, the code of a class is in files made for a checkpoint; yields the name of their module.

    In a checkpoint, whose files are made already, this does nothing.
    """
    if not __name__.startswith("hf_recurrent."):
        return nullcontext(saved_class.__module__)
    return importlib.import_module("hf_recurrent.hub.packager").packaged(saved_class, *unit)


class Packaged:
    """For a configuration or a tokenizer: saves its own code, gathered into files that load without this package."""

    def save_pretrained(self, save_directory, *arguments: Any, **kwargs: Any) -> Any:
        """As `save_pretrained` of the base class in transformers."""
        with packaged(type(self)):
            return super().save_pretrained(save_directory, *arguments, **kwargs)


POOLINGS = ("mean", "last")


class ByteConfig(Packaged, PreTrainedConfig):
    """Base class of the configurations of all our models: their vocabulary is the 256 bytes; byte 0 ends and pads.

    Args:
        vocab_size: V.

    Raises:
        ValueError: a field has a wrong type, or a token id is outside the vocabulary.
    """

    _auto_class = "AutoConfig"  # the code travels with every checkpoint

    vocab_size: int = 256
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 0
    pad_token_id: int | None = 0

    def __post_init__(self, **kwargs):
        check_positive(self, "vocab_size")
        check_types(self)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            ids = getattr(self, name)
            for token in ids if isinstance(ids, list) else [ids]:
                if token is not None and not (isinstance(token, int) and 0 <= token < self.vocab_size):
                    raise ValueError(f"`{name}` is {ids!r}; it must be from 0 to {self.vocab_size - 1}, or None.")
        super().__post_init__(**kwargs)


class ContextConfig(ByteConfig):
    """Fields of the memory of contexts, which every recurrent family may have; none by default.

    Args:
        ngram_orders: ascending lengths of the n-grams whose hashes select rows of a table that are added to the
            embedding, such as [2, 3, 4, 5, 6]; none if empty.
        ngram_rows: rows of the table for each order, a power of two.
        ngram_output: a second table, read at the same rows, is added to the final hidden states before the head.
        count_memory_slots: contexts that each table of the count memory holds, a power of two; 0 for a model without
            it. The papers' models have none.
        count_memory_text: bytes of training text that the count memory keeps for long matches, a power of two.
        count_memory_window: W, bytes of the short-term count memory in the state, a power of two; 0 for none. It may
            be changed after training.
        count_memory_rows: rows of mixing weights in the state that adapt to the stream, a power of two; 0 for none. It
            may be changed after training.
        count_memory_small: the count memory has fewer cells, mixing weights and refinements, for learners in C.

    Raises:
        ValueError: the orders are not ascending integers from 2 to 32, the rows are not a power of two, there are
            orders for real-valued inputs or for a vocabulary above 2^24 - 1, there is an output table without orders,
            a size of the count memory is not a power of two, or it is to read other things than bytes.
    """

    ngram_orders: list[int] = dataclasses.field(default_factory=list)
    ngram_rows: int = 131_072
    ngram_output: bool = False
    count_memory_slots: int = 0
    count_memory_text: int = 1 << 22
    count_memory_window: int = 1 << 13
    count_memory_rows: int = 64
    count_memory_small: bool = False

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        orders = self.ngram_orders
        if not all(type(order) is int and 2 <= order <= MOST_ORDER for order in orders):
            raise ValueError(f"`ngram_orders` is {orders!r}; it must be integers from 2 to {MOST_ORDER}.")
        if sorted(set(orders)) != orders:
            raise ValueError(f"`ngram_orders` is {orders!r}; it must be ascending, each order once.")
        check_positive(self, "ngram_rows", most=MOST_NGRAM_ROWS)
        if self.ngram_rows & (self.ngram_rows - 1):
            raise ValueError(f"`ngram_rows` is {self.ngram_rows}; it must be a power of two.")
        if self.ngram_output and not orders:
            raise ValueError("`ngram_output` is True, but `ngram_orders` is empty; it must have at least one order.")
        if orders and self.vocab_size >= MOST_NGRAM_IDS:
            raise ValueError(f"`vocab_size` is {self.vocab_size}; with `ngram_orders`, it must be below 2^24.")
        if orders and getattr(self, "input_size", None) is not None:
            raise ValueError(f"`ngram_orders` is {orders!r}, but `input_size` is set; real values have no n-grams.")
        check_power_of_two(self, "count_memory_slots", 1 << 4, 1 << 26, or_zero=True)
        check_power_of_two(self, "count_memory_text", 1 << 10, 1 << 30)
        check_power_of_two(self, "count_memory_window", 1 << 8, 1 << 28, or_zero=True)
        check_power_of_two(self, "count_memory_rows", 1, 1 << 13, or_zero=True)
        if self.count_memory_slots and (self.vocab_size != 256 or getattr(self, "input_size", None) is not None):
            raise ValueError(
                f"`count_memory_slots` is {self.count_memory_slots}; a count memory reads bytes, of 256 token ids."
            )


class RecurrentConfig(ContextConfig):
    """Base class of the configurations of recurrent byte-level models.

    Defaults that differ from transformers' beyond [`ByteConfig`]: the embedding is tied to the head, no biases, no
    dropout (paper, Table 3).

    Args:
        hidden_size: M, model width.
        state_size: S, width of each layer's recurrent state.
        num_hidden_layers: N.
        intermediate_size: width inside the MLP; 3·M by default.
        recurrent_unit: name of the recurrent unit in every block, one of `RECURRENT_UNITS`; yours by
            [`register_recurrent_unit`].
        allow_negative_eigenvalues: let decays lie in (-1, 1) instead of (0, 1), for units with real eigenvalues.
        pooling: input of a sequence classifier's head, the "mean" over the steps or the "last" step.
        norm_eps: added to the variance in every norm.
        use_cache: return the state from `forward` by default.

    See [`ContextConfig`] for the other fields.

    Raises:
        ValueError: a size is below 1 or too large, `norm_eps` is negative, or `pooling` is unknown.
    """

    keys_to_ignore_at_inference = ["state"]  # noqa: RUF012 (transformers' own name and form)
    default_mlp_ratio = 3

    hidden_size: int = 128
    state_size: int = 192
    num_hidden_layers: int = 6
    intermediate_size: int | None = None
    allow_negative_eigenvalues: bool = False
    pooling: str = "mean"
    norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs):
        check_positive(self, "hidden_size", "state_size")
        check_positive(self, "num_hidden_layers", most=MOST_PARTS)
        if self.intermediate_size is None:
            self.intermediate_size = self.default_mlp_ratio * self.hidden_size
        check_positive(self, "intermediate_size")
        check_choice(self, "pooling", POOLINGS)
        super().__post_init__(**kwargs)
        if self.norm_eps < 0:
            raise ValueError(f"`norm_eps` is {self.norm_eps!r}; it must be at least 0.")


class RealValuedConfig(RecurrentConfig):
    """Base class of the configurations of families that also read real values.

    Args:
        input_size: H_in for real-valued inputs, which a linear encoder reads; None for tokens.
    """

    input_size: int | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.input_size is not None:
            check_positive(self, "input_size")
