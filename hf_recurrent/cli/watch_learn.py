"""`hf-recurrent watch learn LOG ...`: read old logs to their end, save what is usual, and write a page about them."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from hf_recurrent.cli.parsing import CommandParser, check_parent, run_command
from hf_recurrent.cli.watch import add_watch_arguments, default_directory, open_run

if TYPE_CHECKING:
    from hf_recurrent.watch.watch_run import WatchRun


def build_parser() -> argparse.ArgumentParser:
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


def main(argv: Sequence[str] | None = None) -> None:
    with ExitStack() as stack:
        run, page = run_command(build_parser(), argv, lambda arguments: _open(arguments, stack))
        _learn(run, page)


def _open(arguments: argparse.Namespace, stack: ExitStack) -> "tuple[WatchRun, Path]":
    check_parent("--page", arguments.page)
    arguments.output_dir = arguments.output_dir or default_directory(arguments.logs)
    run = stack.enter_context(open_run(arguments))
    return run, arguments.page or arguments.output_dir / "learned.html"


def _learn(run: "WatchRun", page: Path) -> None:
    from hf_recurrent.watch.learned_page import RateHistory, learned_page

    found = {log.name: (log, RateHistory(), []) for log in run.logs}
    for log, rates, _ in found.values():
        log.on_line = rates.add
    run.on_event = lambda log, event: found[log.name][2].append(event)
    run.watch()
    page.write_text(learned_page([*found.values()]), encoding="utf-8", errors="replace")
    if not run.options.quiet:
        print(f"A page about what is usual: {page}", file=sys.stderr if run.options.json else sys.stdout)
