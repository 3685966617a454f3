"""`hf-recurrent learn MODEL --source ...`: read an endless stream of bytes and learn from it."""

import argparse
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent.cli.flags import named
from hf_recurrent.cli.imports import import_libraries
from hf_recurrent.cli.loading import add_loading_arguments, load_or_build, move_to_device
from hf_recurrent.cli.parsing import CommandParser, add_json_argument, check_at_least, dataclass_of, run_command
from hf_recurrent.cli.threads import add_threads_argument, thread_count
from hf_recurrent.cli.user_code import import_flags

if TYPE_CHECKING:
    from hf_recurrent.data.corpus import Corpus
    from hf_recurrent.online.learn_run import LearnRun
    from hf_recurrent.online.learner import OnlineLearner

# As in `learning_rules.rules` and `online.settings`, which import torch.
METHODS = ("rtrl", "snap1", "truncated", "spatial")
OPTIMIZERS = ("adamw", "rmsprop", "sgd")


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-recurrent learn",
        description="Read a stream of bytes once: predict every byte, score the prediction and learn\n"
        "from it. MODEL is a checkpoint, or a preset with new weights. The updated model\n"
        "is saved in --output_dir, where all other commands can use it.",
        epilog="examples:\n"
        "  hf-recurrent learn runs/hawk --source book.txt\n"
        "  hf-recurrent learn runs/hawk --source a.log --follow --output_dir a\n"
        "  hf-recurrent learn runs/hawk --source a.log --follow --output_dir a --resume\n"
        "  tail -F server.log | hf-recurrent learn runs/hawk --source - --stride 16\n"
        "  hf-recurrent learn memora-tiny --source tcp://127.0.0.1:9000 --plot\n\n"
        "Ctrl-C saves the model and stops. Byte 0 ends an episode and resets the state.",
    )
    add_loading_arguments(parser, takes_presets=True)
    parser.set_defaults(dtype="float32")  # bfloat16 rounds small updates away
    add = parser.add_argument_group("stream").add_argument
    add(
        "--source",
        required=True,
        help="a file (.gz and .zst are decompressed), - for standard input, or tcp://127.0.0.1:PORT for a program on "
        "this machine",
    )
    add("--follow", action="store_true", help="wait for data appended to the file, as tail -f does")
    add("--timeout", type=float, help="stop after this many seconds without a byte")
    add("--binary", action="store_true", help="byte 0 is data and does not end an episode")
    learning = parser.add_argument_group("learning")
    add = learning.add_argument
    add(
        "--method",
        default="rtrl",
        choices=METHODS,
        help="rtrl: exact gradients within each recurrent layer, over the whole past. snap1: approximate RTRL "
        "(SnAp-1), for units that mix channels. truncated: gradients within the stride only. spatial: none over "
        "time. (default: rtrl)",
    )
    add("--block_size", type=int, help="bytes between two updates (default: --stride)")
    add("--stride", type=int, help="T, bytes per learning step (default: the whole block, or 1)")
    add("--learning_rate", type=float, help="constant (default: 3e-5; for new weights, try 1e-3)")
    add("--table_learning_rate", type=float, help="constant, of tables of n-grams (default: 0.02)")
    add("--optim", default="adamw", choices=OPTIMIZERS, help="optimizer (default: adamw)")
    add("--no_learn", action="store_true", help="only predict and score")
    add("--seed", type=int, default=0, help="seed of the new weights of a preset")
    add_threads_argument(learning, "CPU threads; more do not help a single stream (default: 1)")
    parser.set_defaults(threads=1)
    _add_output_arguments(parser.add_argument_group("results"))
    return parser


def _add_output_arguments(output: Any) -> None:
    add, add_one = output.add_argument, output.add_mutually_exclusive_group().add_argument
    add("--output_dir", type=Path, help="default: runs/MODEL-SOURCE")
    add_one("--resume", action="store_true", help="continue the run in --output_dir, if there is one")
    add_one("--restart", action="store_true", help="begin anew in --output_dir, and remove the checkpoints of its run")
    add("--save_every", type=_count, default=100_000, help="bytes between two checkpoints")
    add("--report_every", type=_count, default=1000, help="bytes between two records")
    add("--window", type=_count, default=10_000, help="bytes of the windowed bits per byte")
    add("--held_out", nargs="+", help="files to measure bits per byte on at every checkpoint")
    add("--plot", action="store_true", help="plot the records to OUTPUT_DIR/prequential.png at the end")
    add_json_argument(output)
    add("--quiet", action="store_true", help="hide progress")


