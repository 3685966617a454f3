"""The count memory in plain numpy, where no kernel is built. Same numbers as the kernel, bit for bit.

`count_memory_contexts.py` finds what both memories know about the next byte, and `count_memory_mixing.py` turns it to
probabilities and learns; here bytes are read one after another.

Shape letters: B streams, T steps.
"""

import numpy as np

from .count_memory_contexts import (
    Arrays,
    CountStream,
    FoundCounts,
    count_byte,
    count_document,
    find_counts,
    follow_long_match,
    follow_match,
    remember,
)
from .count_memory_layout import DOCUMENTS, REAL_STEP, RESET_STEP, SAMPLED_STEP, Block, MemoryShape, Rates
from .count_memory_mixing import (
    NodePredictions,
    begin_mixing,
    bits_of,
    byte_log_probabilities,
    learn_bits,
    log_positive,
    network_nodes,
    nodes_on_the_way,
    predict_nodes,
)

ALL_NODES = np.arange(1, 256)


class CountMemoryReference:
    """A long-term memory in arrays of [`MemoryShape.buffers`]; as `Memory` of the compiled kernel."""

    def __init__(self, arrays: Arrays, shape: MemoryShape):
        self.arrays, self.shape = arrays, shape

    def begin(self) -> None:
        """Fill arrays of zeros with the values before the first byte."""
        begin_mixing(self.arrays, self.shape)

    def read(self, states: np.ndarray, rates: Rates, block: Block) -> None:
        """Read a block; states (B, bytes) uint8 and results are changed in place, arrays only if the memory learns."""
        states = np.asarray(states)  # of tensors, in the same memory
        block = Block(*(np.asarray(value) if hasattr(value, "shape") else value for value in block))
        with np.errstate(all="ignore"):
            for row, state in enumerate(states):
                _CountReader(self.arrays, self.shape, state, rates, block, row).read()

    def insert(self, document: np.ndarray, end: int = -1) -> None:
        """Count the bytes (T,) uint8 of a document, and its end byte if it is not negative."""
        count_document(self.arrays, document, end)


class _CountReader:
    """Reads the steps of one stream, the row `row` of a block."""

    def __init__(self, arrays: Arrays, shape: MemoryShape, state: np.ndarray, rates: Rates, block: Block, row: int):
        self.arrays, self.rates, self.block, self.row = arrays, rates, block, row
        self.stream = CountStream.load(state, shape)
        if block.pending is not None and not 0 <= block.pending_used[row] <= block.pending.shape[1]:
            block.pending_used[row] = 0
        self.found: FoundCounts | None = None  # at the current position
        self.path: NodePredictions | None = None  # of the byte `path_byte`
        self.path_byte = -1

    def read(self) -> None:
        flags = self.block.flags[self.row]
        for step in np.flatnonzero(flags & REAL_STEP).tolist():
            if flags[step] & RESET_STEP:
                self._begin_document()
            self._read_byte(int(self.block.tokens[self.row, step]), bool(flags[step] & SAMPLED_STEP))
            self._predict(step)
        self.stream.store()

    def _begin_document(self) -> None:
        """A document that is learned ends: its last label is learned from, then its bytes are counted.

        Every eighth document is read without the short-term memory and without rows of its own, so that the shared
        weights are also trained for that.
        """
        block = self.block
        if self.rates.learns:
            target = self.stream.target if self.stream.target < 256 else -1
            if self.stream.pending and target >= 0:
                if self.path_byte != target:
                    self.found = None
                self._learn(target)
            if block.pending is not None:
                self._count_pending(target if self.stream.history.position else -1)
        self.stream.reset()
        if self.rates.learns and block.pending is not None:
            counters = self.arrays["counters"]
            counters[DOCUMENTS] += 1
            self.stream.no_recent = int(counters[DOCUMENTS] % 8 == 0)
        self.found, self.path_byte = None, -1

    def _count_pending(self, end: int) -> None:
        """Count the pending bytes of the running document, and the end byte if it is not negative."""
        used = int(self.block.pending_used[self.row])
        count_document(self.arrays, self.block.pending[self.row, :used], end)
        self.block.pending_used[self.row] = 0

    def _find(self) -> FoundCounts:
        if self.found is None:
            self.found = find_counts(self.arrays, self.stream)
        return self.found

    def _predict_path(self, byte: int) -> NodePredictions:
        """Predictions of the bits of a byte, kept for `_learn`."""
        if self.path_byte != byte:
            nodes = nodes_on_the_way(byte)
            self.path = predict_nodes(self.arrays, self.stream, self._find(), nodes)
            self.path_byte = byte
        return self.path

    def _learn(self, byte: int) -> None:
        learn_bits(self.arrays, self.stream, self.rates, self._predict_path(byte), byte)
        self.path_byte = -1

    def _read_byte(self, byte: int, is_sampled: bool) -> None:
        """Learn from the byte, unless the model has sampled it, count it, and move past it."""
        stream, block, row = self.stream, self.block, self.row
        hashes = self._find().hashes
        if stream.pending and not is_sampled:
            self._learn(byte)
        if self.rates.inserts:
            count_byte(self.arrays, hashes, stream.history.position, byte)
        follow_long_match(self.arrays, stream, byte)
        if is_sampled:
            stream.match_length = 0  # it could go on into samples
        elif stream.shape.window and not stream.no_recent:
            remember(stream, hashes, byte)
            follow_match(stream, byte)
        stream.history.append(stream["ring"], byte)
        if block.pending is not None:
            if block.pending_used[row] == block.pending.shape[1]:
                self._count_pending(-1)
            block.pending[row, block.pending_used[row]] = byte
            block.pending_used[row] += 1
        self.found, self.path_byte = None, -1

    def _predict(self, step: int) -> None:
        """Predict the next byte; write the results that are wanted."""
        stream, block, row = self.stream, self.block, self.row
        stream.pending = 1
        stream.target = -1 if block.targets is None else int(block.targets[row, step])
        if stream.target > 255:
            stream.target = -1
        self._read_network(step)
        found = self._find()
        if stream.target >= 0:
            self._write_target(step)
        if block.logits is not None and step >= block.first:
            predicted = predict_nodes(self.arrays, stream, found, ALL_NODES, skips=True)
            block.logits[row, step - block.first] = byte_log_probabilities(predicted.refined)

    def _read_network(self, step: int) -> None:
        """The network's logits of nodes; of those on the way to the target only if it gives no others."""
        logits = None if self.block.network is None else self.block.network[self.row, step]
        nodes, target = self.stream["network"], self.stream.target
        if logits is None or (len(logits) == 8 and target < 0):
            nodes[0] = 0
        elif len(logits) == 8:
            nodes[0] = 1
            nodes[nodes_on_the_way(target)] = logits
        else:
            nodes[:] = network_nodes(logits)

    def _write_target(self, step: int) -> None:
        """The cost of the target in nats, and 65536 times the probability of each of its bits."""
        target = self.stream.target
        ones = self._predict_path(target).refined
        probabilities = np.where(bits_of(target), ones, 65536 - ones)
        nats = np.float32(0)
        for log in log_positive(probabilities.astype(np.float32) * np.float32(1 / 65536)):
            nats = nats - log
        if self.block.nats is not None:
            self.block.nats[self.row, step] = nats
        if self.block.probabilities is not None:
            self.block.probabilities[self.row, step] = probabilities
