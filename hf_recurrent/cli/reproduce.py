"""`hf-recurrent reproduce NAME`: measure one table or figure of the papers.

The experiments are in `hf_recurrent.reproduce`, which a clone has and the wheel does not.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NOT_INSTALLED = (
    "hf-recurrent reproduce: error: experiments are not part of the installed wheel; clone the repository and run "
    "`pip install -e .` in it.\n"
)


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    from hf_recurrent.reproduce import EXPERIMENTS

    width = max(map(len, EXPERIMENTS))
    parser = argparse.ArgumentParser(
        prog="hf-recurrent reproduce",
        description="Train the models of one table or figure of the papers and write table, plot and rows.\n\n"
        "experiments:\n" + "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in EXPERIMENTS.items()),
        epilog="examples:\n  hf-recurrent reproduce selective-copying\n"
        "  hf-recurrent reproduce parity --seeds 0 1 2 --processes 2\n"
        "  hf-recurrent reproduce stride-sweep --size paper --override corpus=hub:roneneldan/TinyStories\n\n"
        "Finished rows are kept: to continue, rerun the same command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="experiment to run")
    parser.add_argument("--size", default="small", choices=["small", "paper"], help="small: minutes on two cores")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="each row runs once per seed")
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
    if importlib.util.find_spec("hf_recurrent.reproduce") is None:
        sys.stderr.write(NOT_INSTALLED)
        raise SystemExit(2)
    from hf_recurrent.reproduce import load_experiment
    from hf_recurrent.reproduce.engine.runner import reproduce

    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        if arguments.processes < 1:
            raise ValueError(f"--processes is {arguments.processes}; it must be at least 1.")
        if arguments.page and not arguments.page.is_file():
            raise FileNotFoundError(f"--page is `{arguments.page}`, which does not exist.")
        reproduce(
            load_experiment(arguments.name),
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
    """Parse KEY=VALUE, the value as JSON if it is valid JSON, else as text."""
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
