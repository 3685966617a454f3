"""Sizes of the count memory, and the layout of its tensors and of a stream's state.

The compiled kernel (`hf_recurrent/kernels/count_memory.h`) has the same layout; its version ties both together.

Shape letters: B streams, T steps.
"""

from typing import Any, NamedTuple

import numpy as np

ORDERS = (2, 3, 4, 5, 6, 8, 12, 20)  # bytes of the contexts of the long-term memory
WORD, WORDS, INDENT, ABOVE = range(len(ORDERS), len(ORDERS) + 4)
LONG_CONTEXTS, MORE_CONTEXTS = len(ORDERS) + 4, 42  # in every memory; further ones of a large one
RECENT_ORDERS = (1, 2, 3, 4)  # of the short-term memory
FIRST_SLOTS, WINDOW_SHARES = 256, (8, 16, 32, 32, 32)  # slots of order 1; W / slots of the other tables
LANES = 8
SET_SIZES = (256, 256, 9 * 5, 8 * 8 * 4 * 3, 24 * 24, 256 * 8, 24 * 8)
# Of a large memory.
MORE_SET_SIZES = (
    *(256 * 8, 256 * 8, 16 * 16 * 8, 8 * 8 * 8 * 8, 2048 * 2, 1024),
    *(257 * 3, 4096, 256 * 8, 4096),
)
STACK = 64  # open brackets that a large memory keeps
SMALL_SET_SIZES = (9 * 5, 8 * 8, 64, 32, 24)  # of a small memory, in place of all
LEVELS, SYMBOLS, WAYS = 11, 7, 4
REFINEMENTS, MORE_REFINEMENTS, KNOTS = 3, 3, 33
LEAST_RING = 512
SLOT = np.dtype([("check", "<u2"), ("symbol", "u1", SYMBOLS), ("count", "u1", SYMBOLS)])
TEXT_USED, LEARNED, DOCUMENTS = range(3)  # counters
_LARGE_HISTORY = (
    ("plain", "<u4", 4),
    *((name, "<u4") for name in ("plain_length", "classes", "kinds", "depth", "bracket", "bracket_text")),
    *((name, "<u4") for name in ("line_start", "line_start_length")),
    ("after_1", "<u4", 256),
    *((name, "<u4", 65536) for name in ("after_2", "after_3", "after_words")),
    ("places", "<u4", 2),
    ("stack", "u1", STACK),
)


