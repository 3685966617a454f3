"""General compressors as baselines of bits per byte, on the same episodes as the model.

Each episode is compressed alone, without any training, so the comparison favours the model.
"""

import bz2
import gzip
import importlib.util
import lzma
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tqdm.auto import tqdm

from hf_recurrent.data.corpus import Corpus

ORDERS = (8, 16, 32)
_MEMORY = 3 << 30  # bytes of the encoder, of which it uses what it needs: 1.2 GB for order 32 after 30 MB of text
_PROGRAM = str(Path(__file__).with_name("ppmd_program.py"))


def has_ppmd() -> bool:
    """True if the package of the compressor is installed."""
    return importlib.util.find_spec("pyppmd") is not None


def ppmd_bits_per_byte(corpus: Corpus, before: bytes = b"", *, orders: Sequence[int] = ORDERS) -> dict[int, float]:
    """Order → bits per byte of PPMd over all episodes, each compressed after the same bytes.

    The size of an episode is size(before + episode) - size(before); without bytes before, its size alone.

    Raises:
        ImportError: pyppmd is not installed.
        RuntimeError: the compressor failed.
    """
    if not has_ppmd():
        raise ImportError('PPMd needs pyppmd: pip install "hf-recurrent[baselines]".')
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        longest_first = sorted(orders, reverse=True)
        sizes = {order: pool.submit(_size, order, corpus, before) for order in longest_first}
        return {order: 8 * sizes[order].result() / corpus.num_bytes for order in orders}


def _size(order: int, corpus: Corpus, before: bytes) -> int:
    """Bytes that all episodes add, each alone."""
    command = [sys.executable, "-P", _PROGRAM, str(order), str(_MEMORY)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        with suppress(BrokenPipeError), process.stdin:  # a program that fails says why
            for part in (before, *(episode.tobytes() for episode in corpus)):
                process.stdin.write(struct.pack("<q", len(part)) + part)
        sizes = [int(line) for line in process.stdout]
    if process.returncode or len(sizes) != len(corpus):
        raise RuntimeError(f"PPMd of order {order} ended with status {process.returncode}; see the message above.")
    return sum(sizes)


_XZ_DICTIONARY = 64 * 2**20


def _xz_size(data: bytes) -> int:
    """Bytes of `data` after `xz -9`, with a dictionary as small as the input: the same result, ten times faster."""
    dictionary = min(_XZ_DICTIONARY, max(4096, 1 << (len(data) - 1).bit_length())) if data else 4096
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": dictionary}]
    return len(lzma.compress(data, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, filters=filters))


# Name → bytes of some data after the compressor.
COMPRESSORS: dict[str, Callable[[bytes], int]] = {
    "gzip -9": lambda data: len(gzip.compress(data, compresslevel=9, mtime=0)),  # without a file name
    "bz2 -9": lambda data: len(bz2.compress(data, compresslevel=9)),
    "xz -9": _xz_size,
}


def compressed_bits_per_byte(corpus: Corpus, *, progress: bool = True) -> dict[str, float]:
    """Compressor → bits per byte of gzip, bz2 and xz at their highest level, over all episodes."""
    totals = dict.fromkeys(COMPRESSORS, 0)

    def sizes(index: int) -> tuple[int, list[int]]:
        data = corpus[index].tobytes()
        return len(data), [compress(data) for compress in COMPRESSORS.values()]

    num_bytes = 0
    # The compressors release the interpreter lock, so threads run in parallel.
    with (
        ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool,
        tqdm(total=corpus.num_bytes, unit="B", unit_scale=True, desc="compressing", disable=not progress) as bar,
    ):
        for length, row in pool.map(sizes, range(len(corpus))):
            num_bytes += length
            for name, size in zip(totals, row, strict=True):
                totals[name] += size
            bar.update(length)
    return {name: 8 * total / num_bytes for name, total in totals.items()}
