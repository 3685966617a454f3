"""Run the missing rows of an experiment, several at a time, and save each as it finishes."""

import io
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from hf_recurrent.reproduce.engine.experiment import Experiment, Settings
from hf_recurrent.reproduce.engine.report import command_line, markdown_table, plot, section, update_section
from hf_recurrent.reproduce.engine.rows_file import find_row, read_rows, write_rows, write_text


def reproduce(
    experiment: Experiment,
    size: str,
    seeds: Sequence[int],
    output_dir: Path,
    *,
    overrides: dict[str, Any] | None = None,
    only: Sequence[str] = (),
    processes: int = 1,
    threads: int | None = None,
    prepare: Callable[[], None] | None = None,
    page: Path | None = None,
) -> list[Settings]:
    """Run the missing rows, then write table, plot and the section of the page.

    Args:
        experiment: the experiment to run.
        size: "small" or "paper".
        seeds: each row runs once per seed.
        output_dir: directory of `<name>_<size>.json`, `.md` and `.png`.
        overrides: settings that replace those of all rows.
        only: run only rows whose label contains one of these; all when empty.
        processes: rows that run side by side.
        threads: CPU threads of each; by default its share of the cores, or as they are for one process.
        prepare: called in each of these processes before its first row.
        page: Markdown page whose section on this experiment is replaced, or None.

    Returns:
        The finished rows, in order.

    Raises:
        ValueError: an override that no row has or of another type, a label that no row has, or a damaged file of rows.
    """
    overrides = overrides or {}
    wanted = [{**row, "seed": seed} for seed in seeds for row in _chosen(experiment.rows(size), overrides, only)]
    base = output_dir / f"{experiment.name.replace('-', '_')}_{size}"
    output_dir.mkdir(parents=True, exist_ok=True)
    stored = read_rows(base.with_suffix(".json"))
    missing = [settings for settings in wanted if find_row(stored, settings) is None]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} rows are done; {len(missing)} to run.", flush=True)
    for number, (settings, results) in enumerate(_run_all(experiment, missing, processes, threads, prepare), 1):
        stored.append({**settings, **results})
        write_rows(stored, base.with_suffix(".json"))
        row = f"{experiment.row_name(settings)}, seed {settings['seed']}"
        measured = f"{_short(results['value'])} {experiment.metric}"
        print(f"[{number}/{len(missing)}] {row}: {measured}, {results['seconds']} s", flush=True)
    rows = [row for settings in wanted if (row := find_row(stored, settings)) is not None]
    table = markdown_table(experiment, rows)
    write_text(table, base.with_suffix(".md"))
    plot(experiment, rows, base.with_suffix(".png"))
    if page is not None:
        picture = Path(os.path.relpath(base.with_suffix(".png"), page.parent)).as_posix()
        command = command_line(experiment, size, seeds, only, overrides)
        update_section(page, f"{experiment.name} {size}", section(experiment, size, rows, picture, command))
    print(f"\n{table}\nSaved {base}.json, .md and .png" + (f" and the section of {page}" if page else ""))
    return rows


def _chosen(rows: list[Settings], overrides: dict[str, Any], only: Sequence[str]) -> list[Settings]:
    for key, value in overrides.items():
        known = [row[key] for row in rows if key in row]
        if not known:
            keys = sorted({key for row in rows for key in row} - {"label"})
            raise ValueError(f"--override has {key!r}; the rows' settings are {', '.join(keys)}.")
        if not any(_has_type_of(value, other) for other in known):
            raise ValueError(f"--override has {key}={value!r}; it must be of the type of {known[0]!r}.")
    for part in only:
        if not any(part in row["label"] for row in rows):
            raise ValueError(f"--only has {part!r}; the rows are {', '.join(row['label'] for row in rows)}.")
    rows = [row for row in rows if not only or any(part in row["label"] for part in only)]
    rows = [{key: overrides.get(key, value) for key, value in row.items()} for row in rows]
    # Overrides may have made rows equal.
    return [row for number, row in enumerate(rows) if row not in rows[:number]]


def _has_type_of(value: Any, other: Any) -> bool:
    """True if both are of one type, or `value` is an integer and `other` a fraction."""
    return type(value) is type(other) or (type(value) is int and type(other) is float)


def _run_all(
    experiment: Experiment,
    missing: list[Settings],
    processes: int,
    threads: int | None,
    prepare: Callable[[], None] | None,
) -> Iterator[tuple[Settings, dict[str, Any]]]:
    """(settings, results) of every row as it finishes."""
    if processes == 1:
        for settings in missing:
            yield settings, run_row(experiment, settings, threads)
        return
    threads = threads or max((os.cpu_count() or 1) // processes, 1)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), prepare) as pool:
        running: dict[Future, Settings] = {pool.submit(run_row, experiment, row, threads): row for row in missing}
        try:
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def run_row(experiment: Experiment, settings: Settings, threads: int | None) -> dict[str, Any]:
    """Run one row.

    Args:
        threads: CPU threads of this process; None leaves them unchanged.
    """
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    with redirect_stdout(io.StringIO()):  # hide the Trainer's logs; the caller prints one line per row
        return experiment.run(settings)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{place} {number:.3f}" for place, number in value.items())
    return f"{value:.4f}"
