"""Contexts of a position, the tables of the long-term memory, and the chains of the short-term memory.

A context is a hash of the last bytes (an order), of the current word, or of the place in a line. The *long-term*
memory keeps, for each context, the bytes that followed it and how often. The *short-term* memory is a window of the
stream itself; chains lead from a position to earlier ones with an equal context, as in LZ77. In both, the longest
match predicts the byte after it. Source: Mahoney, "Data Compression Explained" (2013), sections on context models,
hash tables and match models.

Integers as in `hf_recurrent/kernels/count_memory_contexts.h`, with the same wrap-around. An index that comes from a
state is masked or limited, since states come from files.

Shape letters: W bytes of the window.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from .count_memory_layout import (
    ABOVE,
    CHAINS,
    INDENT,
    LEAST_RING,
    LONG_CONTEXTS,
    ORDERS,
    RECENT,
    RECENT_INDENT,
    RECENT_ORDERS,
    RECENT_WORD,
    SOURCES,
    SYMBOLS,
    TEXT_USED,
    WAYS,
    WORD,
    WORDS,
    MemoryShape,
)

LOW_32, LOW_64 = (1 << 32) - 1, (1 << 64) - 1
SHORT_MATCH, LONG_INDEX = 8, 20  # bytes of the contexts whose ends in the text are indexed
LONGEST_MATCH = 40  # bytes that are compared
LONG_ENOUGH = 24  # a match of the text that is not given up for another one
MOST_LENGTH = 65535
# Chains through the window, and how many positions of each are visited.
CHAIN_1, CHAIN_2, CHAIN_4, CHAIN_WORD, CHAIN_INDENT = range(CHAINS)
CANDIDATES = (16, 20, 28, 12, 12)
CHAIN_ORDERS = {CHAIN_1: (1,), CHAIN_2: (2, 3), CHAIN_4: (4, 6, 12)}
CHAIN_BYTES = {CHAIN_1: 1, CHAIN_2: 3, CHAIN_4: LONGEST_MATCH}  # that are compared
WORD_BYTES = frozenset(b"_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789" + bytes(range(128, 256)))

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
class ContextHashes:
    """Hashes of the contexts at a position.

    Args:
        contexts: of the long-term memory, LONG_CONTEXTS of them.
        text: of the last SHORT_MATCH and of the last LONG_INDEX bytes.
    """

    contexts: list[int]
    text: tuple[int, int]


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
    return ContextHashes(contexts, (orders[SHORT_MATCH], orders[LONG_INDEX]))


# ---- long-term memory ----------------------------------------------------------------------------------------------
# A slot holds the counts of up to 7 bytes after a context. A context may use WAYS slots, its bucket; a check of 16
# bits tells its slot from others. A full bucket loses the slot with the fewest counts: the memory never grows.


def _first_way(slots: np.ndarray, hashed: int) -> int:
    bits = slots.shape[1].bit_length() - 1
    return hashed >> (32 - bits) & ~(WAYS - 1)


def _slot_to_count_in(slots: np.ndarray, context: int, hashed: int) -> np.void:
    """The slot of a context, in place of the one with the fewest counts if it has none."""
    first = _first_way(slots, hashed)
    bucket = slots[context, first : first + WAYS]
    check = hashed & 0xFFFF | 1
    (equal,) = np.nonzero(bucket["check"] == check)
    if len(equal):
        return bucket[equal[0]]
    least = bucket[bucket["count"].sum(1, dtype=np.int64).argmin()]
    least["check"], least["symbol"], least["count"] = check, 0, 0
    return least


def _count_in_slot(slot: np.void, byte: int) -> None:
    """Count a byte after a context.

    Counts of all bytes are halved when one is full. With 7 bytes in the slot, another one lowers the smallest count,
    and takes its place once that is at most 2: a byte that comes rarely does not displace a frequent one.
    """
    symbols, counts = slot["symbol"], slot["count"]
    used = [*counts.tolist(), 0].index(0)
    known = symbols[:used].tolist()
    if byte in known:
        i = known.index(byte)
        counts[i] = (int(counts[i]) + 1) & 255
        if counts[i] == 255:
            counts[:] = (counts.astype(np.int64) + 1) // 2
        return
    i = used if used < SYMBOLS else int(counts.argmin())
    if used == SYMBOLS and counts[i] > 2:
        counts[i] -= 1
    else:
        symbols[i], counts[i] = byte, 1


def count_byte(arrays: Mapping[str, np.ndarray], hashes: ContextHashes, position: int, byte: int) -> None:
    """Count a byte after each of its contexts, and append it to the text."""
    text, index, counters = (arrays[name] for name in ("text", "index", "counters"))
    at = int(counters[TEXT_USED]) & LOW_32
    index_bits = index.shape[1].bit_length() - 1
    for k, least in enumerate((SHORT_MATCH, LONG_INDEX)):
        if position >= least:
            index[k, hashes.text[k] >> (32 - index_bits)] = at
    text[at & len(text) - 1] = byte
    counters[TEXT_USED] = len(text) if at == LOW_32 else at + 1
    for context, hashed in enumerate(hashes.contexts):
        _count_in_slot(_slot_to_count_in(arrays["slots"], context, hashed), byte)


def count_document(arrays: Mapping[str, np.ndarray], document: np.ndarray, end: int = -1) -> None:
    """Count the bytes (T,) uint8 of a document, and its end byte if it is not negative."""
    history, ring = ByteHistory(), np.zeros(LEAST_RING, np.uint8)
    for byte in document.tolist() + [end & 255] * (end >= 0):
        count_byte(arrays, hashes_at(history, ring), history.position, byte)
        history.append(ring, byte)


def is_in_text(arrays: Mapping[str, np.ndarray], at: int) -> bool:
    """True if the text still holds position `at` and the bytes that are compared before it."""
    used, size = int(arrays["counters"][TEXT_USED]) & LOW_64, len(arrays["text"])
    return bool(at) and at < used and (at + size) & LOW_64 > (used + LONGEST_MATCH + 8) & LOW_64


# ---- state of a stream ---------------------------------------------------------------------------------------------


STREAM_NUMBERS = ("long_match", "long_length", "pending", "target", "no_recent")


@dataclass
class CountStream:
    """State of a stream: its numbers as Python's integers, its arrays as views of the state.

    Args:
        state: its bytes, uint8.
        fields: the same memory, one element of `MemoryShape.stream`.
        history: position, and what its contexts are made from.
        long_match: position in the text of the byte that the match there predicts.
        long_length: bytes of that match; 0 without one.
        pending: 1 after a prediction of which the byte has not been seen.
        target: the label of the last step; -1 without one.
        no_recent: 1 in a document that is read without the short-term memory.
    """

    state: np.ndarray
    fields: np.void
    history: ByteHistory = field(default_factory=ByteHistory)
    long_match: int = 0
    long_length: int = 0
    pending: int = 0
    target: int = 0
    no_recent: int = 0

    @classmethod
    def load(cls, state: np.ndarray, shape: MemoryShape) -> "CountStream":
        """From a state (bytes,) uint8, of which the stream changes the arrays at once, and the numbers in `store`."""
        fields = state.view(shape.stream)[0]
        history = ByteHistory(**{name: int(fields[name]) for name in ByteHistory.__dataclass_fields__})
        return cls(state, fields, history, **{name: int(fields[name]) for name in STREAM_NUMBERS})

    def store(self) -> None:
        for name, value in vars(self.history).items():
            self.fields[name] = value
        for name in STREAM_NUMBERS:
            self.fields[name] = getattr(self, name)

    def reset(self) -> None:
        """The start of a document: zeros."""
        self.state[:] = 0
        self.history = ByteHistory()
        for name in STREAM_NUMBERS:
            setattr(self, name, 0)

    def __getitem__(self, name: str) -> Any:
        """A view of an array of the state."""
        return self.fields[name]


# ---- what is known at a position -----------------------------------------------------------------------------------


@dataclass
class FoundCounts:
    """Counts and matches of both memories for the next byte.

    Args:
        hashes: of the contexts here.
        counts: (SOURCES, 256) int64, how often each byte followed, by source; zeros for the sources of matches.
        recent: (SOURCES,) int64, the newest byte that followed in the window; -1 without one.
        order: number of the longest order with counts in the long-term memory, from 1; 0 without one.
        recent_order: number of the longest order with a position in the window, from 0.
        match_byte: the byte after the longest match in the window; -1 without one.
        match_length: its bytes.
        long_byte: the byte after the match in the text; -1 without one.
        long_length: its bytes.
    """

    hashes: ContextHashes
    counts: np.ndarray
    recent: np.ndarray
    order: int = 0
    recent_order: int = 0
    match_byte: int = -1
    match_length: int = 0
    long_byte: int = -1
    long_length: int = 0


def find_counts(arrays: Mapping[str, np.ndarray], shape: MemoryShape, stream: CountStream) -> FoundCounts:
    """Look up all contexts of the current position; the stream's match in the text may change."""
    hashes = hashes_at(stream.history, stream["ring"])
    found = FoundCounts(hashes, np.zeros((SOURCES, 256), np.int64), np.full(SOURCES, -1, np.int64))
    if shape.window and not stream.no_recent:
        _find_recent(stream, found)
    _find_long_match(arrays, stream, found)
    slots = arrays["slots"]
    for context, hashed in enumerate(hashes.contexts):
        first = _first_way(slots, hashed)
        bucket = slots[context, first : first + WAYS]
        (equal,) = np.nonzero(bucket["check"] == (hashed & 0xFFFF | 1))
        if not len(equal):
            continue
        symbols, counts = (bucket[equal[0]][name].tolist() for name in ("symbol", "count"))
        for symbol, count in zip(symbols, counts, strict=True):
            if not count:
                break
            found.counts[context, symbol] += count
        if context < len(ORDERS):
            found.order = context + 1
    return found