def update_steps(arguments: argparse.Namespace) -> tuple[int, int]:
    """(stride, strides per update) of `--block_size` and `--stride`."""
    check_at_least(1, arguments, "block_size", "stride")
    stride = arguments.stride or arguments.block_size or 1
    block = arguments.block_size or stride
    if block % stride:
        raise ValueError(f"`--block_size` is {block}; it must be a multiple of `--stride`, which is {stride}.")
    return stride, block // stride


def _count(text: str) -> int:
    value = float(text)
    if not (value >= 1 and value.is_integer()):  # false for NaN and infinity too
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(value)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with `argv`, by default the arguments of the process.

    If the source fails or the loss becomes NaN or infinite, everything is saved and the exit status is 1.
    """
    parser = build_parser()
    with ExitStack() as stack:
        arguments, run = run_command(parser, argv, lambda found: (found, stack.enter_context(_open(found))))
        if arguments.threads == 1 and not arguments.quiet:
            print("1 thread: more do not help a single stream", file=sys.stderr)
        first, begin = run.learner.bytes_read, time.perf_counter()
        with thread_count(arguments.threads):
            failure = run.learn()
        rate = (run.learner.bytes_read - first) / (time.perf_counter() - begin)
    if failure:
        parser.exit(1, f"{parser.prog}: error: {failure}\n")
    _print_summary(arguments, run, rate)


def _open(arguments: argparse.Namespace) -> "AbstractContextManager[LearnRun]":
    if arguments.output_dir is None:
        name = "stdin" if arguments.source == "-" else arguments.source.removeprefix("tcp://").replace(":", "-")
        arguments.output_dir = Path("runs", f"{Path(arguments.model).name}-{Path(name).name}")
    update_steps(arguments)
    if arguments.plot:
        from hf_recurrent.plotting import require_pyplot

        require_pyplot()

    import_libraries()
    from transformers.utils import logging

    from hf_recurrent.online.learn_run import LearnOptions, open_learn_run

    logging.disable_progress_bar()  # of saving, because it breaks the line of progress
    return open_learn_run(
        dataclass_of(LearnOptions, arguments),
        lambda checkpoint: _load_learner(arguments, checkpoint),
        lambda tokenizer: _load_held_out(arguments, tokenizer),
    )


def _load_learner(arguments: argparse.Namespace, checkpoint: str | None) -> "OnlineLearner":
    from hf_recurrent.online.learner import OnlineLearner
    from hf_recurrent.online.saved_learner import load_saved_model

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
    rates = ("learning_rate", "table_learning_rate")
    settings |= {name: rate for name in rates if (rate := getattr(arguments, name)) is not None}
    if checkpoint is None:
        return OnlineLearner(*load_or_build(arguments), **settings)
    model, tokenizer = load_saved_model(checkpoint, trust_remote_code=arguments.trust_remote_code)
    move_to_device(model, arguments)
    return OnlineLearner.load(checkpoint, model, tokenizer, **settings)


def _load_held_out(arguments: argparse.Namespace, tokenizer: Any) -> "Corpus | None":
    from hf_recurrent.data.loading import load_corpus

    if not arguments.held_out:
        return None
    with named(source="--held_out"):
        return load_corpus(arguments.held_out, tokenizer=tokenizer, binary=arguments.binary)


def _print_summary(arguments: argparse.Namespace, run: "LearnRun", rate: float) -> None:
    from hf_recurrent.online.learn_run import STATE_FILE

    directory = arguments.output_dir
    if arguments.json:
        record = dataclasses.replace(run.learner.record(), bytes_per_second=rate)
        print(json.dumps({"ending": run.ending, **dataclasses.asdict(record), "output_dir": str(directory)}))
        return
    start = f"--state {directory / STATE_FILE}" if run.learner.has_context else '--prompt "..."'
    if arguments.user_code:
        start = f"{shlex.join(import_flags(arguments.user_code))} {start}"
    print(
        f"{run.summary()}\nSaved in {directory}. Next:\n"
        f"  hf-recurrent generate {directory} {start}\n"
        f"  to continue, rerun with --output_dir {directory} --resume"
    )
