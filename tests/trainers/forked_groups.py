"""Groups of processes over gloo, forked from a process that has imported everything: seconds less than `torchrun`.

The process must not have used threads of torch; tests run such programs in a process of their own.
"""

import contextlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable

import psutil

_FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}

_LEAST_SECONDS = 3  # of CPU time: processes that wait for each other use less


def run_group(
    action: Callable[[int], object], processes: int, sharded: bool, seconds: float = 240, **environment: str
):
    """Call `action` with the rank in every process; returns their exit statuses.

    The status is a `SystemExit`'s, and 1 after any other exception.

    All are killed if they use almost no CPU time for `seconds`: then they wait for each other.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    children = []
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(processes):
        child = os.fork()
        if not child:
            if processes > 1:
                of_rank = common | {"RANK": rank, "LOCAL_RANK": rank}
                os.environ.update({name: str(value) for name, value in of_rank.items()})
            os.environ.update({**(_FSDP if sharded else {}), **environment})
            status = 1
            try:
                action(rank)
                status = 0
            except SystemExit as end:
                status = end.code
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)  # without the clean-up of gloo, which sometimes aborts
        children.append(child)
    statuses, spent, end = {}, 0.0, time.monotonic() + seconds
    while len(statuses) < processes:
        if time.monotonic() > end and (now := _seconds_of(children)) > spent + _LEAST_SECONDS:
            spent, end = now, time.monotonic() + seconds  # they work, on a busy machine
        for child in children:
            if child not in statuses:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    statuses[child] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > end:
                    os.kill(child, 9)
                    statuses[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.02)
    return [statuses[child] for child in children]


def _seconds_of(children: list[int]) -> float:
    """CPU time of processes that have not ended, and of their own children: compilers, for example."""
    total = 0.0
    for child in children:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(child)
            for part in (process, *process.children(recursive=True)):
                times = part.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total
