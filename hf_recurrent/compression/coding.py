"""The loop over steps and blocks that compression and decompression share.

The data are cut into B contiguous parts of equal length (the last ones are shorter), and one byte of each is coded at
every step, because a network takes far less time for a batch of B rows than for B single rows.

Shape letters: B streams (parts), T steps.
"""

import zlib
from collections.abc import Callable, Iterator
from typing import IO

import numpy as np

from hf_recurrent.compression.archive import (
    BLOCK_CODE,
    BLOCK_DATA,
    ArchiveError,
    Block,
    Header,
    read_block,
    write_block,
)
from hf_recurrent.compression.byte_coding import ByteCoding, require_kernel

# Called with the number of bytes done, after every `_REPORTED_STEPS` steps: a block of a network takes a minute.
Progress = Callable[[int], None]
_REPORTED_STEPS = 512
_MOST_CODE = 17  # bytes of code that a byte may take


def no_progress(done: int) -> None:
    pass


class Parts:
    """Offsets of the bytes of every step in data of `size` bytes."""

    def __init__(self, size: int, streams: int):
        self.steps = -(-size // streams)
        self._begins = np.arange(streams) * self.steps
        self._lengths = np.clip(size - self._begins, 0, self.steps)

    def offsets(self, step: int, count: int = 1) -> np.ndarray:
        """Offsets of the bytes coded at `count` steps, in the order of coding; at most B at each step."""
        steps = np.arange(step, step + count)[:, None]
        return (self._begins + steps)[self._lengths > steps]

    def pieces(self, symbols: np.ndarray, step: int, count: int) -> Iterator[tuple[int, bytes]]:
        """The bytes of `count` steps as contiguous pieces of the data, each with its offset."""
        offsets = self.offsets(step, count)
        order = np.argsort(offsets, kind="stable")
        breaks = np.flatnonzero(np.diff(offsets[order]) != 1) + 1
        for piece in np.split(order, breaks):
            yield int(offsets[piece[0]]), symbols[piece].tobytes()

    def bytes_before(self, step: int) -> int:
        """Bytes coded in the steps before `step`."""
        return int(np.minimum(self._lengths, step).sum())


def encode(
    data: np.ndarray, archive: IO[bytes], coding: ByteCoding, step: int = 0, progress: Progress = no_progress
) -> Iterator[tuple[int, int]]:
    """Append the blocks of the data, uint8, to an archive; yield the next step and the bytes done after each block.

    Args:
        archive: positioned after its header, or after the block that ended before `step`.
        coding: before the byte of `step`.
        progress: called with the number of bytes done, several times in a block and after it; it may raise to stop.
    """
    parts = Parts(len(data), coding.streams)
    while step < parts.steps:
        block, most = bytearray(), coding.chunk * coding.streams
        encoder = require_kernel().Coder(room=BLOCK_CODE + (most + 1) * _MOST_CODE)
        while step < parts.steps and len(block) + most <= BLOCK_DATA and encoder.size < BLOCK_CODE:
            count = min(coding.chunk, parts.steps - step)
            symbols = data[parts.offsets(step, count)]
            coding.code(encoder, np.ascontiguousarray(symbols).reshape(count, -1))
            block += symbols.tobytes()
            step += count
            _report(progress, parts, step)
        write_block(archive, block, encoder.finish())
        done = parts.bytes_before(step)
        yield step, done
        progress(done)


def decode(
    archive: IO[bytes],
    header: Header,
    output: IO[bytes],
    coding: ByteCoding,
    step: int = 0,
    progress: Progress = no_progress,
) -> Iterator[tuple[int, int]]:
    """Decode the blocks of an archive to `output`, each after its checksum matches; otherwise as [`encode`]."""
    parts = Parts(header.size, coding.streams)
    while step < parts.steps:
        done = parts.bytes_before(step)
        block = read_block(archive, done)
        decoded = np.empty(block.size, np.uint8)
        steps = _decode_block(block, decoded, parts, coding, step, progress)
        if steps is None or zlib.crc32(decoded) != block.checksum:
            network = header.network
            needs = f"; it needs the arithmetic of the machine that made it ({network.kernel})" if network else ""
            raise ArchiveError(
                f"the block after {done:,} bytes is decoded to other bytes than were compressed, so nothing of it was "
                f"written{needs}."
            )
        for offset, piece in parts.pieces(decoded, step, steps):
            output.seek(offset)
            output.write(piece)
        step += steps
        yield step, done + block.size
        progress(done + block.size)
    if archive.read(1):
        raise ArchiveError("it continues after its last block.")


def _decode_block(
    block: Block, decoded: np.ndarray, parts: Parts, coding: ByteCoding, step: int, progress: Progress
) -> int | None:
    """Fill `decoded`, and return the number of steps; None if the block does not end with a step."""
    kernel = require_kernel()
    # Bytes that are stored are encoded for nothing, so that they are read too.
    coder = kernel.Coder() if block.stored else kernel.Coder(block.content)
    done, first, before = 0, step, parts.bytes_before(step)
    while done < len(decoded) and step < parts.steps:
        count = min(coding.chunk, parts.steps - step)
        end = parts.bytes_before(step + count) - before
        if end > len(decoded) and coding.streams == 1:
            count, end = len(decoded) - done, len(decoded)
        if end > len(decoded):
            return None
        symbols = np.zeros((count, (end - done) // count), np.uint8)
        if block.stored:
            symbols.flat = np.frombuffer(block.content, np.uint8)[done:end]
        coding.code(coder, symbols)
        decoded[done:end] = symbols.flat
        done, step = end, step + count
        _report(progress, parts, step)
    return step - first if done == len(decoded) else None


def _report(progress: Progress, parts: Parts, step: int) -> None:
    if step % _REPORTED_STEPS == 0:
        progress(parts.bytes_before(step))
