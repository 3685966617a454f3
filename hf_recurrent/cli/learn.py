"""`hf-recurrent learn MODEL --source ...`: read an endless stream of bytes and learn from it."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hf_recurrent.cli.learn_arguments import build_parser
from hf_recurrent.cli.loading import choose_device, load_model_and_tokenizer
from hf_recurrent.cli.parsing import check_at_least, run_command

if TYPE_CHECKING:
    from hf_recurrent.cli.learn_run import LearnRun
    from hf_recurrent.online.learner import OnlineLearner


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with `argv`, by default the arguments of the process.

    If the source fails or the loss becomes NaN or infinite, everything is saved and the exit status is 1.
    """
    parser = build_parser()
    run = run_command(parser, argv, _prepare)
    with _threads(run.arguments.threads):
        failure = run.learn()
    if failure:
        parser.exit(1, f"{parser.prog}: error: {failure}\n")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Limit the CPU threads: on busy cores, waiting for each other takes most of a small step."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _prepare(arguments: argparse.Namespace) -> "LearnRun":
    """Check all arguments, and open learner and source."""
    source_name = "standard input" if arguments.source == "-" else arguments.source
    if arguments.output_dir is None:
        name = "stdin" if arguments.source == "-" else arguments.source.removeprefix("tcp://").replace(":", "-")
        arguments.output_dir = Path("runs", f"{Path(arguments.model).name}-{Path(name).name}")
    check_at_least(1, arguments, "threads")
    directory = arguments.output_dir
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"`--output_dir` is {str(directory)!r}; it must be a directory.")
    if arguments.plot:
        from hf_recurrent.plotting import require_pyplot

        require_pyplot()

    from transformers.utils import logging

    from hf_recurrent.checkpoint_files import find_last_checkpoint, remove_staging
    from hf_recurrent.cli.learn_run import RECORDS_FILE, LearnRun
    from hf_recurrent.data.loading import load_corpus
    from hf_recurrent.online.learner import is_saved_learner
    from hf_recurrent.online.sources import open_source

    logging.disable_progress_bar()  # of saving, because it breaks the line of progress
    checkpoint = find_last_checkpoint(directory, is_saved_learner)
    if directory.is_dir() and any(directory.iterdir()):
        if not arguments.resume:
            raise ValueError(
                f"`--output_dir` is {str(directory)!r}; it must be empty. To continue the run in it, add --resume."
            )
        if checkpoint is None and not (directory / RECORDS_FILE).is_file():
            raise ValueError(
                f"`--output_dir` is {str(directory)!r}; with --resume, it must have a run of this command."
            )
    learner = _build_learner(arguments, checkpoint)
    start = _position_in_source(learner, arguments)
    source = open_source(arguments.source, follow=arguments.follow, start=start, timeout=arguments.timeout)
    held_out = None
    if arguments.held_out:
        held_out = load_corpus(arguments.held_out, tokenizer=learner.tokenizer, binary=arguments.binary)
    directory.mkdir(parents=True, exist_ok=True)
    remove_staging(directory)
    if not arguments.quiet:
        how = "reading" if arguments.no_learn else f"learning by {learner.settings.rule} from"
        place = f" from byte {start:,} on" if start else ""
        print(f"{how} {source_name}{place}, saving to {directory}", file=sys.stderr)
    return LearnRun(arguments, learner, source, held_out, resumed=checkpoint is not None)


def _build_learner(arguments: argparse.Namespace, checkpoint: str | None) -> "OnlineLearner":
    from hf_recurrent.online.learner import OnlineLearner
    from hf_recurrent.presets import config_from_preset, preset_names

    names = ("rule", "stride", "update_every", "optimizer", "window", "binary")
    settings = {name: getattr(arguments, name) for name in names} | {"learn": not arguments.no_learn}
    if arguments.learning_rate is not None:
        settings["learning_rate"] = arguments.learning_rate
    if checkpoint is not None:
        saved = argparse.Namespace(**vars(arguments) | {"model": checkpoint, "dtype": "auto"})
        return OnlineLearner.load(checkpoint, *load_model_and_tokenizer(saved), **settings)
    if arguments.model not in preset_names():
        return OnlineLearner(*load_model_and_tokenizer(arguments), **settings)
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    from hf_recurrent.modeling.tokenization_byte import ByteTokenizer

    set_seed(arguments.seed)
    model = AutoModelForCausalLM.from_config(config_from_preset(arguments.model))
    dtype = torch.float32 if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    return OnlineLearner(model.to(choose_device(arguments), dtype), ByteTokenizer(), **settings)


def _position_in_source(learner: "OnlineLearner", arguments: argparse.Namespace) -> int:
    """Bytes of the source that the resumed run has read; 0 for sources that cannot be read again."""
    is_file = Path(arguments.source).is_file()
    name = os.path.abspath(arguments.source) if is_file else arguments.source
    if learner.metadata.get("source") != name or not is_file:
        learner.metadata |= {"source": name, "bytes_before": learner.bytes_read}
    return learner.bytes_read - learner.metadata["bytes_before"]
