"""Contexts of a position, and what each memory knows of them.

A context is a hash of the last bytes (an order), of the current word, or of the place in a line. The *long-term*
memory keeps, for each context, the bytes that followed it and how often. The *short-term* memory keeps the same of
the stream, in small tables that forget the oldest contexts. In both, a long match with earlier text predicts the byte
after it. Source: Mahoney, "Data Compression Explained" (2013), sections on context models,
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
    INDENT,
    LEAST_RING,
    LONG_CONTEXTS,
    ORDERS,
    RECENT_ORDERS,
    SLOT,
    SYMBOLS,
    TEXT_USED,
    WAYS,
    WORD,
    WORDS,
    MemoryShape,
)

Arrays = Mapping[str, np.ndarray]  # of the long-term memory, by the names of `MemoryShape.buffers`
LOW_32, LOW_64 = (1 << 32) - 1, (1 << 64) - 1
SHORT_MATCH, LONG_INDEX = 8, 20  # bytes of the contexts whose ends in the text are indexed
WORD_BYTES = frozenset(b"_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789" + bytes(range(128, 256)))
LONGEST_MATCH = 40  # bytes that are compared
LONG_ENOUGH = 24  # a match that is not given up for another one
MOST_LENGTH = 65535
# The window's index of matches has contexts of order 6; a little less must be equal.
MATCH_CONTEXT, SHORTEST_MATCH = ORDERS.index(6), 4
MOST_COUNTED = 255


# ---- position and hashes --------------------------------------------------------------------------------------------


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
    """Position in a document, and what its contexts are made from."""

    position: int = 0  # bytes of the document so far
    line: int = 0  # where the current line began
    last_line: int = 0  # where the line above began
    last8: int = 0  # the last 8 bytes, the newest in the lowest bits
    word: int = 0  # hash of the current word; 0 outside a word
    last_word: int = 0  # hash of the word before
    column: int = 0  # bytes since the line began
    indent: int = 0  # spaces and tabs at the beginning of the line
    first: int = 0  # the first byte after them; 0 before it
    above: int = 0  # the byte of the line above in this column; 0 without one

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

    def more_contexts(self, order_7: int) -> list[int]:
        """Hashes of the contexts that only a large memory has; `order_7` is the hash of the last 7 bytes."""
        return []


# By `MemoryShape.large`. Only the kernel reads large memories, for archives; their history is in the tests.
HISTORIES: dict[bool, type[ByteHistory]] = {False: ByteHistory}


@dataclass
class ContextHashes:
    """Hashes of the contexts at a position."""

    contexts: list[int]  # of the long-term memory
    text: tuple[int, int]  # of the last SHORT_MATCH and of the last LONG_INDEX bytes
    last: int  # of the last byte

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
    contexts += history.more_contexts(orders[7])
    return ContextHashes(contexts, (orders[SHORT_MATCH], orders[LONG_INDEX]), hash_of_two(orders[1], 1))


# ---- long-term memory ----------------------------------------------------------------------------------------------
# A slot holds the counts of up to 7 bytes after a context. A context may use WAYS slots, its bucket; a check of 16
# bits tells its slot from others. A full bucket loses the slot with the fewest counts: the memory never grows.


def _bucket(table: np.ndarray, hashed: int) -> np.ndarray:
    first = hashed >> (33 - len(table).bit_length()) & ~(WAYS - 1)
    return table[first : first + WAYS]


def _check(hashed: int) -> int:
    return hashed & 0xFFFF | 1


def _slot_to_count_in(slots: np.ndarray, context: int, hashed: int) -> np.void:
    """The slot of a context, in place of the one with the fewest counts if it has none."""
    bucket, check = _bucket(slots[context], hashed), _check(hashed)
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


def count_byte(arrays: Arrays, hashes: ContextHashes, position: int, byte: int) -> None:
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
        if context <= ABOVE:
            _count_in_slot(_slot_to_count_in(arrays["slots"], context, hashed), byte)
        else:
            _count_recent(_bucket(arrays["slots"][context], hashed), hashed, byte)


def count_document(arrays: Arrays, document: np.ndarray, end: int) -> None:
    """Count the bytes (T,) uint8 of a document, and its end byte if it is not negative."""
    history = HISTORIES[len(arrays["slots"]) > LONG_CONTEXTS]()
    ring = np.zeros(LEAST_RING, np.uint8)
    for byte in document.tolist() + [end & 255] * (end >= 0):
        count_byte(arrays, hashes_at(history, ring), history.position, byte)
        history.append(ring, byte)


def is_in_text(arrays: Arrays, at: int) -> bool:
    """True if the text still holds position `at` and the bytes that are compared before it."""
    used, size = int(arrays["counters"][TEXT_USED]) & LOW_64, len(arrays["text"])
    return bool(at) and at < used and (at + size) & LOW_64 > (used + LONGEST_MATCH + 8) & LOW_64


# ---- state of a stream ---------------------------------------------------------------------------------------------


STREAM_NUMBERS = ("long_match", "match", "long_length", "match_length", "pending", "target", "no_recent")


@dataclass
class CountStream:
    """State of a stream: its numbers as Python's integers, its arrays as views of the state."""

    state: np.ndarray  # its bytes, uint8
    shape: MemoryShape
    fields: np.void  # the same memory, one element of `MemoryShape.stream`
    history: ByteHistory = field(default_factory=ByteHistory)
    long_match: int = 0  # position in the text of the byte that the match there predicts
    match: int = 0  # position in the document of the byte that the match in the window predicts
    long_length: int = 0  # bytes of the match in the text; 0 without one
    match_length: int = 0  # bytes of the match in the window; 0 without one
    pending: int = 0  # 1 after a prediction of which the byte has not been seen
    target: int = 0  # the label of the last step; -1 without one
    no_recent: int = 0  # 1 in a document that is read without the short-term memory

    @classmethod
    def load(cls, state: np.ndarray, shape: MemoryShape) -> "CountStream":
        """From a state (bytes,) uint8, of which the stream changes the arrays at once, and the numbers in `store`."""
        fields = state.view(shape.stream)[0]
        kind = HISTORIES[shape.large]
        history = kind(**{name: fields[name].tolist() for name in kind.__dataclass_fields__})
        return cls(state, shape, fields, history, **{name: int(fields[name]) for name in STREAM_NUMBERS})

    def store(self) -> None:
        for name, value in vars(self.history).items():
            self.fields[name] = value
        for name in STREAM_NUMBERS:
            self.fields[name] = getattr(self, name)

    def reset(self) -> None:
        """The start of a document: zeros."""
        self.state[:] = 0
        self.history = type(self.history)()
        for name in STREAM_NUMBERS:
            setattr(self, name, 0)

    def __getitem__(self, name: str) -> Any:
        """A view of an array of the state."""
        return self.fields[name]