def _chain_keys(history: ByteHistory, hashes: ContextHashes) -> list[int]:
    """The context of each chain: the last 1, 2 and 4 bytes, the word, the indentation with the word."""
    last = history.last8
    return [last & 0xFF, last & 0xFFFF, last & LOW_32, hashes.contexts[WORD], hashes.contexts[INDENT]]


def _head_of_chain(heads: np.ndarray, chain: int, key: int) -> int:
    """Where the head of a chain is kept: the newest position with a context, plus 1."""
    bits = heads.shape[1].bit_length() - 1
    return scrambled((key + chain) & LOW_32) >> (32 - bits)


def _sources_of(chain: int, length: int) -> range:
    """The sources that count a position of a chain, of which `length` bytes before it equal the last ones."""
    if chain not in CHAIN_ORDERS:
        source = RECENT_WORD if chain == CHAIN_WORD else RECENT_INDENT
        return range(source, source + 1)
    first = RECENT + RECENT_ORDERS.index(CHAIN_ORDERS[chain][0])
    return range(first, first + sum(order <= length for order in CHAIN_ORDERS[chain]))


def _equal_bytes(ring: np.ndarray, at: int, history: ByteHistory, most: int) -> int:
    """Number of bytes before position `at` that equal the last ones, at most `most`."""
    mask, length = len(ring) - 1, 0
    while length < most:
        newest = history.last8 >> 8 * length & 255 if length < 8 else ring[(history.position - 1 - length) & mask]
        if ring[(at - 1 - length) & mask] != newest:
            break
        length += 1
    return length


