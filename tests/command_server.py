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
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_Process = subprocess.CompletedProcess
# Modules of the commands import the rest, some of it when they run.
_IMPORTS = (
    "hf_recurrent.cli.evaluate", "hf_recurrent.cli.generate", "hf_recurrent.cli.learn", "hf_recurrent.cli.main",
    "hf_recurrent.cli.pretrain", "hf_recurrent.cli.push_to_hub", "hf_recurrent.cli.reproduce",
    "hf_recurrent.cli.score", "hf_recurrent.trainers.public_trainers", "hf_recurrent.online.learner",
    "hf_recurrent.hub.checkpoint", "tensorboard.summary", "torch.utils.tensorboard",
)  # fmt: skip
_BARE_IMPORTS = (
    "torch._dynamo", "torch.distributed.tensor", "transformers.generation", "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)  # fmt: skip
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_MOST_SECONDS = 300


class CommandServer:
    """A process that forks a child for each command; `close` ends it.

    Args:
        bare: an interpreter of its own, which imports torch and transformers, but nothing of the package.
        environment: further variables of a bare one.
    """

    def __init__(self, bare: bool = False, environment: Mapping[str, str] | None = None) -> None:
        self._connection, other = multiprocessing.Pipe()
        if bare:
            variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            command = [sys.executable, __file__, str(other.fileno())]
            options = {"pass_fds": [other.fileno()], "env": variables | _ONE_THREAD | dict(environment or {})}
            self._process = subprocess.Popen(command, **options).pid
        else:
            self._process = os.fork()
        if not self._process:
            try:
                self._connection.close()  # so that the end of the tests is the end of the server
                _serve(other, _IMPORTS)
            finally:
                os._exit(0)
        other.close()

    def close(self) -> None:
        """End the server."""
        self._connection.close()
        os.waitpid(self._process, 0)

    def start(self, action: Callable[..., object], *arguments: object) -> "Child":
        """A new child that calls `action`, a function of a module, with these arguments."""
        return Child(self._ask(action, arguments), self._ask)

    def _ask(self, action: Callable[..., object] | None, arguments: object) -> int:
        self._connection.send((action, arguments))
        return self._connection.recv()

    def run(self, arguments: Sequence[str], folder: str | os.PathLike, data: bytes = b"", **options: Any) -> _Process:
        """The result of `hf-recurrent` with these arguments in a directory; `options` are as for `call`."""
        return self.call(run_command, list(map(str, arguments)), folder=folder, data=data, **options)

    def python(self, words: Sequence[str], folder: str | os.PathLike, **options: Any) -> _Process:
        """The result of Python with these words: `-c CODE` or a file, and arguments. Modules are there already."""
        return self.call(run_python, list(map(str, words)), folder=folder, **options)

    def call(
        self,
        action: Callable[..., object],
        *arguments: object,
        folder: str | os.PathLike,
        data: bytes = b"",
        stdout: str | None = None,
        text: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> _Process:
        """The result of a child that calls a function of a module.

        Args:
            action: the function.
            arguments: of the function.
            folder: the working directory.
            data: standard input.
            stdout: a file that gets the standard output, which is then not part of the result.
            text: the result has text, not bytes.
            environment: further variables.
        """
        with tempfile.TemporaryDirectory() as files:
            streams = [os.path.join(files, name) for name in ("stdin", "stdout", "stderr")]
            Path(streams[0]).write_bytes(data)
            streams[1] = stdout or streams[1]
            child = self.start(
                redirected, os.path.abspath(folder), streams, dict(environment or {}), action, arguments
            )
            status = child.wait()
            out, err = (b"" if name == stdout else Path(name).read_bytes() for name in streams[1:])
        if text:
            out, err = out.decode("utf-8", "replace"), err.decode("utf-8", "replace")
        return _Process([action.__name__, *arguments], status, out, err)


class Child:
    """A running child with the methods of `subprocess.Popen`."""

    def __init__(self, pid: int, ask: Callable[..., int]) -> None:
        self.pid, self._ask, self._status = pid, ask, None

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, at most `_MOST_SECONDS` after the start; the exit status, negative for a signal."""
        if self._status is None:
            self._status = self._ask(None, self.pid)
        return self._status


def run_command(arguments: list[str]) -> None:
    """Run `hf-recurrent` in this child."""
    from hf_recurrent.cli.main import main

    sys.argv = ["hf-recurrent", *arguments]
    main(arguments)


def run_python(words: list[str]) -> None:
    """Run a program in this child."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [os.getcwd() if words[0] == "-c" else os.path.dirname(os.path.abspath(words[0])), *paths]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def redirected(
    folder: str, streams: list[str], environment: dict[str, str], action: Callable[..., object], arguments: tuple
) -> None:
    """Call `action` in a directory, with files, pipes or a terminal as the three standard streams."""
    from huggingface_hub import constants

    os.chdir(folder)
    os.environ.update(environment)
    if "HF_HOME" in environment:
        constants.HF_HOME = environment["HF_HOME"]  # which was read when it was imported
    for number, path in enumerate(streams):
        file = os.open(path, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    _open_streams()
    action(*arguments)


def _open_streams() -> None:
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    loggers = [logging.root, *map(logging.getLogger, logging.root.manager.loggerDict)]
    for handler in (handler for logger in loggers for handler in logger.handlers):
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)


def _serve(connection: Connection, imports: tuple[str, ...]) -> None:
    os.environ.update(_ONE_THREAD)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    while True:
        try:
            action, arguments = connection.recv()
        except EOFError:
            return
        _prepare(imports)
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
def _prepare(imports: tuple[str, ...]) -> None:
    """Make the imports that the tests have not made, before the first child."""
    import torch

    torch.set_num_threads(1)
    for name in imports:
        importlib.import_module(name)
    if imports is _IMPORTS:
        from own_parts_state import without_example

        without_example()


def _status_of(action: Callable[..., object], arguments: tuple) -> int:
    """The exit status of an interpreter that calls `action` at its end."""
    import torch

    signal.alarm(_MOST_SECONDS)
    # The first call after a fork makes torch's pool of threads anew; threads that were first together would find none.
    torch.set_num_threads(1)
    _open_streams()
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


if __name__ == "__main__":
    from command_server import _serve  # functions come by the name of this module

    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # programs find no folder of the tests
    _serve(Connection(int(sys.argv[1])), _BARE_IMPORTS)
