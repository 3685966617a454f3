"""`hf-recurrent learn MODEL --source ...`: read an endless stream of bytes and learn from it."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent.cli.learn_arguments import build_parser, update_steps
from hf_recurrent.cli.loading import load_or_build, move_to_device
from hf_recurrent.cli.parsing import run_command
from hf_recurrent.cli.threads import thread_count

if TYPE_CHECKING:
    from hf_recurrent.cli.learn_run import LearnRun
    from hf_recurrent.online.learner import OnlineLearner


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with `argv`, by default the arguments of the process.

    If the source fails or the loss becomes NaN or infinite, everything is saved and the exit status is 1.
    """
    parser = build_parser()
    with ExitStack() as lock:
        run = run_command(parser, argv, lambda arguments: _prepare(arguments, lock))
        with thread_count(run.arguments.threads):
            failure = run.learn()
    if failure:
        parser.exit(1, f"{parser.prog}: error: {failure}\n")


def _prepare(arguments: argparse.Namespace, lock: ExitStack) -> "LearnRun":
    """Check all arguments, lock the directory, and open learner and source; only then is anything changed."""
    source_name = "standard input" if arguments.source == "-" else arguments.source
    if arguments.output_dir is None:
        name = "stdin" if arguments.source == "-" else arguments.source.removeprefix("tcp://").replace(":", "-")
        arguments.output_dir = Path("runs", f"{Path(arguments.model).name}-{Path(name).name}")
    update_steps(arguments)
    directory = arguments.output_dir
    if arguments.plot:
        from hf_recurrent.plotting import require_pyplot

        require_pyplot()

    from transformers.utils import logging

    from hf_recurrent.checkpoints.files import remove_staging
    from hf_recurrent.checkpoints.output_lock import output_lock
    from hf_recurrent.cli.learn_directory import RECORDS_FILE, check_checkpoint, find_checkpoint, remove_run
    from hf_recurrent.cli.learn_run import LearnRun
    from hf_recurrent.cli.learn_source import continue_source
    from hf_recurrent.data.loading import load_corpus
    from hf_recurrent.online.prequential import check_records

    logging.disable_progress_bar()  # of saving, because it breaks the line of progress
    find_checkpoint(directory, arguments.resume, arguments.restart)
    is_new = not directory.exists()
    if not is_new:
        lock.enter_context(output_lock(directory))
    checkpoint = find_checkpoint(directory, arguments.resume, arguments.restart)
    if checkpoint is not None:
        check_checkpoint(directory, checkpoint)
    learner = _build_learner(arguments, checkpoint)
    records = directory / RECORDS_FILE
    if records.is_symlink():
        raise ValueError(f"`--output_dir` is {str(directory)!r}, but {records} is a link; remove it.")
    if checkpoint is not None and records.exists():
        check_records(records, learner.bytes_read)
    source, start = continue_source(learner, arguments)
    held_out = None
    if arguments.held_out:
        held_out = load_corpus(arguments.held_out, tokenizer=learner.tokenizer, binary=arguments.binary)
    if is_new:
        lock.enter_context(output_lock(directory))
        if find_checkpoint(directory, arguments.resume, arguments.restart) is not None:
            raise ValueError(f"`--output_dir` is {str(directory)!r}, where another run has begun; use --resume again.")
    remove_staging(directory)
    if arguments.restart:
        remove_run(directory)
    if not arguments.quiet:
        how = "reading" if arguments.no_learn else f"learning by {learner.settings.rule} from"
        place = f" from byte {start:,} on" if start else ""
        if arguments.resume and checkpoint is None:
            print(f"{directory} has no checkpoint to resume; a new run begins", file=sys.stderr)
        if arguments.threads == 1:
            print("1 thread: more do not help a single stream", file=sys.stderr)
        print(f"{how} {source_name}{place}, saving to {directory}", file=sys.stderr)
    return LearnRun(arguments, learner, source, held_out, resumed=checkpoint is not None)


def _build_learner(arguments: argparse.Namespace, checkpoint: str | None) -> "OnlineLearner":
    from hf_recurrent.online.learner import OnlineLearner

    stride, update_every = update_steps(arguments)
    settings = {
        "rule": arguments.method,
        "stride": stride,
        "update_every": update_every,
        "optimizer": arguments.optim,
        "window": arguments.window,
        "binary": arguments.binary,
        "learn": not arguments.no_learn,
    }
    if arguments.learning_rate is not None:
        settings["learning_rate"] = arguments.learning_rate
    if checkpoint is not None:
        return _load_learner(arguments, checkpoint, settings)
    return OnlineLearner(*load_or_build(arguments), **settings)


def _load_learner(arguments: argparse.Namespace, checkpoint: str, settings: dict[str, Any]) -> "OnlineLearner":
    from hf_recurrent.checkpoints.files import checkpoint_number
    from hf_recurrent.cli.learn_source import check_metadata
    from hf_recurrent.online.learner import OnlineLearner
    from hf_recurrent.online.saved_learner import load_saved_model

    model, tokenizer = load_saved_model(checkpoint, trust_remote_code=arguments.trust_remote_code)
    move_to_device(model, arguments)
    learner = OnlineLearner.load(checkpoint, model, tokenizer, **settings)
    try:
        check_metadata(learner.metadata, learner.bytes_read)
        if learner.bytes_read != checkpoint_number(checkpoint):
            raise ValueError(f"it is the learner at byte {learner.bytes_read}.")
    except ValueError as error:
        raise ValueError(f"The checkpoint {checkpoint!r} is damaged: {error}") from error
    return learner
