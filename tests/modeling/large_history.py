"""The history of a large memory, with which the reference in numpy reads such memories; in use, only the kernel does.

Integers as in `hf_recurrent/kernels/count_memory_large.h`, with the same wrap-around.
"""

from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from hf_recurrent.modeling.contexts.count_memory_contexts import (
    HISTORIES,
    LOW_32,
    ByteHistory,
    FoundCounts,
    hash_of_two,
)
from hf_recurrent.modeling.contexts.count_memory_layout import LONG_CONTEXTS, STACK, WORD, WORDS
from hf_recurrent.modeling.contexts.count_memory_mixing import NODE_DEPTHS

PLAIN_1, PLAIN_2, PLAIN_3, BRACKET_TEXT = (LONG_CONTEXTS + number for number in (6, 7, 8, 10))
KNOWN_CONTEXTS = (3, 4, 5, 6, 7, WORD, WORDS, PLAIN_2, PLAIN_3, BRACKET_TEXT)  # of a set of weights
UPPER, LOWER = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"), frozenset(b"abcdefghijklmnopqrstuvwxyz")
DIGITS = frozenset(b"0123456789")
BRACKETS = dict(zip(b"]})>", b"[{(<", strict=True))  # the opening one of each


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

    def more_contexts(self, order_7: int) -> list[int]:
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

    def select_more(
        self,
        found: FoundCounts,
        nodes: np.ndarray,
        match_bits: np.ndarray,
        match_levels: np.ndarray,
        long_levels: np.ndarray,
    ) -> tuple[tuple, np.ndarray, tuple]:
        """Rows of further sets of weights and of the second mixer of the second layer; contexts of refinements."""
        depths = NODE_DEPTHS[nodes]
        newest, second, third = (self.classes >> shift for shift in (0, 8, 16))
        rows = (
            (self.last8 >> 8 & 255) * 8 + depths,
            (self.bracket & 255) * 8 + depths,
            (min(self.plain_length, 15) * 16 + (second & 15)) * 8 + depths,
            ((newest & 7) * 64 + (second & 7) * 8 + (third & 7)) * 8 + depths,
            ((self.last >> 5) * 256 + nodes) * 2 + (self.bracket != 0),
            sum(1 << bit for bit, context in enumerate(KNOWN_CONTEXTS) if context in found.known),
            (found.match_byte + 1) * 3 + match_bits,
            hash_of_two(self.last8 & 0xFFFF, 0) >> 20,
            nodes * 8 + min(self.plain_length, 7),
            hash_of_two(self.last8 & 0xFFFFFF, 5) >> 20,
        )
        contexts = (found.hashes.contexts[1], found.hashes.contexts[PLAIN_1], self.classes & 0xFFFFFF)
        return rows, 256 + (match_levels * 8 + depths) * 4 + long_levels, contexts


HISTORIES[True] = LargeHistory
