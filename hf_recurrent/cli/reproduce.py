"""`hf-recurrent reproduce NAME`: one table or figure of the papers, measured."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_recurrent.reproduce import EXPERIMENTS, load_experiment


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    width = max(map(len, EXPERIMENTS))
    parser = argparse.ArgumentParser(
        prog="hf-recurrent reproduce",
        description="Train the models of one table or figure of the papers and write table, plot and rows.\n\n"
        "experiments:\n" + "\n".join(f"  {name:<{width}}  {text}" for name, text in EXPERIMENTS.items()),
        epilog="examples:\n  hf-recurrent reproduce selective-copying\n"
        "  hf-recurrent reproduce parity --seeds 0 1 2 --processes 2\n"
        "  hf-recurrent reproduce stride-sweep --size paper --override corpus=hub:roneneldan/TinyStories\n\n"
        "Rows that are done are kept: the same command goes on where it was stopped.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="which experiment")
    parser.add_argument("--size", default="small", choices=["small", "paper"], help="small: minutes on two cores")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="each row runs once for each seed")
    parser.add_argument("--processes", type=int, default=1, help="rows that run side by side")
    parser.add_argument("--only", nargs="+", default=[], metavar="LABEL", help="only rows whose label contains this")
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="KEY=VALUE", help="settings that replace those of all rows"
    )
    parser.add_argument("--output_dir", "--output-dir", type=Path, default=Path("docs/results"))
    parser.add_argument("--page", type=Path, help="Markdown page whose section on this experiment is replaced")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with `argv`, by default the process's arguments. Bad input ends it with one sentence."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        if arguments.processes < 1:
            raise ValueError(f"--processes is {arguments.processes}; it must be at least 1.")
        if arguments.page and not arguments.page.is_file():
            raise FileNotFoundError(f"--page is `{arguments.page}`, which does not exist.")
        experiment = load_experiment(arguments.name)
        from hf_recurrent.reproduce.runner import reproduce

        reproduce(
            experiment,
            arguments.size,
            arguments.seeds,
            arguments.output_dir,
            overrides=_overrides(arguments.override),
            only=arguments.only,
            processes=arguments.processes,
            page=arguments.page,
        )
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))


def _overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE, the value as JSON where it is some."""
    result: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (key and equals):
            raise ValueError(f"--override has {pair!r}; it must be KEY=VALUE.")
        try:
            result[key] = json.loads(text)
        except ValueError:
            result[key] = text
    return result
