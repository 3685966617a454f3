"""A program that compresses files with PPMd, each after the same bytes; [`ppmd_bits_per_byte`] runs it.

    python ppmd_program.py ORDER MEMORY

The encoder reads the bytes before the files once. Each file is compressed in a fork of the process, which has a copy
of that encoder, so many files cost little more than reading them one after another. This is a program of its own
because a process with threads and gigabytes of memory should not fork.

Standard input has the bytes before the files and then the files, each after its length (8 bytes). Standard output gets
a line for each file: the bytes that it adds to the compressed size.
"""

import os
import struct
import sys
from collections.abc import Iterator
from typing import BinaryIO

import pyppmd

LENGTH = struct.Struct("<q")


def read_parts(stream: BinaryIO) -> Iterator[bytes]:
    """The parts of a stream, each after its length."""
    while head := stream.read(LENGTH.size):
        yield stream.read(*LENGTH.unpack(head))


def size_in_fork(encoder: pyppmd.Ppmd7Encoder, data: bytes) -> int:
    """Compressed bytes from `data` to the end of the stream; the encoder itself does not read it."""
    receiver, sender = os.pipe()
    if not (process := os.fork()):
        os.write(sender, LENGTH.pack(len(encoder.encode(data)) + len(encoder.flush())))
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as stream:
        found = stream.read()
    os.waitpid(process, 0)
    if len(found) != LENGTH.size:
        raise SystemExit("PPMd failed; there may not be enough memory.")
    return LENGTH.unpack(found)[0]


def main() -> None:
    order, memory = map(int, sys.argv[1:])
    before, *files = read_parts(sys.stdin.buffer)
    encoder = pyppmd.Ppmd7Encoder(order, memory)
    encoder.encode(before)

    def size(data: bytes) -> int:
        if hasattr(os, "fork"):
            return size_in_fork(encoder, data)
        fresh = pyppmd.Ppmd7Encoder(order, memory)  # Windows has no forks
        return len(fresh.encode(before)) + len(fresh.encode(data)) + len(fresh.flush())

    ending = size(b"") if before else 0
    for data in files:
        print(size(data) - ending, flush=True)


if __name__ == "__main__":
    main()
