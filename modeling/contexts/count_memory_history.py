"""Position in a document, and the hashes of its contexts.

Integers as in `hf_recurrent/kernels/count_memory_contexts.h` and `count_memory_large.h`, with the same wrap-around.
"""

from dataclasses import dataclass, field
from functools import reduce
from typing import TypeVar

import numpy as np

from .count_memory_layout import (
    ABOVE,
    INDENT,
    LEAST_RING,
    LONG_CONTEXTS,
    ORDERS,
    RECENT_ORDERS,
    STACK,
    WORD,
    WORDS,
)

LOW_32, LOW_64 = (1 << 32) - 1, (1 << 64) - 1
SHORT_MATCH, LONG_INDEX = 8, 20  # bytes of the contexts whose ends in the text are indexed
WORD_BYTES = frozenset(b"_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789" + bytes(range(128, 256)))

UPPER, LOWER = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"), frozenset(b"abcdefghijklmnopqrstuvwxyz")
DIGITS = frozenset(b"0123456789")
BRACKETS = dict(zip(b"]})>", b"[{(<", strict=True))  # the opening one of each

Hashed = TypeVar("Hashed", int, np.ndarray)


def scrambled(x: Hashed) -> Hashed:
    """Each bit of the result depends on every bit of x, which has 32 bits: an integer, or an array of uint64."""
    x = x ^ x >> 16
    x = x * 0x7FEB352D & LOW_32
    x = x ^ x >> 15
    x = x * 0x846CA68B & LOW_32
    return x ^ x >> 16


def hash_of_two(a: Hashed, b: Hashed) -> Hashed:
    """A hash of 32 bits of two numbers of 32 bits."""
    return scrambled((a * 0x9E3779B1 + b + 0x7F4A7C15) & LOW_32)


@dataclass
class ByteHistory:
    """Position in a document, and what its contexts are made from.

    Args:
        position: bytes of the document so far.
        line: where the current line began.
        last_line: where the line above began.
        last8: the last 8 bytes, the newest in the lowest bits.
        word: hash of the current word; 0 outside a word.
        last_word: hash of the word before.
        column: bytes since the line began.
        indent: spaces and tabs at the beginning of the line.
        first: the first byte after them; 0 before it.
        above: the byte of the line above in this column; 0 without one.
    """

    position: int = 0
    line: int = 0
    last_line: int = 0
    last8: int = 0
    word: int = 0
    last_word: int = 0
    column: int = 0
    indent: int = 0
    first: int = 0
    above: int = 0

    @property
    def last(self) -> int:
        """The last byte; 0 before the first."""
        return self.last8 & 255

    def append(self, ring: np.ndarray, byte: int) -> None:
        """Go on by one byte; ring (bytes,) uint8 holds the last ones, each at its position modulo the size."""
        mask = len(ring) - 1
        ring[self.position & mask] = byte
        self.last8 = (self.last8 << 8 | byte) & LOW_64
        if byte in WORD_BYTES:
            self.word = hash_of_two(self.word, byte + 1)
        else:
            self.last_word = self.word or self.last_word
            self.word = 0
        self.position = (self.position + 1) & LOW_64
        if byte == ord("\n"):
            self.last_line, self.line = self.line, self.position
            self.indent = self.first = 0
        elif not self.first:
            if byte in b" \t":
                self.indent = (self.indent + 1) & LOW_32
            else:
                self.first = byte
        self.column = (self.position - self.line) & LOW_32
        above = (self.last_line + self.column) & LOW_64
        # The nearest bytes only, so that every size of the window gives the same contexts.
        is_near = above < self.line and (self.position - above) & LOW_64 < LEAST_RING
        self.above = int(ring[above & mask]) if is_near else 0