def _find_recent(stream: CountStream, found: FoundCounts) -> None:
    """Count the bytes after earlier positions in the window, from the newest on each chain."""
    ring, heads, links, now = stream["ring"], stream["heads"], stream["links"], stream.history.position
    mask, window, low = len(ring) - 1, links.shape[1], int(np.iinfo(links.dtype).max)
    for chain, key in enumerate(_chain_keys(stream.history, found.hashes)):
        stored, last = int(heads[chain, _head_of_chain(heads, chain, key)]), 0
        for _ in range(CANDIDATES[chain]):
            age = (now + 1 - stored) & low
            # Older than the one before, in the window and in the document; else the chain has been overwritten.
            if not (last < age < window and age <= now):
                break
            at = now - age
            length = _equal_bytes(ring, at, stream.history, min(CHAIN_BYTES.get(chain, 0), at, window - age))
            sources, byte = _sources_of(chain, length), int(ring[at & mask])
            for source in sources:
                found.counts[source, byte] += 1
                if found.recent[source] < 0:
                    found.recent[source] = byte
            if chain == CHAIN_4 and sources and length > found.match_length:
                found.match_length, found.match_byte = length, byte
            last, stored = age, int(links[chain, at & (window - 1)])
    known = np.nonzero(found.recent[RECENT : RECENT + len(RECENT_ORDERS)] >= 0)[0]
    found.recent_order = int(known[-1]) if len(known) else 0


def link_position(stream: CountStream, hashes: ContextHashes) -> None:
    """Put the current position at the head of its chains, before its byte is appended."""
    heads, links, now = stream["heads"], stream["links"], stream.history.position
    low = int(np.iinfo(links.dtype).max)
    for chain, key in enumerate(_chain_keys(stream.history, hashes)):
        head = _head_of_chain(heads, chain, key)
        links[chain, now & (links.shape[1] - 1)] = heads[chain, head]
        heads[chain, head] = (now + 1) & low


def _find_long_match(arrays: Mapping[str, np.ndarray], stream: CountStream, found: FoundCounts) -> None:
    """Keep the stream's match in the text, or look for a longer one at the ends of equal contexts."""
    text, index, ring, now = arrays["text"], arrays["index"], stream["ring"], stream.history.position
    text_mask, mask, index_bits = len(text) - 1, len(ring) - 1, index.shape[1].bit_length() - 1
    if not is_in_text(arrays, stream.long_match):
        stream.long_length = 0
    for k, least in ((1, LONG_INDEX), (0, SHORT_MATCH)):
        if stream.long_length >= LONG_ENOUGH or now < least:
            continue
        at = int(index[k, found.hashes.text[k] >> (32 - index_bits)])
        if not is_in_text(arrays, at):
            continue
        length, most = 0, min(LONGEST_MATCH, now, at)
        while length < most and text[(at - 1 - length) & text_mask] == ring[(now - 1 - length) & mask]:
            length += 1
        # The index holds hashes of the context; a little less than the context must be equal.
        if length > stream.long_length and length >= least - 2:
            stream.long_length, stream.long_match = length, at
    if stream.long_length:
        found.long_byte = int(text[stream.long_match & text_mask])
    found.long_length = min(stream.long_length, MOST_LENGTH)


def follow_long_match(arrays: Mapping[str, np.ndarray], stream: CountStream, byte: int) -> None:
    """Move the stream's match in the text behind the byte that was read, or give it up."""
    if not stream.long_length:
        return
    text, at = arrays["text"], stream.long_match
    if is_in_text(arrays, at) and text[at & (len(text) - 1)] == byte:
        stream.long_match = (at + 1) & LOW_64
        stream.long_length += stream.long_length < MOST_LENGTH
    else:
        stream.long_length = 0
