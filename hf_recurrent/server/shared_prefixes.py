"""States after the beginnings of texts, which several processes and machines share.

A separate thread writes them: a slow store delays no request. A state has the name of its text's hash; a piece
for every block of tokens lists the lengths of the stored texts that end in it.
"""

import json
import queue
import threading
from contextlib import suppress

from hf_recurrent.modeling.block.recurrent_state import RecurrentState
from hf_recurrent.server.blob_stores import SafeBlobs
from hf_recurrent.server.state_packing import StatePacking
from hf_recurrent.server.text_hashes import PrefixKey, TextHashes

_MOST_WAITING = 256  # states that are to be written
_MOST_BLOCKS = 24  # that a search looks up, from the end of the text
_MOST_LENGTHS = 16  # of a block


class SharedPrefixes:
    """Stored states of all processes with the same weights and arithmetic."""

    def __init__(self, blobs: SafeBlobs, zero: RecurrentState, computation: str):
        self._blobs, self._packing, self._computation = blobs, StatePacking(zero), computation[:32]
        self._waiting: queue.Queue[tuple[PrefixKey, bytes] | None] = queue.Queue(_MOST_WAITING)
        self._writer = threading.Thread(target=self._write, name="shared prefixes", daemon=True)
        self._writer.start()

    def find(self, text: TextHashes, longest: int, longer_than: int) -> tuple[int, RecurrentState] | None:
        """The longest stored beginning, within bounds: its length, and the state after it. It blocks."""
        blocks = [self._block(block) for block, _ in zip(text.blocks(longest), range(_MOST_BLOCKS), strict=False)]
        lengths: set[int] = set()
        for data in self._blobs.get(blocks).values():
            with suppress(ValueError, TypeError):
                lengths |= {length for length in json.loads(data) if longer_than < length <= longest}
        for length in sorted(lengths, reverse=True)[:_MOST_LENGTHS]:
            name = self._state(text.key(length))
            data = self._blobs.get([name]).get(name)
            if data is not None:
                with suppress(ValueError):
                    return length, self._packing.unpack(data)
        return None

    def put(self, key: PrefixKey, data: bytes) -> None:
        """Write a packed state, later; it is dropped if too many wait."""
        with suppress(queue.Full):
            self._waiting.put_nowait((key, data))

    def close(self) -> None:
        """Write what waits."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=5)
            self._writer.join(5)

    def _write(self) -> None:
        while (found := self._waiting.get()) is not None:
            key, data = found
            if not self._blobs.put(self._state(key), data):
                continue
            # Another process may change the list meanwhile: then a state is not found, and its text read again.
            name, lengths = self._block(key.block), []
            with suppress(ValueError, TypeError):
                lengths = [*json.loads(self._blobs.get([name]).get(name, b"[]"))]
            kept = [length for length in lengths if length != key.length][-_MOST_LENGTHS + 1 :]
            self._blobs.put(name, json.dumps([*kept, key.length]).encode())

    def _state(self, key: PrefixKey) -> str:
        return f"prefixes/{self._computation}-{key.whole.hex()}"

    def _block(self, block: bytes) -> str:
        return f"blocks/{self._computation}-{block.hex()}"
