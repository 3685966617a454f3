#!/usr/bin/env python
"""Speed and memory of packing a corpus, for each format of files, compared with a copy of the same bytes.

    python scripts/benchmark_packing.py                                    # 500 MB of text in each format
    python scripts/benchmark_packing.py --megabytes 10000 --formats parquet --folder /large/disk

Documents of random words are written to --folder first; files and cache are removed afterwards. A run needs room for
the file and for the packed corpus. CPU time is that of the one process that packs; memory is what no file backs, above
what the program has without data.
"""

import argparse
import gzip
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from benchmarking import markdown_table

from hf_recurrent import ByteTokenizer, load_corpus

FORMATS = ("txt", "txt.gz", "txt.zst", "jsonl", "jsonl.gz", "jsonl.zst", "parquet")
COLUMNS = ["format", "MB", "documents", "file MB", "MB/s", "MB/s of CPU time", "copy MB/s", "memory MiB"]


def documents() -> list[bytes]:
    """20,000 documents of three kilobytes on average, some of them much longer, with a few letters beyond ASCII."""
    generator = np.random.default_rng(0)
    letters = [generator.integers(97, 123, generator.integers(2, 11), dtype=np.uint8) for _ in range(5000)]
    words = [*(word.tobytes() for word in letters), "café".encode(), "naïve".encode(), b'said "so"\n']
    shares = 1 / np.arange(1, len(words) + 1)
    lengths = generator.lognormal(5.6, 1, 20_000).astype(int) + 1
    return [b" ".join(words[one] for one in generator.choice(len(words), n, p=shares / shares.sum())) for n in lengths]


def write(path: Path, some: list[bytes], repetitions: int) -> None:
    """Write the documents several times, in the format of the file's name."""
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table({"text": [document.decode() for document in some], "number": range(len(some))})
        with parquet.ParquetWriter(path, table.schema) as file:
            for _ in range(repetitions):
                file.write_table(table)
        return
    if ".jsonl" in path.name:
        lines = (json.dumps({"text": one.decode(), "url": "none"}, ensure_ascii=False).encode() for one in some)
        content = b"\n".join(lines) + b"\n"
    else:
        content = b"\n".join(some) + b"\n"
    with opener(path)() as file:
        for _ in range(repetitions):
            file.write(content)


def opener(path: Path) -> Callable:
    """Opens a file for writing, compressed as its name says."""
    if path.suffix == ".zst":
        import zstandard

        return lambda: zstandard.open(path, "wb")
    return lambda: gzip.open(path, "wb", 1) if path.suffix == ".gz" else open(path, "wb")


def anonymous_memory() -> int:
    """Bytes of resident memory that no file backs."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def copy_rate(path: Path) -> float:
    """Bytes per second of copying the packed file in pieces of a megabyte, to the disk."""
    begin, size = time.perf_counter(), path.stat().st_size
    with open(path, "rb") as source, tempfile.TemporaryFile(dir=path.parent) as target:
        while piece := source.read(1 << 20):
            target.write(piece)
    return size / (time.perf_counter() - begin)


def measure(kind: str, some: list[bytes], megabytes: float, folder: Path) -> list[str]:
    """One line of the table."""
    path = folder / f"text.{kind}"
    write(folder / f"warm-up.{kind}", some[:100], 1)  # imports that are made on first use
    load_corpus(folder / f"warm-up.{kind}", tokenizer=ByteTokenizer(), cache_dir=folder / "warm-up")
    write(path, some, max(round(megabytes * 1e6 / sum(map(len, some))), 1))
    peak, done, before = [0], threading.Event(), anonymous_memory()

    def watch() -> None:
        while not done.wait(0.2):
            peak[0] = max(peak[0], anonymous_memory() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin, cpu = time.perf_counter(), time.thread_time()
    corpus = load_corpus(path, tokenizer=ByteTokenizer(), cache_dir=folder / "cache")
    seconds, cpu_seconds = time.perf_counter() - begin, time.thread_time() - cpu
    done.set()
    watcher.join()
    rates = (corpus.num_bytes / seconds, corpus.num_bytes / cpu_seconds)
    (packed,) = (folder / "cache").glob("*/tokens.bin")
    numbers = (corpus.num_bytes / 1e6, len(corpus), path.stat().st_size / 1e6)
    rates = (rate / 1e6 for rate in (*rates, copy_rate(packed)))
    return [kind, *(f"{number:,.0f}" for number in (*numbers, *rates, peak[0] / 2**20))]


def lines(options: argparse.Namespace) -> Iterator[list[str]]:
    """The lines of the table; each format has a folder of its own, removed after it."""
    some = documents()
    for kind in options.formats:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            yield measure(kind, some, options.megabytes, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=500, help="size of the text (default 500)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--folder", type=Path, help="where to write (default: the folder for temporary files)")
    print(markdown_table(COLUMNS, list(lines(parser.parse_args()))))


if __name__ == "__main__":
    main()
