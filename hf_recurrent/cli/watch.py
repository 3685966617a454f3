"""`hf-recurrent watch LOG ...`: show the unusual lines of logs as they grow."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent.cli.parsing import run_command
from hf_recurrent.cli.watch_arguments import LEARNING_RATE, build_parser, check_arguments

if TYPE_CHECKING:
    from hf_recurrent.cli.watch_run import WatchRun
    from hf_recurrent.online.learner import OnlineLearner
    from hf_recurrent.watch.saved_watch import SavedLog

__all__ = ["build_parser", "main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with `argv`, by default the arguments of the process."""
    parser = build_parser()
    with ExitStack() as lock:
        run = run_command(parser, argv, lambda arguments: _prepare(arguments, lock))
        try:
            failure = run.watch()
        except BrokenPipeError:  # the reader of the output has ended, as `head` does
            raise SystemExit(1) from None
    if failure:
        parser.exit(1, f"{parser.prog}: error: {failure}\n")


def _prepare(arguments: argparse.Namespace, lock: ExitStack) -> "WatchRun":
    """Check all arguments, lock the directory, and open logs and learners."""
    check_arguments(arguments)
    names = ["stdin" if log == "-" else Path(log).name for log in arguments.logs]
    if arguments.output_dir is None:
        arguments.output_dir = Path("runs", f"watch-{'+'.join(names)}"[:100])

    import torch
    from transformers.utils import logging

    from hf_recurrent.checkpoints.files import checkpoint_number, list_checkpoints, remove_staging
    from hf_recurrent.checkpoints.output_lock import output_lock
    from hf_recurrent.cli.watch_run import WatchedLog, WatchRun, load_logs
    from hf_recurrent.watch.log_sources import LogFile, StandardInput
    from hf_recurrent.watch.log_watcher import LogWatcher, WatchSettings
    from hf_recurrent.watch.saved_watch import folder_names, is_watch

    torch.set_num_threads(arguments.threads)
    logging.disable_progress_bar()  # of saving
    settings = WatchSettings(arguments.false_alarms, arguments.learn_flagged, arguments.window)
    directory = arguments.output_dir
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"`--output_dir` is {str(directory)!r}; it must be a directory.")
    lock.enter_context(output_lock(directory))
    remove_staging(directory)
    checkpoints = list_checkpoints(directory)
    if foreign := [path for path in checkpoints if not is_watch(path)]:
        raise ValueError(f"`--output_dir` is {str(directory)!r}, where {foreign[0]} is of another command.")
    if arguments.restart:
        for path in checkpoints:
            shutil.rmtree(path)
        checkpoints = []
    saved, output, number = {}, None, 0
    if checkpoints:
        saved, output = load_logs(checkpoints[-1])
        number = checkpoint_number(checkpoints[-1])
    logs = []
    for log, folder in zip(arguments.logs, folder_names(names), strict=True):
        name = "standard input" if log == "-" else log
        before = saved.get(name)
        watcher = LogWatcher(_build_learner(arguments, before), settings)
        if before is not None:
            watcher.load(before.watcher)
        if log == "-":
            source: Any = StandardInput(arguments.max_line_bytes)
        else:
            source = LogFile(
                log,
                arguments.max_line_bytes,
                follow=not arguments.no_follow,
                history=None if arguments.no_follow else arguments.history,
                position=None if before is None else before.position,
            )
        watched = WatchedLog(source, watcher, folder, before is None)
        if before is not None:
            watched.counts.update(before.counts)
        logs.append(watched)
        if not arguments.quiet:
            start = "continuing" if before is not None else "new"
            print(f"watching {name}: {start}, {source.beginning()}", file=sys.stderr)
    return WatchRun(arguments, logs, output, number)


def _build_learner(arguments: argparse.Namespace, saved: "SavedLog | None") -> "OnlineLearner":
    from hf_recurrent.online.learner import OnlineLearner

    if saved is not None:
        changes = {} if arguments.learning_rate is None else {"learning_rate": arguments.learning_rate}
        return OnlineLearner.load(saved.directory, **changes)
    settings = {
        "rule": "rtrl",
        "stride": arguments.stride,
        "learning_rate": LEARNING_RATE if arguments.learning_rate is None else arguments.learning_rate,
        "binary": True,
    }
    return OnlineLearner(*_load_model(arguments), **settings)


def _load_model(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """A preset with new weights, or a checkpoint; with a tokenizer whose ids are bytes."""
    from hf_recurrent.cli.loading import check_byte_tokenizer, load_or_build

    options = {"takes_presets": True, "trust_remote_code": False, "dtype": "float32"}
    model, tokenizer = load_or_build(argparse.Namespace(**vars(arguments) | options), "--model")
    check_byte_tokenizer("--model", arguments.model, tokenizer)
    if model.config.vocab_size < 256 or tokenizer.encode_bytes(bytes(range(256))).tolist() != [*range(256)]:
        raise ValueError(f"`--model` is {arguments.model!r}, whose tokens are not bytes.")
    return model, tokenizer
