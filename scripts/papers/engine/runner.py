"""Run the missing rows of an experiment, several at a time, and save each as it finishes."""

import io
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from papers.engine.durations import estimate
from papers.engine.experiment import Experiment, Settings
from papers.engine.report import command_line, section, update_section, write_report
from papers.engine.row_checkpoints import row_checkpoints
from papers.engine.rows_file import (
    add_row,
    find_row,
    found_rows,
    read_rows,
    report_path,
    row_key,
    rows_path,
    tuning_path,
)
from papers.engine.tables import in_words
from papers.engine.tuning import tuned, tuning_rows

UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class Workers:
    """How rows run.

    Args:
        processes: rows that run side by side.
        threads: CPU threads of each; by default its share of the cores, or as they are for one process.
        prepare: called in each of these processes before its first row.
        deadline: value of `time.monotonic()` after which no row begins; None for no limit.
    """

    processes: int = 1
    threads: int | None = None
    prepare: Callable[[], None] | None = None
    deadline: float | None = None

    def is_over(self) -> bool:
        """True after the deadline."""
        return self.deadline is not None and time.monotonic() >= self.deadline


def reproduce(
    experiment: Experiment,
    size: str,
    seeds: Sequence[int] | None,
    output_dir: Path,
    *,
    overrides: dict[str, Any] | None = None,
    only: Sequence[str] = (),
    workers: Workers | None = None,
    page: Path | None = None,
) -> list[Settings]:
    """Run the missing rows, then write table, plot and the section of the page.

    Several processes may do this at once, also on several machines with one file system: each row runs in one of them.

    Args:
        size: "small" or "paper".
        seeds: each row runs once per seed; by default the experiment's.
        output_dir: directory of `<name>_<size>.json`, `.md` and `.png`; the rows that compared candidates are in
            `<name>_<size>_tuning.json`, checkpoints of rows that were cut off in `.unfinished/`.
        overrides: settings that replace the settings of all rows.
        only: run only rows whose label contains one of these; all when empty.
        page: Markdown page whose section on this experiment is replaced, or None.

    Returns:
        The finished rows, in order.

    Raises:
        ValueError: an override that no row has or of another type, a label that no row has, or a damaged file of rows.
    """
    overrides = overrides or {}
    seeds = experiment.default_seeds(size) if seeds is None else seeds
    chosen = chosen_rows(experiment.rows(size), overrides, only)
    wanted = [{**row, "seed": seed} for seed in seeds for row in chosen]
    path = rows_path(experiment, size, output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    rows = found_rows(_run_wanted(experiment, size, wanted, path, overrides, workers or Workers()), wanted)
    if not rows:
        print("No row is finished yet; other processes run them, or the time is over.")
        return rows
    report = report_path(experiment, size, output_dir)
    table, picture = write_report(experiment, rows, report), report.with_suffix(".png")
    if page is not None:
        link = Path(os.path.relpath(picture, page.parent)).as_posix()
        command = command_line(experiment, size, seeds, only, overrides)
        update_section(page, f"{experiment.name} {size}", section(experiment, size, rows, link, command))
    saved = f"Saved {path}, {report} and {picture.name}" + (f" and the section of {page}" if page else "")
    print(f"\n{table}\n{saved}")
    if len(rows) < len(wanted):
        print(f"{len(wanted) - len(rows)} of {len(wanted)} rows are left; to continue, rerun the same command.")
    return rows


def _run_wanted(
    experiment: Experiment,
    size: str,
    wanted: Sequence[Settings],
    path: Path,
    overrides: dict[str, Any],
    workers: Workers,
) -> list[Settings]:
    """Run the missing rows, each with the best of its candidates, and return all rows of the file."""
    stored = read_rows(path)
    missing = [settings for settings in wanted if find_row(stored, settings) is None]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} rows are done; {len(missing)} to run.", flush=True)
    compared = [tuning_rows(experiment, size, row, overrides) for row in missing]
    trials = list({row_key(row): row for rows in compared for row in rows}.values())
    finished = _run_missing(experiment, trials, tuning_path(path), workers, "candidate ")
    rates = [[find_row(finished, row) for row in rows] for rows in compared]
    ready = [tuned(experiment, *pair) for pair in zip(missing, rates, strict=True) if None not in pair[1]]
    return _run_missing(experiment, ready, path, workers)


