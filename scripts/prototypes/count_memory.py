#!/usr/bin/env python
"""Prototype: bits per byte of a memory of contexts on held-out files, each from the same start, adapting inside it.

Reads training documents once, in the order of their ends on 16 streams, as the default recipe does. A document is
predicted before it is added to the long-term memory, so that the mixing weights learn how far to trust a memory that
has not seen the document. The C file beside this one has the method. docs/log.md has results.

    python scripts/prototypes/count_memory.py --files 22
    python scripts/prototypes/count_memory.py --train_bytes 20e6 --slot_bits 20
"""

import argparse
import ctypes
import lzma
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from hf_recurrent import load_corpus
from hf_recurrent.data.document_order import DocumentOrder

NAMES = ["slots", "text", "index", "cells", "weights", "final_weights", "refinement"]
COSTS = -np.log2(np.maximum(np.arange(1 << 16), 1) / (1 << 16))


class LongTerm(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("slot_bits", "text_size", "text_used", "index_bits")),
        *((name, ctypes.c_void_p) for name in NAMES),
    ]


class Rates(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_float) for name in ("weights", "delta", "final")),
        *((name, ctypes.c_int32) for name in ("least_cell", "learns", "recent")),
    ]


class Shape(ctypes.Structure):
    _fields_ = [("window", ctypes.c_uint64), ("head_bits", ctypes.c_uint64)]


class CountMemory:
    """The long-term memory, and streams that read with it."""

    def __init__(self, library: ctypes.CDLL, slot_bits: int, text_size: int, index_bits: int = 20):
        self.library, sizes = library, (ctypes.c_int64 * 16)()
        library.hf_cm_tables()
        library.hf_cm_sizes(sizes)
        contexts, cells, rows, inputs, sets, refinements, knots, self.head, self.chains, _, slot = sizes[:11]
        shapes = [
            ((contexts << slot_bits) * slot, np.uint8),
            (text_size, np.uint8),
            (2 << index_bits, np.uint32),
            (2 * cells, np.uint16),
            (rows * inputs, np.float32),
            (256 * sets, np.float32),
            (refinements * 65536 * knots, np.uint16),
        ]
        self.arrays = [np.zeros(size, dtype) for size, dtype in shapes]
        pointers = [array.ctypes.data for array in self.arrays]
        self.long_term = LongTerm(slot_bits, text_size, 0, index_bits, *pointers)
        library.hf_cm_begin(ctypes.byref(self.long_term))

    def new_state(self, window: int, head_bits: int) -> tuple[np.ndarray, Shape]:
        size = self.head + window + 4 * self.chains * ((1 << head_bits) + window)
        return np.zeros(size, np.uint8), Shape(window, head_bits)

    def read(self, state, data: np.ndarray, learns: bool, recent: bool = True, delta: float = 0.01) -> float:
        """Bits of the data."""
        probabilities = np.empty((len(data), 8), np.uint16)
        rates = Rates(0.003, delta, 0.002, 98, learns, recent)
        pointers = [ctypes.byref(part) for part in (state[1], rates)]
        self.library.hf_cm_read(
            ctypes.byref(self.long_term), ctypes.c_void_p(state[0].ctypes.data), *pointers,
            ctypes.c_void_p(data.ctypes.data), ctypes.c_int64(len(data)), None,
            ctypes.c_void_p(probabilities.ctypes.data),
        )  # fmt: skip
        return float(COSTS[probabilities].sum())

    def insert(self, data: np.ndarray) -> None:
        """Add a document to the long-term memory."""
        state, shape = self.new_state(1 << 12, 4)
        self.library.hf_cm_insert(
            ctypes.byref(self.long_term), ctypes.c_void_p(state.ctypes.data), ctypes.byref(shape),
            ctypes.c_void_p(data.ctypes.data), ctypes.c_int64(len(data)),
        )  # fmt: skip


def compiled(folder: str) -> ctypes.CDLL:
    """The C file as a library."""
    library, source = Path(folder) / "count_memory.so", Path(__file__).with_suffix(".c")
    flags = ["-std=c11", "-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


def training_documents(corpus, total: int, streams: int = 16) -> list[np.ndarray]:
    """The documents that `streams` streams read, cut at the end, in the order of their ends."""
    order, ends, share = DocumentOrder(len(corpus), 42), [], total // streams
    for stream in range(streams):
        done, number = 0, 0
        while done < share:
            document = np.array(corpus[int(order(np.array([stream + streams * number]))[0])])[: share - done]
            done, number = done + len(document), number + 1
            ends.append((done, stream, document))
    return [document for _, _, document in sorted(ends, key=lambda each: each[:2])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_bytes", type=float, default=3.5e6)
    parser.add_argument("--files", type=int, default=88, help="held-out files")
    parser.add_argument("--slot_bits", type=int, default=18, help="log2 of the slots of a context")
    parser.add_argument("--window", type=int, default=1 << 20, help="bytes of the short-term memory, a power of two")
    arguments = parser.parse_args()
    train, held_out = load_corpus("python").split(0.05, 42)
    step = max(1, len(held_out) // arguments.files)
    files = [np.array(held_out[index]) for index in range(0, len(held_out), step)]
    size = sum(map(len, files))
    with tempfile.TemporaryDirectory() as folder:
        memory = CountMemory(compiled(folder), arguments.slot_bits, 1 << int(arguments.train_bytes - 1).bit_length())
        begin = time.process_time()
        for number, document in enumerate(training_documents(train, int(arguments.train_bytes))):
            # One document in eight without the short-term memory: the weights have to know both cases.
            memory.read(memory.new_state(arguments.window, 16), document, True, recent=number % 8 != 7)
            memory.insert(document)
        print(f"read {arguments.train_bytes:,.0f} bytes in {time.process_time() - begin:.0f} s of processor time")
        for name, recent in (("adapting inside the file", True), ("frozen (weights adapt)", False)):
            begin = time.process_time()
            bits = sum(memory.read(memory.new_state(arguments.window, 16), file, False, recent) for file in files)
            rate = size / (time.process_time() - begin) / 1e3
            print(f"counts alone, {name}: {bits / size:.4f} bits per byte, {rate:.0f} kB/s")
    print(f"xz -9, each file alone: {8 * sum(len(lzma.compress(file, preset=9)) for file in files) / size:.4f}")


if __name__ == "__main__":
    main()
