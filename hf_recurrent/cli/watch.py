"""`hf-recurrent watch LOG ...`: show the unusual lines of logs as they grow."""

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent.cli.loading import check_byte_tokenizer, load_or_build
from hf_recurrent.cli.parsing import CommandParser, check_at_least, check_parent, dataclass_of, run_command
from hf_recurrent.cli.threads import add_threads_argument

if TYPE_CHECKING:
    from hf_recurrent.watch.watch_run import WatchRun

DEFAULT_MODEL = "hawk-tiny"
# Rate and stride at which new weights get to know a log within its first hundreds of lines.
LEARNING_RATE, STRIDE = 1e-3, 32
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = CommandParser(
        prog="hf-recurrent watch",
        description="Read logs line by line as they grow, learn what is usual in them, and show the\n"
        "lines that are not. No training, no rules and no parsing are needed.",
        epilog="examples:\n"
        "  hf-recurrent watch /var/log/syslog\n"
        "  hf-recurrent watch server.log --no_follow\n"
        "  hf-recurrent watch app.log db.log --output lines.jsonl --metrics 9100\n"
        "  journalctl -f -o json | hf-recurrent watch -\n"
        "  hf-recurrent watch app.log --exec 'mail -s \"$WATCH_LOG\" root'\n\n"
        "Ctrl-C saves everything and stops; the same command continues at that line.\n"
        "--exec gets the line as JSON on standard input and in WATCH_ variables.",
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="files, or - for standard input")
    reading = parser.add_argument_group("reading")
    reading.add_argument(
        "--no_follow", dest="follow", action="store_false", help="read the files from beginning to end, then stop"
    )
    reading.add_argument(
        "--history",
        type=_bytes,
        default=64_000,
        metavar="N",
        help="start N bytes before the end of a file that exists, such as 2M, or all (default: 64k)",
    )
    reading.add_argument(
        "--format",
        choices=("auto", "text", "journald"),
        default="auto",
        help="journald: JSON of journalctl -o json, read as `program: message` (default: auto)",
    )
    reading.add_argument(
        "--max_line_bytes", type=int, default=4096, metavar="N", help="read only the first N of a line"
    )
    judging = parser.add_argument_group("judging")
    judging.add_argument(
        "--false_alarms",
        type=float,
        default=0.01,
        metavar="RATE",
        help="share of the lines of a log to flag while nothing is wrong (default: 0.01)",
    )
    judging.add_argument("--window", type=int, default=1000, metavar="LINES", help="lines to compare a line with")
    judging.add_argument("--learn_flagged", action="store_true", help="learn from flagged lines, too")
    learning = parser.add_argument_group("learning")
    learning.add_argument("--model", default=DEFAULT_MODEL, help=f"preset or checkpoint (default: {DEFAULT_MODEL})")
    learning.add_argument("--learning_rate", type=float, help=f"constant (default: {LEARNING_RATE:g})")
    learning.add_argument("--stride", type=int, default=STRIDE, help=f"bytes per update (default: {STRIDE})")
    learning.add_argument("--seed", type=int, default=0, help="seed of the new weights of a preset")
    learning.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    add_threads_argument(learning, "CPU threads; more do not help a single stream (default: 1)")
    parser.set_defaults(threads=1)
    _add_output_arguments(parser.add_argument_group("results"))
    return parser