def _run_missing(
    experiment: Experiment, rows: Sequence[Settings], path: Path, workers: Workers, kind: str = ""
) -> list[Settings]:
    """Run the rows that the file has not, add each to it, and return all of its rows."""
    stored = read_rows(path)
    missing = [row for row in rows if find_row(stored, row) is None]
    unfinished = path.parent / UNFINISHED / path.stem
    unfinished.mkdir(parents=True, exist_ok=True)
    done = 0
    for settings, results in _run_all(experiment, missing, path, workers):
        done += 1
        name = f"{kind}[{done}/{len(missing)}] {experiment.row_name(settings)}, seed {settings['seed']}"
        if results is None:
            print(f"{name}: another process has it", flush=True)
            continue
        stored = add_row({**settings, **results}, path, unfinished / "rows.lock")
        left = [row for row in rows if find_row(stored, row) is None]
        # Stored rows with other settings, such as another size's, say nothing about these.
        finished = found_rows(stored, rows)
        rest = f"; about {in_words(estimate(experiment, left, finished) / workers.processes)} left" if left else ""
        value = results["value"]
        parts = [f"{key} {each:.3f}" for key, each in value.items()] if isinstance(value, dict) else [f"{value:.4f}"]
        print(f"{name}: {', '.join(parts)} {experiment.metric}, {results['seconds']} s{rest}", flush=True)
    _remove_empty(unfinished)
    return read_rows(path)


def _remove_empty(folder: Path) -> None:
    """Remove the folder of an experiment and the one around it, unless rows of theirs are unfinished."""
    if {entry.name for entry in folder.iterdir()} <= {"rows.lock"}:
        (folder / "rows.lock").unlink(missing_ok=True)
        for each in (folder, folder.parent):
            if not any(each.iterdir()):
                each.rmdir()


def chosen_rows(rows: list[Settings], overrides: dict[str, Any], only: Sequence[str]) -> list[Settings]:
    """The rows whose label contains one of `only`, with settings replaced.

    Raises:
        ValueError: an override that no row has or of another type, or a label that no row has.
    """
    for key, value in overrides.items():
        known = [row[key] for row in rows if key in row]
        if not known:
            keys = sorted({key for row in rows for key in row} - {"label"})
            raise ValueError(f"--override has {key!r}; the rows' settings are {', '.join(keys)}.")
        # An integer may stand for a fraction.
        if not any(type(value) is type(other) or (type(value), type(other)) == (int, float) for other in known):
            raise ValueError(f"--override has {key}={value!r}; it must be of the type of {known[0]!r}.")
    for part in only:
        if not any(part in row["label"] for row in rows):
            raise ValueError(f"--only has {part!r}; the rows are {', '.join(row['label'] for row in rows)}.")
    rows = [row for row in rows if not only or any(part in row["label"] for part in only)]
    rows = [{key: overrides.get(key, value) for key, value in row.items()} for row in rows]
    # Overrides may have made rows equal.
    return [row for number, row in enumerate(rows) if row not in rows[:number]]


def _run_all(
    experiment: Experiment, missing: list[Settings], path: Path, workers: Workers
) -> Iterator[tuple[Settings, dict[str, Any] | None]]:
    """(settings, results) of every row as it finishes; see [`run_row`]."""
    if workers.processes == 1:
        for settings in missing:
            if workers.is_over():
                return
            yield settings, run_row(experiment, settings, path, workers.threads)
        return
    threads = workers.threads or max((os.cpu_count() or 1) // workers.processes, 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers.processes, context, workers.prepare) as pool:
        running: dict[Future, Settings] = {
            pool.submit(run_row, experiment, row, path, threads): row for row in missing
        }
        try:
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
                if workers.is_over():
                    running = {future: row for future, row in running.items() if not future.cancel()}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def run_row(experiment: Experiment, settings: Settings, path: Path, threads: int | None) -> dict[str, Any] | None:
    """Run one row, from its last checkpoint if it was cut off.

    Args:
        path: file of the rows, in which another process may have put this one.
        threads: CPU threads of this process; None leaves them unchanged.

    Returns:
        What the experiment measured, `core_seconds`, the processor time of all threads since the row was last begun,
        and the `commit` of the code; None if another process runs the row or has finished it.
    """
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    name = f"{experiment.row_name(settings)}, seed {settings['seed']}"
    with row_checkpoints(path.parent / UNFINISHED / path.stem / row_key(settings), name) as is_ours:
        if not is_ours or find_row(read_rows(path), settings) is not None:
            return None
        begin = time.process_time()
        with redirect_stdout(io.StringIO()):  # hide the Trainer's logs; the caller prints one line per row
            results = experiment.run(settings)
        return {**results, "core_seconds": round(time.process_time() - begin, 2), "commit": current_commit()}


@cache
def current_commit() -> str | None:
    """The clone's commit, with "-dirty" after it if code was changed; None outside of a clone or without git."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", ":/*.py", ":/*.c", ":/*.h")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
