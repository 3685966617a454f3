"""PPMd (variant H) as a baseline: a compressor that counts, and can read training data before the files."""

import importlib.util
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
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


def ppmd_bits_per_byte(
    corpus: Corpus, before: bytes = b"", *, orders: Sequence[int] = ORDERS, progress: bool = True
) -> dict[int, float]:
    """Bits per byte of PPMd over all episodes, each compressed after the same bytes.

    The size of an episode is size(before + episode) - size(before); without bytes before, its size alone.

    Args:
        corpus: the episodes, compressed as the bytes of their token ids.
        before: bytes that the compressor reads before each episode.
        orders: maximum lengths of contexts.
        progress: show a progress bar.

    Returns:
        Order → 8 · added bytes / bytes.

    Raises:
        ImportError: pyppmd is not installed.
        RuntimeError: the compressor failed.
    """
    if not has_ppmd():
        raise ImportError('PPMd needs pyppmd: pip install "hf-recurrent[baselines]".')
    bar = tqdm(
        total=corpus.num_bytes * len(orders), unit="B", unit_scale=True, desc="PPMd", disable=not progress, leave=False
    )
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool, bar:
        longest_first = sorted(orders, reverse=True)
        sizes = {order: pool.submit(_size, order, corpus, before, bar) for order in longest_first}
        return {order: 8 * sizes[order].result() / corpus.num_bytes for order in orders}


def _size(order: int, corpus: Corpus, before: bytes, bar: tqdm) -> int:
    """Bytes that all episodes add, each alone."""
    command = [sys.executable, "-P", _PROGRAM, str(order), str(_MEMORY)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        with suppress(BrokenPipeError), process.stdin:  # a program that fails says why
            for part in (before, *(episode.tobytes() for episode in corpus)):
                process.stdin.write(struct.pack("<q", len(part)) + part)
        total = found = 0
        for line, episode in zip(process.stdout, corpus, strict=False):
            total, found = total + int(line), found + 1
            bar.update(len(episode))
    if process.returncode or found != len(corpus):
        raise RuntimeError(f"PPMd of order {order} ended with status {process.returncode}; see the message above.")
    return total
