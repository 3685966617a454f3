"""States after the beginnings of texts, so that no text is read twice: in memory and on disk, bounded in bytes."""

import heapq
from collections import Counter
from dataclasses import dataclass, field

from hf_recurrent.modeling.block.recurrent_state import RecurrentState
from hf_recurrent.server.prefix_database import PrefixDatabase, StoredPrefix
from hf_recurrent.server.state_packing import StatePacking
from hf_recurrent.server.text_hashes import PrefixKey, TextHashes

# Bytes of an entry in addition to its state.
_OVERHEAD = 1024


@dataclass(eq=False)
class _Entry:
    """A stored state."""

    key: PrefixKey
    data: bytes | None  # the packed state; None if it is only on disk so far
    nbytes: int
    parent: "_Entry | None" = None  # of the longest stored beginning of this text
    children: "set[_Entry]" = field(default_factory=set)  # whose parent this is
    priority: float = 0.0  # the entry with the lowest one is evicted first

    @property
    def gain(self) -> int:
        """Tokens that would be read again without this state."""
        return self.key.length - (self.parent.key.length if self.parent else 0)


class PrefixStore:
    """States by the tokens before them, in memory, and in a database if there is one. One thread uses it.

    An entry's priority is the last evicted one's plus the tokens that it saves, renewed whenever it is used
    (GreedyDual): an old entry stays longer the more it saves. Where states grow, tokens count for less the larger the
    state is. When a state is evicted, what it saved is added to the next longer one of the same text.
    """

    def __init__(self, zero: RecurrentState, max_bytes: int, database: PrefixDatabase | None = None):
        self._packing, self._database = StatePacking(zero), database
        self.entry_bytes = self._packing.nbytes + _OVERHEAD  # of the smallest entry
        self.grows, self._max_bytes, self._bytes = self._packing.grows, max_bytes, 0
        self._entries: dict[bytes, _Entry] = {}
        self._lengths: dict[bytes, Counter[int]] = {}  # hash of a block → lengths of entries that end in it
        self._heap: list[tuple[float, int, _Entry]] = []  # also former priorities of entries
        self._pushed, self._clock = 0, 0.0
        if database is not None:
            self._load(database)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, text: TextHashes, longest: int) -> tuple[int, RecurrentState] | None:
        """Length of the longest stored beginning of a text, up to a limit, and the state after it."""
        while entry := self._longest(text, longest):
            if (state := self._use(entry)) is not None:
                return entry.key.length, state
        return None

    def get(self, key: PrefixKey) -> RecurrentState | None:
        """The state after a text."""
        entry = self._entries.get(key.whole)
        return None if entry is None or entry.key != key else self._use(entry)

    def longest(self, text: TextHashes, longest: int) -> int:
        """The length of the longest stored beginning of a text; 0 if there is none."""
        entry = self._longest(text, longest)
        return 0 if entry is None else entry.key.length

    def put(self, text: TextHashes, key: PrefixKey, state: RecurrentState) -> bytes | None:
        """Store the state after the first tokens of a text, whose key this is; the packed state if it is new."""
        if known := self._entries.get(key.whole):
            if known.key == key:
                self._renew(known)
                return None
            self._delete(known)  # its row is damaged
        if self.entry_bytes > self._max_bytes:
            return None
        data = self._packing.pack(state)
        entry = _Entry(key, data, len(data) + _OVERHEAD)
        if entry.nbytes > self._max_bytes:
            return None
        while self._bytes + entry.nbytes > self._max_bytes:
            self._evict()
        self._add(entry, self._longest(text, key.length - 1))
        self._set_priority(entry)
        if self._database is not None:
            parent = entry.parent and entry.parent.key.whole
            self._database.write(StoredPrefix(key, parent, entry.priority, len(data)), data)
        return data

    def close(self) -> None:
        if self._database is not None:
            self._database.close()

    def _load(self, database: PrefixDatabase) -> None:
        """The index of the database; states are read when they are used."""
        rows = list(database.index())
        self._entries = {row.key.whole: _Entry(row.key, None, row.nbytes + _OVERHEAD) for row in rows}
        for row in rows:
            entry, parent = self._entries[row.key.whole], self._entries.get(row.parent)
            if parent is not None and parent.key.length >= row.key.length:  # a damaged row
                parent = None
            self._add(entry, parent)
            self._push(entry, row.priority)
        self._clock = min((row.priority for row in rows), default=0.0)
        while self._bytes > self._max_bytes:
            self._evict()
        database.shrink()

    def _longest(self, text: TextHashes, longest: int) -> _Entry | None:
        for block in text.blocks(longest):
            for length in sorted(self._lengths.get(block, ()), reverse=True):
                if length <= longest and (found := self._entries.get(text.key(length).whole)):
                    return found
        return None

    def _use(self, entry: _Entry) -> RecurrentState | None:
        """The state of an entry; an entry whose state is damaged is deleted."""
        if entry.data is None:
            entry.data = self._database.state(entry.key)
        try:
            state = None if entry.data is None else self._packing.unpack(entry.data)
        except ValueError:
            state = None
        if state is None:
            self._delete(entry)
        else:
            self._renew(entry)
        return state

    def _renew(self, entry: _Entry) -> None:
        before = entry.priority
        self._set_priority(entry)
        if self._database is not None and entry.priority != before:
            self._database.touch(entry.key, entry.priority)

    def _set_priority(self, entry: _Entry) -> None:
        self._push(entry, self._clock + self._value(entry.gain, entry))

    def _value(self, gain: int, entry: _Entry) -> float:
        """Tokens that an entry saves, for its size."""
        return gain * self.entry_bytes / entry.nbytes

    def _push(self, entry: _Entry, priority: float) -> None:
        entry.priority = priority
        self._pushed += 1
        heapq.heappush(self._heap, (priority, self._pushed, entry))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [each for each in self._heap if self._is_current(each)]
            heapq.heapify(self._heap)

    def _is_current(self, pushed: tuple[float, int, _Entry]) -> bool:
        priority, _, entry = pushed
        return entry.priority == priority and self._entries.get(entry.key.whole) is entry

    def _evict(self) -> None:
        """Delete the entry of the lowest priority."""
        while not self._is_current(first := heapq.heappop(self._heap)):
            pass
        self._clock = max(self._clock, first[0])
        self._delete(first[2])

    def _add(self, entry: _Entry, parent: _Entry | None) -> None:
        self._entries[entry.key.whole] = entry
        self._bytes += entry.nbytes
        self._lengths.setdefault(entry.key.block, Counter())[entry.key.length] += 1
        entry.parent = parent
        if parent is not None:
            parent.children.add(entry)

    def _delete(self, entry: _Entry) -> None:
        del self._entries[entry.key.whole]
        self._bytes -= entry.nbytes
        lengths = self._lengths[entry.key.block]
        lengths[entry.key.length] -= 1
        if not lengths[entry.key.length]:
            del lengths[entry.key.length]
        if not lengths:
            del self._lengths[entry.key.block]
        if entry.parent is not None:
            entry.parent.children.remove(entry)
        for child in entry.children:
            child.parent = entry.parent
            if entry.parent is not None:
                entry.parent.children.add(child)
            self._push(child, child.priority + self._value(entry.gain, child))
        if self._database is not None:
            parent, children = entry.parent and entry.parent.key.whole, [each.key.whole for each in entry.children]
            self._database.delete(entry.key, parent, children)
