"""`hf-recurrent reproduce NAME`: measure a table or figure of the papers.

The experiments are in `scripts/papers` of the repository; the wheel has none.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_recurrent.cli.parsing import CommandParser, check_at_least, check_file, parse_pairs, run_command
from hf_recurrent.cli.threads import add_threads_argument, use_threads
from hf_recurrent.cli.user_code import import_user_code

NOT_INSTALLED = (
    "hf-recurrent reproduce: error: experiments are not part of the installed wheel; clone the repository and run "
    "`pip install -e .` in it.\n"
)


def load_papers() -> ModuleType | None:
    """Import `scripts/papers` of the clone as the package `papers`; None without a clone."""
    if "papers" not in sys.modules:
        folder = Path(__file__).resolve().parents[2] / "scripts" / "papers"
        if not (folder / "__init__.py").exists():
            return None
        spec = importlib.util.spec_from_file_location("papers", folder / "__init__.py")
        sys.modules["papers"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["papers"])
    return sys.modules["papers"]


def build_parser() -> argparse.ArgumentParser:
    papers = load_papers()
    experiments, studies = papers.EXPERIMENTS, papers.STUDIES
    width = max(map(len, [*experiments, *studies]))
    parser = CommandParser(
        prog="hf-recurrent reproduce",
        description="Train the models of a table or figure of the papers; write table, plot and rows.\n\n"
        "experiments:\n"
        + "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in experiments.items())
        + "\n\nstudies of causes, one setting at a time:\n"
        + "\n".join(f"  {name:<{width}}  {each.claim}" for name, each in studies.items()),
        epilog="examples:\n  hf-recurrent reproduce selective-copying\n"
        "  hf-recurrent reproduce parity --seeds 0 1 2 --processes 2\n"
        "  hf-recurrent reproduce --overview\n"
        "  hf-recurrent reproduce --all --override data=/data/mnist\n"
        "  hf-recurrent reproduce stride-sweep --size paper --override corpus=hub:roneneldan/TinyStories\n\n"
        "Finished rows are kept, and checkpoints of longer ones: to continue, rerun the same command. Several\n"
        "processes may run it at once and share the rows.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="experiment to run")
    every = parser.add_mutually_exclusive_group()
    every.add_argument("--all", action="store_true", help="run all experiments, one after another")
    every.add_argument("--overview", action="store_true", help="show the recorded time of each experiment, run none")
    parser.add_argument("--size", default="small", choices=["small", "paper"], help="small: minutes on two cores")
    add = parser.add_argument
    seeds = "run each row once per seed (small: most 0 1 2; paper: as many as the paper)"
    add("--seeds", nargs="+", type=int, help=seeds)
    add("--processes", type=int, default=1, help="rows to run in parallel (default: 1)")
    add("--hours", type=float, help="begin no row after this many hours; rerun to continue")
    add_threads_argument(parser, "CPU threads of a row (default: the free cores, or with --processes all, divided)")
    add("--only", nargs="+", default=[], metavar="LABEL", help="run only rows whose label contains this")
    add("--override", nargs="+", default=[], metavar="NAME=VALUE", help="replace settings of all rows")
    add("--output_dir", "--output-dir", type=Path, default=Path("docs/results"))
    add("--page", type=Path, help="Markdown page in which to replace the section on this experiment")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    if load_papers() is None:
        sys.stderr.write(NOT_INSTALLED)
        raise SystemExit(2)
    run_command(build_parser(), argv, _reproduce)


def _reproduce(arguments: argparse.Namespace) -> None:
    from hf_recurrent.plotting import require_pyplot
    from papers.engine.durations import overview

    papers = load_papers()
    every = arguments.all or arguments.overview
    if every == bool(arguments.name):
        raise ValueError("give either NAME, or --all, or --overview; --help lists the experiments")
    check_at_least(1, arguments, "processes")
    check_at_least(0, arguments, "hours")
    check_file("--page", arguments.page)
    experiments = {name: papers.load_experiment(name) for name in (papers.EXPERIMENTS if every else [arguments.name])}
    if every:
        print(overview(experiments, arguments.size, arguments.output_dir))
    if arguments.overview:
        return
    require_pyplot()  # at the end of every experiment there is a plot
    if arguments.processes == 1 or arguments.threads is not None:
        use_threads(arguments.threads)
    deadline = None if arguments.hours is None else time.monotonic() + 3600 * arguments.hours
    failed = {}
    for name, experiment in experiments.items():
        if every:
            print(f"\n{name}")
        try:
            _run(experiment, arguments, deadline)
        except (ValueError, OSError) as error:  # such as data that are not there
            if not every:
                raise
            failed[name] = error
            sys.stderr.write(f"{name}: {error}\n")
    if failed:
        raise ValueError(f"not finished: {', '.join(failed)}; the reasons are above")


def _run(experiment: Any, arguments: argparse.Namespace, deadline: float | None) -> None:
    from papers.engine.runner import Workers, reproduce

    overrides = parse_pairs("--override", arguments.override)
    if arguments.all:  # where they exist
        known = {key for row in experiment.rows(arguments.size) for key in row}
        overrides = {key: value for key, value in overrides.items() if key in known}
    reproduce(
        experiment,
        arguments.size,
        arguments.seeds,
        arguments.output_dir,
        overrides=overrides,
        only=arguments.only,
        workers=Workers(arguments.processes, arguments.threads, partial(_prepare, arguments.user_code), deadline),
        page=arguments.page,
    )


def _prepare(user_code: Sequence[str] | None) -> None:
    """In each process that runs rows."""
    load_papers()
    import_user_code(user_code)
