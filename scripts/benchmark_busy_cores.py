#!/usr/bin/env python
"""Bytes per second of `hf-recurrent pretrain` beside a process that occupies all cores, next to idle cores.

The default run is compared with one that waits as OpenMP does without our settings and has a thread for every core.
Each run is a process of its own; they take turns, and the best round of each counts. `others` is the number of cores
that further programs used during that round: idle cores have about 0.

    python scripts/benchmark_busy_cores.py
    python scripts/benchmark_busy_cores.py --arguments --model hawk-tiny
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from benchmarking import markdown_table

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
# Ends with this program, however that ends.
OCCUPY = """
import os, torch
torch.set_num_threads({cores})
numbers, parent = torch.randn(1000, 1000), os.getppid()
while os.getppid() == parent:
    numbers @ numbers
"""
SHORT = ["--use_cpu", "--max_corpus_bytes=3e5", "--sample_every=0", "--report_to=none", "--disable_tqdm=true"]
# As without our settings: threads wait in a loop.
PLAIN = {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": str(CORES)}


@dataclass
class Round:
    """Speed of a run, the threads that it chose, and the cores that other programs used."""

    rate: float
    threads: str
    others: float


@contextmanager
def occupied(busy: bool) -> Iterator[list[psutil.Process]]:
    """A process that occupies all cores, if `busy`."""
    if not busy:
        yield []
        return
    with subprocess.Popen([sys.executable, "-c", OCCUPY.format(cores=CORES)]) as process:
        found = psutil.Process(process.pid)
        while found.cpu_percent(0.5) < 90 * CORES:  # torch is imported
            pass
        try:
            yield [found]
        finally:
            process.kill()


def run(options: argparse.Namespace, environment: dict[str, str], busy: bool) -> Round:
    """Train once."""
    with tempfile.TemporaryDirectory() as folder, occupied(busy) as occupiers:
        command = [sys.executable, "-m", "hf_recurrent.cli.main", "pretrain", *SHORT, f"--output_dir={folder}/run"]
        command += [f"--max_steps={options.steps}", "--logging_steps=10", *options.arguments]
        variables = os.environ | environment
        with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
            lines: list[str] = []
            reader = threading.Thread(target=lambda: lines.extend(line.decode() for line in process.stderr))
            reader.start()
            known = [psutil.Process(process.pid), *occupiers]
            before, work = psutil.cpu_times(), 0.0
            while process.poll() is None:
                work = sum(sum(each.cpu_times()[:2]) for each in known if each.is_running())
                threading.Event().wait(0.2)
            after = psutil.cpu_times()
            reader.join()
        if process.returncode:
            raise SystemExit("".join(lines))
        used = sum(after) - sum(before) - (after.idle - before.idle) - (after.iowait - before.iowait)
        share = CORES / (sum(after) - sum(before))
        state = json.loads(Path(folder, "run", "trainer_state.json").read_text())
    rates = [entry["bytes_per_second"] for entry in state["log_history"] if "bytes_per_second" in entry]
    threads = next((line.split(":")[0] for line in lines if "thread" in line), "?")
    return Round(sorted(rates)[len(rates) // 2], threads, max(used - work, 0.0) * share)


def main() -> None:
    """Print the table and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--arguments", nargs=argparse.REMAINDER, default=[], help="further arguments of pretrain")
    options = parser.parse_args()
    settings = {"default": {}, "without our settings": PLAIN}
    best: dict[tuple[str, bool], Round] = {}
    for number in range(options.rounds):
        for name, environment in settings.items():
            for busy in (False, True):
                found = run(options, environment, busy)
                words = f"round {number + 1}, {name}, {'busy' if busy else 'idle'} cores: {found.rate:,.0f} B/s"
                print(f"{words}, {found.threads}, {found.others:.1f} cores used by others", file=sys.stderr)
                if (name, busy) not in best or found.rate > best[name, busy].rate:
                    best[name, busy] = found
    lines = []
    for name in settings:
        idle, busy = best[name, False], best[name, True]
        cells = [f"{idle.rate:,.0f}", idle.threads, f"{idle.others:.1f}", f"{busy.rate:,.0f}", busy.threads]
        lines.append([name, *cells, f"{busy.others:.1f}", f"{busy.rate / idle.rate:.0%}"])
    columns = ["run", "idle B/s", "chose", "others", "busy B/s", "chose", "others", "busy / idle"]
    print(f"{CORES} cores, best of {options.rounds} rounds\n\n{markdown_table(columns, lines)}")


if __name__ == "__main__":
    main()