@dataclass
class LargeHistory(ByteHistory):
    """The history of a large memory.

    Args:
        plain: hashes of the last four words without case, the current one first.
        plain_length: bytes of the current word.
        classes: classes of the last bytes, repeated ones once, the newest in the lowest bits.
        kinds: likewise with repeated ones, in 4 bits each.
        depth: open brackets in this line.
        bracket: the innermost; 0 without one.
        bracket_text: hash of the text since a bracket opened.
        line_start: hash of the first four bytes of the line.
        line_start_length: how many there are.
        after_1: the bytes that followed each byte when it came before, the newest in the lowest bits.
        after_2: the same of each two bytes.
        after_3: the same of each three, at a hash of them.
        after_words: the same of the last two words.
        places: hashes here of the last three bytes and of the last two words.
        stack: the open brackets, each at its depth modulo the size.
    """

    plain: list[int] = field(default_factory=lambda: [0] * 4)
    plain_length: int = 0
    classes: int = 0
    kinds: int = 0
    depth: int = 0
    bracket: int = 0
    bracket_text: int = 0
    line_start: int = 0
    line_start_length: int = 0
    after_1: list[int] = field(default_factory=lambda: [0] * 256)
    after_2: list[int] = field(default_factory=lambda: [0] * 65536)
    after_3: list[int] = field(default_factory=lambda: [0] * 65536)
    after_words: list[int] = field(default_factory=lambda: [0] * 65536)
    places: list[int] = field(default_factory=lambda: [0] * 2)
    stack: list[int] = field(default_factory=lambda: [0] * STACK)

    def append(self, ring: np.ndarray, byte: int) -> None:
        for after, before in (
            (self.after_1, self.last),
            (self.after_2, self.last8 & 65535),
            (self.after_3, self.places[0] & 65535),
            (self.after_words, self.places[1] & 65535),
        ):
            after[before] = (after[before] << 8 | byte) & LOW_32
        self.places[0] = hash_of_two((self.last8 << 8 | byte) & 0xFFFFFF, 3) >> 16
        lower = byte + 32 if byte in UPPER else byte
        is_letter = lower in LOWER or byte >= 128
        if is_letter:
            self.plain[0] = hash_of_two(self.plain[0], lower + 1)
            self.plain_length = (self.plain_length + 1) & LOW_32
        elif self.plain[0]:
            self.plain, self.plain_length = [0, *self.plain[:3]], 0
        self.places[1] = hash_of_two(*self.plain[:2]) >> 16
        kind = 5 if byte >= 128 else 2 if byte in UPPER else 1 if is_letter else 3 if byte in DIGITS else byte
        kind = 0 if byte == ord(" ") else kind
        if self.classes & 255 != kind or kind > 5:
            self.classes = (self.classes << 8 | kind) & LOW_32
        self.kinds = (self.kinds << 4 | (kind if kind < 6 else 7 if byte == ord("\n") else 6)) & LOW_32
        self._append_bracket(byte)
        if byte == ord("\n"):
            self.line_start = self.line_start_length = self.depth = self.bracket = 0
        elif self.line_start_length < 4:
            self.line_start = hash_of_two(self.line_start, byte)
            self.line_start_length += 1
        super().append(ring, byte)

    def _append_bracket(self, byte: int) -> None:
        """Brackets that do not fit are skipped, up to 8 at once."""
        if byte in BRACKETS.values():
            self.stack[self.depth % STACK] = self.bracket = byte
            self.depth = (self.depth + 1) & LOW_32
            self.bracket_text = 0
        elif byte in BRACKETS:
            opened = BRACKETS[byte]
            for depth in range(self.depth, max(self.depth - 9, 0), -1):
                if self.stack[(depth - 1) % STACK] == opened:
                    self.depth = depth - 1
                    break
            self.bracket = self.stack[(self.depth - 1) % STACK] if self.depth else 0
        self.bracket_text = hash_of_two(self.bracket_text, byte) if self.bracket else 0

    def contexts(self, order_7: int) -> list[int]:
        """Hashes of the contexts that only a large memory has; `order_7` is the hash of the last 7 bytes."""
        last, last2, last4 = self.last, self.last8 & 65535, self.last8 & LOW_32
        word, before, third, fourth = self.plain
        after_1, after_2, after_3 = self.after_1[last], self.after_2[last2], self.after_3[self.places[0] & 65535]
        values = (
            (last,),
            (order_7,),
            *((last4 & mask,) for mask in (0xFFFFFF00, 0xFFFF00, 0xFF00FF, 0xFFFF0000)),
            (word, last),
            (word, before, last),
            (word, before, third, last),
            (word, third, last),
            (self.bracket_text, self.bracket),
            (self.bracket, word, last),
            (self.line_start, word, last),
            (self.classes, last),
            (self.column, self.above, last),
            (after_1 & 65535, last),
            (after_2 & 65535, last),
            (after_2 & 0xFFFFFF, last),
            (word, before, third, fourth, last),
            (before, last2),
            (self.kinds, last),
            (self.kinds & 0xFFFFFF, word),
            (self.bracket_text, last2),
            (self.above, word),
            (self.line_start, self.column),
            (word, before, self.bracket),
            (after_1 & 0xFFFFFF, last2),
            (self.after_1[last2 >> 8] & 65535, last2),
            (self.column, last),
            (after_1 & 255, after_2 & 65535),
            (word, after_1 & 255),
            (self.kinds, word, before),
            (before, third, last),
            (self.plain_length, before, last),
            (after_2, last2),
            (word, third, fourth),
            (self.after_1[last4 >> 16 & 255] & 65535, last4 & 0xFFFFFF),
            (after_1, after_2 & 255),
            (word, fourth, last),
            (after_3 & 65535, last),
            (after_3 & 0xFFFFFF, last2),
            (self.after_words[self.places[1] & 65535] & 65535, last),
        )
        return [
            reduce(hash_of_two, numbers, hash_of_two(0, context + 1000))
            for context, numbers in enumerate(values, LONG_CONTEXTS)
        ]