# ---- what is known at a position -----------------------------------------------------------------------------------


@dataclass
class FoundCounts:
    """Counts and matches of both memories for the next byte."""

    hashes: ContextHashes
    counts: np.ndarray  # (SOURCES, 256) int64, how often each byte followed, by source; zeros for matches
    recent: np.ndarray  # (SOURCES,) int64, the newest byte that followed, where slots keep it first; else -1
    known: set[int] = field(default_factory=set)  # contexts of the long-term memory with counts
    order: int = 0  # number of the longest order with counts in the long-term memory, from 1; 0 without one
    recent_order: int = 0  # the same in the short-term memory
    match_byte: int = -1  # the byte after the match in the window; -1 without one
    match_length: int = 0
    long_byte: int = -1  # the byte after the match in the text; -1 without one
    long_length: int = 0


def find_counts(arrays: Arrays, stream: CountStream) -> FoundCounts:
    """Look up all contexts of the current position; the stream's matches may change."""
    shape, hashes = stream.shape, hashes_at(stream.history, stream["ring"])
    found = FoundCounts(hashes, np.zeros((shape.sources, 256), np.int64), np.full(shape.sources, -1, np.int64))
    if shape.window and not stream.no_recent:
        _find_recent(stream, found)
        _find_match(stream, found)
    _find_long_match(arrays, stream, found)
    slots = arrays["slots"]
    for context, hashed in enumerate(hashes.contexts):
        slot = _count_symbols(_bucket(slots[context], hashed), hashed, found.counts[context])
        if slot is None:
            continue
        found.known.add(context)
        if context < len(ORDERS):
            found.order = context + 1
        elif context > ABOVE:
            found.recent[context] = slot["symbol"][0]
    return found


def _count_symbols(bucket: np.ndarray, hashed: int, counts: np.ndarray) -> np.void | None:
    """Add the counts of a context to counts (256,), and return its slot; None without one."""
    (equal,) = np.nonzero(bucket["check"] == _check(hashed))
    if not len(equal):
        return None
    slot = bucket[equal[0]]
    for symbol, count in zip(slot["symbol"].tolist(), slot["count"].tolist(), strict=True):
        if not count:
            break
        counts[symbol] += count
    return slot


# ---- matches -------------------------------------------------------------------------------------------------------


def _byte_at(ring: np.ndarray, at: int) -> int:
    return int(ring[at & (len(ring) - 1)])


def _equal_before(ring: np.ndarray, at: int, newest: np.ndarray, now: int, most: int) -> int:
    """Number of bytes before `at` in a ring that equal the bytes before `now` in another, at most `most`."""
    length, most = 0, min(most, LONGEST_MATCH)
    while length < most and _byte_at(ring, at - 1 - length) == _byte_at(newest, now - 1 - length):
        length += 1
    return length


def _followed(match: int, length: int, is_equal: bool) -> tuple[int, int]:
    """A match behind the byte that was read, and its length, 0 if another byte came."""
    return ((match + 1) & LOW_64, length + (length < MOST_LENGTH)) if is_equal else (match, 0)


# ---- short-term memory ---------------------------------------------------------------------------------------------
# Its slots are like the long-term memory's, but the newest slot of a bucket and the newest symbol of a slot come
# first, and the oldest are replaced.