class MemoryShape(NamedTuple):
    """Sizes that a user chooses; all but the flags are powers of two."""

    slots: int  # contexts that each table of the long-term memory holds
    text: int  # bytes of training text that are kept for long matches
    window: int  # W, bytes of the short-term memory; 0 for none
    rows: int  # rows of mixing weights that adapt in each stream; 0 for none
    large: bool = False  # more contexts, sets of weights and refinements; about four times the time
    small: bool = False  # fewer cells, rows of weights and knots: 91 kB in place of 4.3 MB

    @property
    def contexts(self) -> int:
        """Contexts of the long-term memory. They are the first sources of a prediction."""
        return LONG_CONTEXTS + MORE_CONTEXTS * self.large

    @property
    def long_match(self) -> int:
        """The match in the text: the source after the short-term memory's (orders, word and indentation)."""
        return self.contexts + len(RECENT_ORDERS) + 2

    @property
    def sources(self) -> int:
        """Sources of a prediction; the last one is the match in the window."""
        return self.long_match + 2

    @property
    def bias(self) -> int:
        """Input of the mixer that is a constant; logit and probability of the network follow it."""
        return 2 * self.sources

    @property
    def inputs(self) -> int:
        """Inputs of the mixer, with zeros that fill lanes."""
        return -(-(2 * self.sources + 3) // LANES) * LANES

    @property
    def set_sizes(self) -> tuple[int, ...]:
        """Rows of each set of weights."""
        return SMALL_SET_SIZES if self.small else SET_SIZES + MORE_SET_SIZES * self.large

    @property
    def depths(self) -> int:
        """Depths of a node that cells tell apart."""
        return 1 if self.small else 8

    @property
    def refinement_bits(self) -> int:
        """Binary logarithm of the contexts of a refinement."""
        return 6 if self.small else 14

    @property
    def finals(self) -> int:
        """Mixers in the second layer; their mean is refined."""
        return 1 + self.large

    @property
    def refinements(self) -> int:
        """Tables that refine the mixture."""
        return REFINEMENTS + MORE_REFINEMENTS * self.large

    @property
    def match_bits(self) -> int:
        """Binary logarithm of the index of matches in the window."""
        return max(self.window.bit_length() - 4, 4)

    @property
    def recent_slots(self) -> tuple[int, ...]:
        """Slots of each table of the short-term memory."""
        return FIRST_SLOTS, *(max(self.window // share, WAYS) for share in WINDOW_SHARES)

    @property
    def stream(self) -> np.dtype:
        """State of a stream. Zeros are the start of a document."""
        position = "<u4" if self.window > 1 << 16 else "<u2"
        ring = max(self.window, LEAST_RING)
        fields: list[Any] = [
            *((name, "<u8") for name in ("position", "line", "last_line", "last8")),
            *((name, "<u4") for name in ("word", "last_word", "column", "indent", "first", "above")),
            *(_LARGE_HISTORY if self.large else ()),
            ("long_match", "<u8"),
            ("match", "<u8"),
            ("long_length", "<u4"),
            ("match_length", "<u4"),
            ("pending", "<u4"),
            ("target", "<i4"),
            ("no_recent", "<u4"),
            ("final_rows", "<f4", len(self.set_sizes)),
            ("network", "<f4", 256),
            ("rows", "<f4", (self.rows, self.inputs)),
            ("ring", "u1", ring),
        ]
        if self.window:
            fields += [("recent", SLOT, sum(self.recent_slots)), ("match_index", position, 1 << self.match_bits)]
        used = np.dtype(fields).itemsize
        return np.dtype([*fields, ("padding", "u1", -used % 16)])

    def buffers(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and type of every array of the long-term memory, by name."""
        return {
            "slots": ((self.contexts, self.slots), SLOT),
            "text": ((self.text,), np.dtype("u1")),
            "index": ((2, max(self.text // 4, 16)), np.dtype("<u4")),
            "cells": ((self.sources, 3, self.depths, LEVELS, LEVELS, 2), np.dtype("<u2")),
            "weights": ((sum(self.set_sizes), self.inputs), np.dtype("<f4")),
            "final_weights": ((self.finals * 256, len(self.set_sizes)), np.dtype("<f4")),
            "refinement": ((self.refinements, 1 << self.refinement_bits, KNOTS), np.dtype("<u2")),
            "counters": ((4,), np.dtype("<i8")),
        }


class Rates(NamedTuple):
    """Learning rates of a memory that reads."""

    weights: float = 0.003  # of the shared mixing weights
    first_weights: float = 0.0  # added to it at the first byte; it falls as 1 / (1 + bytes / 256)
    final: float = 0.0005  # of the second layer
    rows: float = 0.01  # of the rows that adapt in each stream
    least_cell: int = 98  # the slowest rate of a cell, in 1/65536 of its error
    refinement: int = 50  # a refinement moves by its error divided by this number
    learns: bool = False  # cells, mixing weights and refinements learn
    inserts: bool = False  # each byte is counted in the long-term memory once it has been read


# Flags of a step, which is padding without the first. A document begins at a reset; the short-term memory does not
# learn from bytes that the model itself has chosen.
REAL_STEP, RESET_STEP, SAMPLED_STEP = 1, 2, 4


class Block(NamedTuple):
    """Blocks of B streams, and room for the results: arrays, or tensors on the CPU without gaps; None without one."""

    tokens: Any  # (B, T) uint8
    flags: Any  # (B, T) uint8, sums of the flags above
    targets: Any | None = None  # (B, T) int32, the next bytes, -1 for none
    network: Any | None = (
        None  # (B, T, 256) float32 logits of bytes, or (B, T, 8) of the nodes on the way to each target
    )
    nats: Any | None = None  # (B, T) float32, the negative log-likelihoods of the targets
    probabilities: Any | None = None  # (B, T, 8) uint16, 65536 times the probability of each bit of the targets
    logits: Any | None = None  # (B, T - first, 256) float32, the log probabilities of all bytes from step `first` on
    first: int = 0
    pending: Any | None = None  # (B, P) uint8, bytes of running documents that are not in the long-term memory yet
    pending_used: Any | None = None  # (B,) int64, how many there are
