"""`--threads`: the number of CPU threads, by default as many as there are free cores.

Threads of OpenMP that wait for each other in a loop fill the cores that other programs need, and wait longest on busy
cores. So they wait for a moment only, and a command that starts on busy cores takes fewer of them.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_recurrent.data.quantities import count_of

HELP = "CPU threads (default: as many as there are free cores)"
# Rounds of the loop in which libgomp waits: a few microseconds, then the thread sleeps.
_SPIN_COUNT = "1000"
_SPIN_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_OMP_THREADS = "OMP_NUM_THREADS"
_LEAST_SECONDS = 0.25
# Kinds of work in the times of a core, as far as the platform has them; time of guests is part of the time of users.
_BUSY = ("user", "system", "nice", "irq", "softirq", "steal", "interrupt", "dpc")
_QUOTA = "/sys/fs/cgroup/cpu.max"


@dataclass
class Usage:
    """Seconds of work at a time: of the cores that this process may use, and of this process itself."""

    time: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> "Usage":
        import psutil

        cores = psutil.cpu_times(percpu=True)
        own = [cores[core] for core in _affinity() if core < len(cores)] or cores
        busy = sum(getattr(core, name, 0.0) for core in own for name in _BUSY)
        return cls(time.monotonic(), busy, time.process_time())


_begin: Usage | None = None


def observe() -> None:
    """Begin to observe the cores, and let threads wait passively; call it before torch is imported."""
    global _begin
    if not any(name in os.environ for name in _SPIN_SETTINGS):
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT
    _begin = Usage.now()


def add_threads_argument(parser: Any, help: str = HELP) -> None:
    parser.add_argument("--threads", type=int, metavar="N", help=help)


def use_threads(given: int | None, *, quiet: bool = False, checkpoint: str | os.PathLike | None = None) -> None:
    """Set torch's number of threads, and say on standard error how many and why unless they were given.

    Without a number and without [`observe`], as in a call from Python, the number stays as it is. A run that resumes a
    checkpoint takes its number, on which the last bits depend.
    """
    import torch

    if given is not None:
        torch.set_num_threads(given)
    elif _begin is not None and not torch.cuda.is_available():
        count, reason = _choose(torch.get_num_threads(), recorded_threads(checkpoint))
        torch.set_num_threads(count)
        if not quiet and int(os.environ.get("RANK", "0")) == 0:
            print(f"{count_of(count, 'thread')}: {reason}", file=sys.stderr)


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    """Use this number of CPU threads inside `with`; one is enough for small steps, with the same bits everywhere."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def recorded_threads(checkpoint: str | os.PathLike | None) -> int | None:
    """The number of threads of the run that wrote a checkpoint; None if it is not known."""
    from hf_recurrent.checkpoints.manifest import read_manifest

    try:
        count = read_manifest(checkpoint).get("num_threads") if checkpoint is not None else None
    except (OSError, ValueError):  # resuming says more about it
        return None
    return count if isinstance(count, int) and count > 0 else None


def _choose(default: int, recorded: int | None) -> tuple[int, str]:
    """Number of threads, and the reason for it; `default` is torch's own choice."""
    if _OMP_THREADS in os.environ:
        return default, f"{_OMP_THREADS} is {os.environ[_OMP_THREADS]}"
    cores = len(_affinity())
    if recorded is not None and recorded <= cores:
        return recorded, "as in the checkpoint"
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if processes > 1:  # they start together, and each sees the work of the others
        return max(min(default, cores // processes), 1), f"{processes} processes on {count_of(cores, 'core')}"
    busy = busy_cores(_begin)
    quota = cpu_quota()
    free = cores - busy
    reason = f"{busy:.1f} of {count_of(cores, 'core')} {'is' if cores == 1 else 'are'} busy"
    if quota is not None and quota < free:
        free, reason = quota, f"the container may use {quota:.1f} of {count_of(cores, 'core')}"
    return max(min(default, round(free)), 1), reason


def busy_cores(begin: Usage) -> float:
    """Number of this process's cores that others have used since `begin`, at least a quarter of a second ago."""
    time.sleep(max(begin.time + _LEAST_SECONDS - time.monotonic(), 0.0))
    now = Usage.now()
    others = (now.busy - begin.busy) - (now.own - begin.own)
    return min(max(others / (now.time - begin.time), 0.0), float(len(_affinity())))


def cpu_quota() -> float | None:
    """The number of cores that the control group of this process may use; None without a limit."""
    try:
        limit, period = Path(_QUOTA).read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except OSError:  # no control groups
        return None


def _affinity() -> list[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
