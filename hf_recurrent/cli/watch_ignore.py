"""`hf-recurrent watch ignore ID ...`: an event is usual from now on."""

import argparse
from pathlib import Path

from hf_recurrent.cli.parsing import CommandParser, command


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-recurrent watch ignore",
        description="Say that events are usual: they are not shown again, by a watch that runs now or\n"
        "later. An event is a reason and a template of lines; its ID is in brackets.",
        epilog="examples:\n  hf-recurrent watch ignore 3f9a01bc --output_dir runs/watch-app.log",
    )
    parser.add_argument("events", nargs="+", metavar="ID", help="of an event, such as 3f9a01bc")
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help="of the watch (default: the only one in runs)")
    return parser


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


main = command(build_parser, _ignore)
