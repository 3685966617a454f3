"""Commands of the package in children of the test process: its imports, six seconds of work, are made once.

The server is forked after collection, before the first test, and forks a child for each command. A child has the
command's arguments, its directory, its streams and its exit status, and a single thread: others do not exist after a
fork. The start of an interpreter is tested in test_packaging.py.
"""

import functools
import importlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

# Modules of the commands import the rest, some of it when they run.
_IMPORTS = (
    "hf_recurrent.cli.evaluate", "hf_recurrent.cli.generate", "hf_recurrent.cli.learn", "hf_recurrent.cli.main",
    "hf_recurrent.cli.pretrain", "hf_recurrent.cli.push_to_hub", "hf_recurrent.cli.reproduce",
    "hf_recurrent.trainers.multi_stream_trainer",
    "hf_recurrent.trainers.online_trainer", "hf_recurrent.trainers.smt_trainer", "hf_recurrent.online.learner",
    "hf_recurrent.hub.checkpoint", "tensorboard.summary", "torch.utils.tensorboard",
)  # fmt: skip
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_MOST_SECONDS = 300


class CommandServer:
    """A process that forks a child for each command; `close` ends it."""

    def __init__(self) -> None:
        self._connection, other = multiprocessing.Pipe()
        self._process = os.fork()
        if not self._process:
            try:
                self._connection.close()  # so that the end of the tests is the end of the server
                _serve(other)
            finally:
                os._exit(0)
        other.close()

    def close(self) -> None:
        """End the server."""
        self._connection.close()
        os.waitpid(self._process, 0)

    def start(self, action: Callable[..., object], *arguments: object) -> int:
        """The process id of a new child that calls `action`, a function of a module, with these arguments."""
        self._connection.send((action, arguments))
        return self._connection.recv()

    def wait(self, child: int) -> int:
        """Wait for the end of a child; its exit status, negative for a signal."""
        self._connection.send((None, child))
        return self._connection.recv()

    def run(
        self,
        arguments: list[str],
        folder: str | os.PathLike,
        data: bytes = b"",
        *,
        stdout: str | None = None,
        text: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess:
        """The result of `hf-recurrent` with these arguments in a directory.

        Args:
            data: standard input.
            stdout: a file that gets the standard output, which is then not part of the result.
            text: the result has text, not bytes.
            environment: further variables.
        """
        with tempfile.TemporaryDirectory() as streams:
            names = [os.path.join(streams, name) for name in ("stdin", "stdout", "stderr")]
            Path(names[0]).write_bytes(data)
            names[1] = stdout or names[1]
            child = self.start(run_command, list(map(str, arguments)), os.fspath(folder), names, environment or {})
            status = self.wait(child)
            out, err = (b"" if name == stdout else Path(name).read_bytes() for name in names[1:])
        if text:
            out, err = out.decode("utf-8", "replace"), err.decode("utf-8", "replace")
        return subprocess.CompletedProcess(["hf-recurrent", *arguments], status, out, err)


def run_command(arguments: list[str], folder: str, streams: list[str], environment: dict[str, str]) -> None:
    """Run `hf-recurrent` in this child; `streams` are the paths of its three standard streams, such as a terminal."""
    from hf_recurrent.cli.main import main

    os.chdir(folder)
    os.environ.update(environment)
    for number, path in enumerate(streams):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.argv = ["hf-recurrent", *arguments]
    main(arguments)


def _serve(connection: Connection) -> None:
    os.environ.update(_ONE_THREAD)
    while True:
        try:
            action, arguments = connection.recv()
        except EOFError:
            return
        _prepare()
        if action is None:
            connection.send(os.waitstatus_to_exitcode(os.waitpid(arguments, 0)[1]))
            continue
        child = os.fork()
        if not child:
            status = 70
            try:
                status = _status_of(action, arguments)
            finally:
                os._exit(status)
        connection.send(child)


@functools.cache
def _prepare() -> None:
    """Make the imports that the tests have not made, before the first child."""
    import torch

    torch.set_num_threads(1)
    for name in _IMPORTS:
        importlib.import_module(name)


def _status_of(action: Callable[..., object], arguments: tuple) -> int:
    """The exit status of an interpreter that calls `action` at its end."""
    signal.alarm(_MOST_SECONDS)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    loggers = [logging.root, *map(logging.getLogger, logging.root.manager.loggerDict)]
    for handler in (handler for logger in loggers for handler in logger.handlers):
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
    status = 0
    try:
        action(*arguments)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status
