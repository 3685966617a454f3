"""Commands of the package in children of one process: its imports, six seconds of work, are made once.

A child has the command's arguments, its directory, its output and its exit status; the start of an interpreter is
tested in test_packaging.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

_TESTS = Path(__file__).parent
# Modules of the commands import the rest, some of it when they run.
_IMPORTS = (
    "hf_recurrent.cli.evaluate", "hf_recurrent.cli.generate", "hf_recurrent.cli.learn", "hf_recurrent.cli.main",
    "hf_recurrent.cli.pretrain", "hf_recurrent.cli.push_to_hub", "hf_recurrent.cli.reproduce",
    "hf_recurrent.trainers.multi_stream_trainer",
    "hf_recurrent.trainers.online_trainer", "hf_recurrent.trainers.smt_trainer", "hf_recurrent.online.learner",
    "hf_recurrent.hub.checkpoint", "tensorboard.summary", "torch.utils.tensorboard",
)  # fmt: skip


class CommandServer:
    """A process that runs commands, one after another, each in a child; a context manager."""

    def __enter__(self) -> "CommandServer":
        # Without threads of its own: they would not exist in its children.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_) -> None:
        self._process.communicate()

    def run(self, arguments: list[str], folder: Path) -> subprocess.CompletedProcess:
        """The result of `hf-recurrent` with these arguments in a directory."""
        print(json.dumps([arguments, str(folder)]), file=self._process.stdin, flush=True)
        status, out, err = json.loads(self._process.stdout.readline())
        return subprocess.CompletedProcess(["hf-recurrent", *arguments], status, out, err)


def _serve() -> None:
    import importlib

    sys.path[:0] = [str(_TESTS / "faults"), str(_TESTS.parent)]
    from forked import run_forked

    for name in _IMPORTS:
        importlib.import_module(name)
    from hf_recurrent.cli.main import main

    for line in sys.stdin:
        arguments, folder = json.loads(line)

        def command(arguments=arguments, folder=folder) -> None:
            os.chdir(folder)
            sys.argv = ["hf-recurrent", *arguments]
            main(arguments)

        outcome = run_forked(command, seconds=300)
        print(json.dumps([outcome.status, outcome.out, outcome.err]), flush=True)


if __name__ == "__main__":
    _serve()
