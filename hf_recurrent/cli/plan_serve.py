"""`hf-recurrent plan serve`: states per GB and users per core of a server, before it starts."""

import argparse
import json

from hf_recurrent.cli.loading import add_loading_arguments, load_or_build
from hf_recurrent.cli.parsing import CommandParser, add_json_argument, check_at_least, command


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-recurrent plan serve",
        description="Count the memory of a text of a server, and measure its steps on one core. MODEL may\n"
        "be the name of a preset.",
        epilog="example:\n  hf-recurrent plan serve memora-s0 --rows 64 --user_rate 20",
    )
    add_loading_arguments(parser, takes_presets=True, device="cpu")
    parser.add_argument("--rows", type=int, default=64, help="texts that generate at a time (default: 64)")
    parser.add_argument(
        "--user_rate", type=float, default=20.0, help="tokens per second of a user who waits (default: 20)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of a preset's weights (default: 0)")
    add_json_argument(parser)
    return parser


def _plan(arguments: argparse.Namespace) -> None:
    check_at_least(1, arguments, "rows")
    if not arguments.user_rate > 0:
        raise ValueError(f"`--user_rate` is {arguments.user_rate}; it must be more than 0.")
    model, _ = load_or_build(arguments)

    from hf_recurrent.planning.serving_capacity import describe, serving_capacity

    try:
        found = serving_capacity(model, arguments.rows, arguments.user_rate)
    except TypeError as error:
        raise ValueError(f"`MODEL` is {arguments.model!r}: {error}") from error
    print(json.dumps(found) if arguments.json else describe(arguments.model, found))


main = command(build_parser, _plan)