def _add_output_arguments(output: Any) -> None:
    output.add_argument("--all", dest="shows_all", action="store_true", help="show every line, not only unusual ones")
    output.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: on a terminal")
    output.add_argument("--output", type=Path, metavar="FILE", help="append every line as JSON, flagged or not")
    output.add_argument("--metrics", type=int, metavar="PORT", help="serve Prometheus metrics on 127.0.0.1:PORT")
    output.add_argument(
        "--exec", dest="alert_command", metavar="COMMAND", help="run this shell command for every unusual line"
    )
    output.add_argument("--output_dir", type=Path, metavar="DIR", help="state (default: runs/watch-LOG)")
    output.add_argument("--restart", action="store_true", help="forget the state in --output_dir and begin anew")
    output.add_argument("--save_every", type=float, default=300, metavar="SECONDS", help="between checkpoints")
    output.add_argument("--quiet", action="store_true", help="hide everything but unusual lines and problems")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with `argv`, by default the arguments of the process."""
    parser = build_parser()
    with ExitStack() as stack:
        run = run_command(parser, argv, lambda arguments: stack.enter_context(_open(arguments)))
        try:
            failure = run.watch()
        except BrokenPipeError:  # the reader of the output has ended, as `head` does
            raise SystemExit(1) from None
    if failure:
        parser.exit(1, f"{parser.prog}: error: {failure}\n")


def _open(arguments: argparse.Namespace) -> "AbstractContextManager[WatchRun]":
    _check(arguments)

    # After the checks, because importing torch takes seconds.
    import torch
    from transformers.utils import logging

    from hf_recurrent.online.learner import OnlineLearner
    from hf_recurrent.watch.log_watcher import WatchSettings
    from hf_recurrent.watch.watch_run import WatchOptions, open_watch

    torch.set_num_threads(arguments.threads)
    logging.disable_progress_bar()  # of saving
    names = "+".join("stdin" if log == "-" else Path(log).name for log in arguments.logs)
    arguments.output_dir = arguments.output_dir or Path("runs", f"watch-{names}"[:100])
    options = dataclass_of(WatchOptions, arguments)
    rate = arguments.learning_rate

    def new_learner() -> OnlineLearner:
        options = {"stride": arguments.stride, "learning_rate": LEARNING_RATE if rate is None else rate}
        return OnlineLearner(*_load_model(arguments), rule="rtrl", binary=True, **options)

    settings = WatchSettings(arguments.false_alarms, arguments.learn_flagged, arguments.window)
    return open_watch(options, settings, arguments.logs, new_learner, rate)


def _load_model(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """A preset with new weights, or a checkpoint; with a tokenizer whose ids are bytes."""
    options = {"takes_presets": True, "trust_remote_code": False, "dtype": "float32"}
    model, tokenizer = load_or_build(argparse.Namespace(**vars(arguments) | options), "--model")
    check_byte_tokenizer("--model", arguments.model, tokenizer)
    if model.config.vocab_size < 256 or tokenizer.encode_bytes(bytes(range(256))).tolist() != [*range(256)]:
        raise ValueError(f"`--model` is {arguments.model!r}, whose tokens are not bytes.")
    return model, tokenizer


def _check(arguments: argparse.Namespace) -> None:
    """Raise an error that names the first argument that is not allowed."""
    check_at_least(1, arguments, "max_line_bytes", "stride")
    if not arguments.save_every > 0:
        raise ValueError(f"`--save_every` is {arguments.save_every:g}; it must be more than 0 seconds.")
    if arguments.metrics is not None and not 0 <= arguments.metrics < 1 << 16:
        raise ValueError(f"`--metrics` is {arguments.metrics}; it must be a port, from 0 to 65535.")
    doubled = [log for log in arguments.logs if arguments.logs.count(log) > 1]
    if doubled:
        raise ValueError(f"`LOG` has {doubled[0]!r} twice; each log is read once.")
    for log in arguments.logs:
        if log != "-" and Path(log).is_dir():
            raise ValueError(f"`LOG` is {log!r}, a directory; it must be a file.")
        if log.endswith((".gz", ".zst", ".xz", ".bz2")):
            raise ValueError(f"`LOG` is {log!r}, which is compressed; use `zcat {log} | hf-recurrent watch -`.")
    check_parent("--output", arguments.output)
    if arguments.output is not None and arguments.output.is_dir():
        raise IsADirectoryError(f"`--output` is {str(arguments.output)!r}; it must be a file, not a directory.")


def _bytes(text: str) -> int | None:
    if text == "all":
        return None
    number, unit = (text[:-1], text[-1]) if text[-1:] in ("k", "M", "G") else (text, "")
    try:
        value = float(number) * _UNITS[unit]
    except ValueError:
        value = -1.0
    if not 0 <= value < 2**62:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 64k or 2M, or all")
    return int(value)