@dataclass
class ContextHashes:
    """Hashes of the contexts at a position.

    Args:
        contexts: of the long-term memory, LONG_CONTEXTS of them.
        text: of the last SHORT_MATCH and of the last LONG_INDEX bytes.
        last: of the last byte.
    """

    contexts: list[int]
    text: tuple[int, int]
    last: int

    @property
    def recent(self) -> list[int]:
        """Hashes of the contexts of the short-term memory."""
        orders = [self.contexts[ORDERS.index(order)] for order in RECENT_ORDERS[1:]]
        return [self.last, *orders, self.contexts[WORD], self.contexts[INDENT]]


def hashes_at(history: ByteHistory, ring: np.ndarray) -> ContextHashes:
    """Hashes of the contexts at the current position, from the last bytes and the history."""
    mask, last, orders = len(ring) - 1, history.last, {0: 0}
    for order in range(1, LONG_INDEX + 1):
        byte = int(ring[(history.position - order) & mask]) + 1 if order <= history.position else 0
        orders[order] = hash_of_two(orders[order - 1], byte)
    contexts = [hash_of_two(orders[order], order) for order in ORDERS] + [0] * (LONG_CONTEXTS - len(ORDERS))
    contexts[WORD] = hash_of_two(history.word, last + 1001)
    contexts[WORDS] = hash_of_two(hash_of_two(history.word, history.last_word), last + 2002)
    place = (history.indent * 256 + history.first) & LOW_32
    contexts[INDENT] = hash_of_two(hash_of_two(place, history.word), last + 7007)
    contexts[ABOVE] = hash_of_two(hash_of_two(history.above, last), 8008)
    if isinstance(history, LargeHistory):
        contexts += history.contexts(orders[7])
    return ContextHashes(contexts, (orders[SHORT_MATCH], orders[LONG_INDEX]), hash_of_two(orders[1], 1))
