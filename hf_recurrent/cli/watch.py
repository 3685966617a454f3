"""`hf-recurrent watch LOG ...`: show the unusual lines of logs as they grow; `watch learn` and `watch ignore`."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent.cli import watch_evaluate
from hf_recurrent.cli.parsing import (
    CommandParser,
    check_at_least,
    check_output,
    check_parent,
    command,
    dataclass_of,
    run_command,
)
from hf_recurrent.cli.standard_output import checked_output
from hf_recurrent.watch.log_records import FORMATS

if TYPE_CHECKING:
    from hf_recurrent.watch.watch_run import WatchRun

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
    add = parser.add_argument_group("following").add_argument
    add("--no_follow", dest="follow", action="store_false", help="read the files from beginning to end, then stop")
    history = "start N bytes before the end of a file that exists, such as 2M, or all (default: 64k)"
    add("--history", type=_bytes, default=64_000, metavar="N", help=history)
    add("--save_every", type=float, default=300, metavar="SECONDS", help="between saves of the state")
    add = parser.add_argument_group("alarms").add_argument
    add("--metrics", type=int, metavar="PORT", help="serve Prometheus metrics on 127.0.0.1:PORT")
    add("--exec", dest="alert_command", metavar="COMMAND", help="run this command for each event")
    add("--webhook", metavar="URL", help="post each event as JSON, again after failures")
    return parser


def add_watch_arguments(parser: Any) -> None:
    """The arguments of `watch` that `watch learn` shares."""
    parser.add_argument("logs", nargs="+", metavar="LOG", help="files, patterns such as '*.log', or -")
    add = parser.add_argument_group("reading").add_argument
    formats = f"of the records: {', '.join(FORMATS)} (default: auto, which recognizes them)"
    add("--format", choices=FORMATS, metavar="FORMAT", default="auto", help=formats)
    add("--rotated", action="store_true", help="begin with the rotated files: LOG.2.gz, LOG.1, ...")
    add("--max_line_bytes", type=int, default=4096, metavar="N", help="read only the first N of a line")
    add("--redact", action="store_true", help="replace passwords, keys, mail addresses, ... first")
    patterns = "replace these, too; may be repeated"
    add("--redact_pattern", action="append", default=[], metavar="REGEX", help=patterns)
    add = parser.add_argument_group("judging").add_argument
    false_alarms = "share of the lines of a log to flag while nothing is wrong (default: 0.01)"
    add("--false_alarms", type=float, default=0.01, metavar="RATE", help=false_alarms)
    add("--alarms_per_day", type=float, metavar="N", help="flag about N events per day of the log's own time")
    add("--session", metavar="REGEX", help="names a session, such as 'req-\\w+' (default: detected)")
    idle = "idle time after which a session has ended (default: 1800; lines, in a log without times)"
    add("--session_idle", type=float, default=1800, metavar="SECONDS", help=idle)
    add = parser.add_argument_group("results").add_argument
    add("--explain", action="store_true", help="show the nearest line that came before, too")
    add("--json", action="store_true", help="print every event as a line of JSON")
    add("--color", choices=("auto", "always", "never"), default="auto", help="default: on a terminal")
    add("--output", type=Path, metavar="FILE", help="append every line as JSON, flagged or not")
    add("--output_sessions", type=Path, metavar="FILE", help="append every session that ends as JSON")
    add("--output_events", type=Path, metavar="FILE", help="append every event as JSON")
    add("--output_dir", type=Path, metavar="DIR", help="state (default: runs/watch-LOG)")
    add("--restart", action="store_true", help="forget the state in --output_dir and begin anew")
    add("--quiet", action="store_true", help="hide everything but events and problems")


def build_learn_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-recurrent watch learn",
        description="Read logs from beginning to end, and write a page with their templates, how\n"
        "often each came, and what would have been flagged. A watch of the same logs\n"
        "continues with what was learned.",
        epilog="examples:\n"
        "  hf-recurrent watch learn app.log     # runs/watch-app.log/learned.html\n"
        "  hf-recurrent watch learn app.log --rotated --page report.html\n"
        "  hf-recurrent watch app.log           # continues at the end of app.log",
    )
    add_watch_arguments(parser)
    parser.add_argument("--page", type=Path, metavar="FILE", help="HTML (default: learned.html in --output_dir)")
    parser.set_defaults(follow=False, history=None, save_every=300.0, metrics=None, alert_command=None, webhook=None)
    return parser


def build_ignore_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-recurrent watch ignore",
        description="Say that events are usual: they are not shown again, by a watch that runs now or\n"
        "later. An event is a reason and a template of lines; its ID is in brackets.",
        epilog="examples:\n  hf-recurrent watch ignore 3f9a01bc --output_dir runs/watch-app.log",
    )
    parser.add_argument("events", nargs="+", metavar="ID", help="of an event, such as 3f9a01bc")
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help="of the watch (default: the only one in runs)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in _ACTIONS:
        _ACTIONS[words[0]](words[1:])
        return
    parser = build_parser()
    with ExitStack() as stack:
        run = run_command(parser, words, lambda arguments: stack.enter_context(_open(arguments)))
        with checked_output(parser.error):
            run.watch()


def _learn(words: Sequence[str]) -> None:
    def open_learning(arguments: argparse.Namespace) -> "tuple[WatchRun, Path]":
        check_parent("--page", arguments.page)
        run = stack.enter_context(_open(arguments))
        return run, arguments.page or arguments.output_dir / "learned.html"

    with ExitStack() as stack:
        run, page = run_command(build_learn_parser(), words, open_learning)
        from hf_recurrent.watch.learned_page import RateHistory, learned_page

        found = {log.name: (log, RateHistory(), []) for log in run.logs}
        for log, rates, _ in found.values():
            log.on_line = rates.add
        run.on_event = lambda log, event: found[log.name][2].append(event)
        run.watch()
        page.write_text(learned_page([*found.values()]), encoding="utf-8", errors="replace")
        if not run.options.quiet:
            print(f"A page about what is usual: {page}", file=sys.stderr if run.options.json else sys.stdout)


def _ignore(arguments: argparse.Namespace) -> None:
    from hf_recurrent.watch.events import IgnoredEvents
    from hf_recurrent.watch.saved_state import FILE

    directory = arguments.output_dir
    if directory is None:
        found = sorted(path.parent for path in Path("runs").glob(f"watch-*/{FILE}"))
        if len(found) != 1:
            raise ValueError(
                f"`--output_dir` is missing, and `runs` has {len(found)} watches; name the one to change."
            )
        directory = found[0]
    if not (directory / FILE).is_file():
        raise ValueError(f"`--output_dir` is {str(directory)!r}, which has no state of a watch.")
    ignored = IgnoredEvents(directory)
    for event in arguments.events:
        ignored.add(event)
    print(f"Events of this kind are not shown again by the watch in {directory}: {', '.join(arguments.events)}.")


def _open(arguments: argparse.Namespace) -> "AbstractContextManager[WatchRun]":
    from hf_recurrent.watch.compressed_log import expand_logs
    from hf_recurrent.watch.watch_run import OUTPUTS, WatchOptions, open_watch
    from hf_recurrent.watch.watched_log import WatchSettings

    _check(arguments, OUTPUTS)
    if arguments.output_dir is None:
        names = "+".join("stdin" if log == "-" else os.path.basename(log).replace("*", "_") for log in arguments.logs)
        arguments.output_dir = Path("runs", f"watch-{names}"[:100])
    logs = expand_logs(arguments.logs)
    doubled = [log for log in logs if logs.count(log) > 1]
    if doubled:
        raise ValueError(f"`LOG` has {doubled[0]!r} twice; each log is read once.")
    for log in logs:
        if log != "-" and Path(log).is_dir():
            raise ValueError(f"`LOG` is {log!r}, a directory; it must be a file.")
    arguments.redact_pattern = tuple(arguments.redact_pattern)
    return open_watch(dataclass_of(WatchOptions, arguments), dataclass_of(WatchSettings, arguments), logs)


def _check(arguments: argparse.Namespace, outputs: Sequence[str]) -> None:
    check_at_least(1, arguments, "max_line_bytes")
    if not arguments.save_every > 0:
        raise ValueError(f"`--save_every` is {arguments.save_every:g}; it must be more than 0 seconds.")
    if arguments.metrics is not None and not 0 <= arguments.metrics < 1 << 16:
        raise ValueError(f"`--metrics` is {arguments.metrics}; it must be a port, from 0 to 65535.")
    for name in outputs:
        check_output(f"--{name}", getattr(arguments, name))


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


# First word → its `main`; a log of that name is `./learn`.
_ACTIONS = {"learn": _learn, "evaluate": watch_evaluate.main, "ignore": command(build_ignore_parser, _ignore)}