def _find_recent(stream: CountStream, found: FoundCounts) -> None:
    for number, (table, hashed) in enumerate(zip(_recent_tables(stream), found.hashes.recent, strict=True)):
        slot = _count_symbols(_bucket(table, hashed), hashed, found.counts[stream.shape.contexts + number])
        if slot is not None:
            found.recent[stream.shape.contexts + number] = slot["symbol"][0]
            if number < len(RECENT_ORDERS):
                found.recent_order = number + 1


def _recent_tables(stream: CountStream) -> list[np.ndarray]:
    """The slots of each context."""
    return np.split(stream["recent"], np.cumsum(stream.shape.recent_slots[:-1]))


def remember(stream: CountStream, hashes: ContextHashes, byte: int) -> None:
    """Count a byte after the contexts of the current position, before it is appended; later contexts find it."""
    for table, hashed in zip(_recent_tables(stream), hashes.recent, strict=True):
        _count_recent(_bucket(table, hashed), hashed, byte)
    index = stream["match_index"]
    index[_match_place(index, hashes)] = (stream.history.position + 1) & int(np.iinfo(index.dtype).max)


def _count_recent(bucket: np.ndarray, hashed: int, byte: int) -> None:
    """Count a byte in the slot of a context. Bytes that have come since it last did lose half of what exceeds two."""
    check = _check(hashed)
    way = next((way for way in range(WAYS - 1) if bucket["check"][way] == check), WAYS - 1)
    slot = bucket[way].copy() if bucket["check"][way] == check else np.zeros((), SLOT)
    symbols, counts = slot["symbol"].tolist(), slot["count"].tolist()
    known = (i for i in range(SYMBOLS - 1) if not counts[i] or symbols[i] == byte)
    place = next(known, SYMBOLS - 1)
    counted = counts[place] if symbols[place] == byte else 0
    newer = [count - (count - 1) // 2 if count > 2 else count for count in counts[:place]]
    slot["symbol"] = [byte, *symbols[:place], *symbols[place + 1 :]]
    slot["count"] = [min(counted + 1, MOST_COUNTED), *newer, *counts[place + 1 :]]
    slot["check"] = check
    bucket[1 : way + 1] = bucket[:way].copy()
    bucket[0] = slot


def _match_place(index: np.ndarray, hashes: ContextHashes) -> int:
    return hashes.contexts[MATCH_CONTEXT] >> (33 - len(index).bit_length())


def _find_match(stream: CountStream, found: FoundCounts) -> None:
    """Keep the stream's match in the window, or look for a longer one."""
    ring, index, now = stream["ring"], stream["match_index"], stream.history.position
    window = stream.shape.window
    if stream.match_length < LONG_ENOUGH:
        age = (now + 1 - int(index[_match_place(index, found.hashes)])) & int(np.iinfo(index.dtype).max)
        at, length = now - age, 0
        if 0 < age < window and age <= now:
            length = _equal_before(ring, at, ring, now, min(at, window - age))
        if length > stream.match_length and length >= SHORTEST_MATCH:
            stream.match_length, stream.match = length, at
    found.match_length = min(stream.match_length, MOST_LENGTH)
    if found.match_length:
        found.match_byte = _byte_at(ring, stream.match)


def follow_match(stream: CountStream, byte: int) -> None:
    """Move the stream's match in the window behind the byte that was read, or give it up."""
    if stream.match_length:
        is_equal = _byte_at(stream["ring"], stream.match) == byte
        stream.match, stream.match_length = _followed(stream.match, stream.match_length, is_equal)


# ---- matches in the text of the long-term memory -------------------------------------------------------------------


def _find_long_match(arrays: Arrays, stream: CountStream, found: FoundCounts) -> None:
    """Keep the stream's match in the text, or look for a longer one at the ends of equal contexts."""
    text, index, ring, now = arrays["text"], arrays["index"], stream["ring"], stream.history.position
    index_bits = index.shape[1].bit_length() - 1
    if not is_in_text(arrays, stream.long_match):
        stream.long_length = 0
    for k, least in ((1, LONG_INDEX), (0, SHORT_MATCH)):
        if stream.long_length >= LONG_ENOUGH or now < least:
            continue
        at = int(index[k, found.hashes.text[k] >> (32 - index_bits)])
        if not is_in_text(arrays, at):
            continue
        length = _equal_before(text, at, ring, now, min(now, at))
        # The index holds hashes of the context; a little less than the context must be equal.
        if length > stream.long_length and length >= least - 2:
            stream.long_length, stream.long_match = length, at
    if stream.long_length:
        found.long_byte = _byte_at(text, stream.long_match)
    found.long_length = min(stream.long_length, MOST_LENGTH)


def follow_long_match(arrays: Arrays, stream: CountStream, byte: int) -> None:
    """Move the stream's match in the text behind the byte that was read, or give it up."""
    if stream.long_length:
        is_equal = is_in_text(arrays, stream.long_match) and _byte_at(arrays["text"], stream.long_match) == byte
        stream.long_match, stream.long_length = _followed(stream.long_match, stream.long_length, is_equal)
