"""Groups of processes over gloo, forked from a process that has imported everything: seconds less than `torchrun`.

The process must not have used threads of torch; tests run such programs in a process of their own.
"""

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable

_FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def run_group(
    action: Callable[[int], object], processes: int, sharded: bool, seconds: float = 240, **environment: str
):
    """Call `action` with the rank in every process; returns their exit statuses.

    The status is that of a `SystemExit`, and 1 after any other exception.

    All are killed if they have not ended after `seconds`: then they wait for each other.
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
    statuses, end = {}, time.monotonic() + seconds
    while len(statuses) < processes:
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
