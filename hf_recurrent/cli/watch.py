"""`hf-recurrent watch LOG ...`: show the unusual lines of logs as they grow."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent.cli.parsing import (
    CommandParser,
    check_at_least,
    check_parent,
    dataclass_of,
    run_command,
)
from hf_recurrent.cli.standard_output import checked_output
from hf_recurrent.watch.log_records import FORMATS

if TYPE_CHECKING:
    from hf_recurrent.watch.watch_run import WatchRun

# First word → module with its `main`; a log of that name is `./learn`.
_ACTIONS = {"learn": "watch_learn", "evaluate": "watch_evaluate", "ignore": "watch_ignore"}
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-recurrent watch",
        description="Read logs line by line as they grow, learn what is usual in them, and show\n"
        "the lines and sessions that are not. No rules and no formats are needed.",
        epilog="examples:\n"
        "  hf-recurrent watch /var/log/syslog\n"
        "  hf-recurrent watch server.log --no_follow\n"
        "  hf-recurrent watch app.log db.log --alarms_per_day 20 --metrics 9100\n"
        "  hf-recurrent watch hdfs.log.gz --output_sessions sessions.jsonl\n"
        "  journalctl -f -o json | hf-recurrent watch -\n"
        "  hf-recurrent watch app.log --exec 'mail -s \"$WATCH_SUMMARY\" root'\n\n"
        "further actions, with a --help of their own:\n"
        "  hf-recurrent watch learn LOG ...         read old logs, write a page\n"
        "  hf-recurrent watch ignore ID             an event, shown as [ID], is usual\n"
        "  hf-recurrent watch evaluate LOG LABELS   compare the scores with labels\n\n"
        "Ctrl-C saves everything and stops; the same command continues at that line.\n"
        "--exec gets the event as JSON on standard input and in WATCH_ variables.",
    )
    add_watch_arguments(parser)
    reading = parser.add_argument_group("following")
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
    reading.add_argument("--save_every", type=float, default=300, metavar="SECONDS", help="between saves of the state")
    output = parser.add_argument_group("alarms")
    output.add_argument("--metrics", type=int, metavar="PORT", help="serve Prometheus metrics on 127.0.0.1:PORT")
    output.add_argument("--exec", dest="alert_command", metavar="COMMAND", help="run this command for each event")
    output.add_argument("--webhook", metavar="URL", help="post each event as JSON, again after failures")
    return parser


def add_watch_arguments(parser: Any) -> None:
    """The arguments of `watch` that `watch learn` shares."""
    parser.add_argument("logs", nargs="+", metavar="LOG", help="files, patterns such as '*.log', or -")
    reading = parser.add_argument_group("reading")
    reading.add_argument(
        "--format",
        choices=FORMATS,
        metavar="FORMAT",
        default="auto",
        help=f"of the records: {', '.join(FORMATS)} (default: auto, which recognizes them)",
    )
    reading.add_argument("--rotated", action="store_true", help="begin with the rotated files: LOG.2.gz, LOG.1, ...")
    reading.add_argument(
        "--max_line_bytes", type=int, default=4096, metavar="N", help="read only the first N of a line"
    )
    reading.add_argument("--redact", action="store_true", help="replace passwords, keys, mail addresses, ... first")
    reading.add_argument(
        "--redact_pattern", action="append", default=[], metavar="REGEX", help="replace these, too; may be repeated"
    )
    judging = parser.add_argument_group("judging")
    judging.add_argument(
        "--false_alarms",
        type=float,
        default=0.01,
        metavar="RATE",
        help="share of the lines of a log to flag while nothing is wrong (default: 0.01)",
    )
    judging.add_argument(
        "--alarms_per_day", type=float, metavar="N", help="flag about N events per day of the log's own time"
    )
    judging.add_argument("--session", metavar="REGEX", help="names a session, such as 'req-\\w+' (default: detected)")
    judging.add_argument(
        "--session_idle",
        type=float,
        default=1800,
        metavar="SECONDS",
        help="idle time after which a session has ended (default: 1800; lines, in a log without times)",
    )
    output = parser.add_argument_group("results")
    output.add_argument("--explain", action="store_true", help="show the nearest line that came before, too")
    output.add_argument("--json", action="store_true", help="print every event as a line of JSON")
    output.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: on a terminal")
    output.add_argument("--output", type=Path, metavar="FILE", help="append every line as JSON, flagged or not")
    output.add_argument("--output_sessions", type=Path, metavar="FILE", help="append every session that ends as JSON")
    output.add_argument("--output_events", type=Path, metavar="FILE", help="append every event as JSON")
    output.add_argument("--output_dir", type=Path, metavar="DIR", help="state (default: runs/watch-LOG)")
    output.add_argument("--restart", action="store_true", help="forget the state in --output_dir and begin anew")
    output.add_argument("--quiet", action="store_true", help="hide everything but events and problems")


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in _ACTIONS:
        importlib.import_module(f"hf_recurrent.cli.{_ACTIONS[words[0]]}").main(words[1:])
        return
    parser = build_parser()
    with ExitStack() as stack:
        run = run_command(parser, words, lambda arguments: stack.enter_context(open_run(arguments)))
        with checked_output(parser.error):
            run.watch()


def open_run(arguments: argparse.Namespace) -> "AbstractContextManager[WatchRun]":
    """The run of parsed arguments.

    Raises:
        OSError, ValueError, ImportError: an argument is not allowed, or a file cannot be used.
    """
    from hf_recurrent.watch.compressed_log import expand_logs
    from hf_recurrent.watch.watch_run import OUTPUTS, WatchOptions, open_watch
    from hf_recurrent.watch.watched_log import WatchSettings

    _check(arguments, OUTPUTS)
    arguments.output_dir = arguments.output_dir or default_directory(arguments.logs)
    logs = expand_logs(arguments.logs)
    doubled = [log for log in logs if logs.count(log) > 1]
    if doubled:
        raise ValueError(f"`LOG` has {doubled[0]!r} twice; each log is read once.")
    for log in logs:
        if log != "-" and Path(log).is_dir():
            raise ValueError(f"`LOG` is {log!r}, a directory; it must be a file.")
    arguments.redact_pattern = tuple(arguments.redact_pattern)
    return open_watch(dataclass_of(WatchOptions, arguments), dataclass_of(WatchSettings, arguments), logs)


def default_directory(logs: Sequence[str]) -> Path:
    names = "+".join("stdin" if log == "-" else os.path.basename(log).replace("*", "_") for log in logs)
    return Path("runs", f"watch-{names}"[:100])


def _check(arguments: argparse.Namespace, outputs: Sequence[str]) -> None:
    check_at_least(1, arguments, "max_line_bytes")
    if not arguments.save_every > 0:
        raise ValueError(f"`--save_every` is {arguments.save_every:g}; it must be more than 0 seconds.")
    if arguments.metrics is not None and not 0 <= arguments.metrics < 1 << 16:
        raise ValueError(f"`--metrics` is {arguments.metrics}; it must be a port, from 0 to 65535.")
    for name in outputs:
        path = getattr(arguments, name)
        check_parent(f"--{name}", path)
        if path is not None and path.is_dir():
            raise IsADirectoryError(f"`--{name}` is {str(path)!r}; it must be a file, not a directory.")


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
