"""A shell of hf-recurrent for tests in a terminal: each line is a command in a child, so that imports are made once.

After a command it prints the character RS and the exit status.
"""

import importlib
import os
import shlex
import sys
import termios
import traceback

sys.path.insert(0, os.path.dirname(__file__))

MARK = "\x1e"


def _run(words: list[str]) -> int:
    from hf_recurrent.cli.main import main

    try:
        main(words)
    except SystemExit as stop:
        return stop.code or 0
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


def _serve() -> None:
    from command_server import _IMPORTS

    for name in [*_IMPORTS, "hf_recurrent.cli.score"]:
        importlib.import_module(name)
    attributes = termios.tcgetattr(0)
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(0, termios.TCSANOW, attributes)
    print(f"{MARK}0", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = _run(shlex.split(line))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print(f"{MARK}{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", flush=True)


if __name__ == "__main__":
    _serve()
