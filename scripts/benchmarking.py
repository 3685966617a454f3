"""Shared by the benchmark scripts: clocks, limits of the machine, tables and plots of rows × models."""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hf_recurrent.plotting import require_pyplot

# Order of the lines in tables: our models, then the stock models of the same row.
FAMILIES = ("memora", "hawk", "llama", "mamba2")


def clock(device: torch.device) -> float:
    """Seconds: with one CPU thread its CPU time, which other jobs do not lengthen, else elapsed time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()


def best_seconds(function: Callable[[], object], repetitions: int, device: torch.device) -> float:
    """The shortest of several runs, after one warm-up run."""
    return min(seconds_in_turns({"": function}, repetitions, device)[""])


def seconds_in_turns(
    steps: dict[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each step in each round, the steps in turns, after one warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            begin = clock(device)
            step()
            times[name].append(clock(device) - begin)
    return {name: values[1:] for name, values in times.items()}


def read_bandwidth(device: torch.device, repetitions: int = 3, size: int = 1 << 28) -> float:
    """Read bandwidth in bytes per second, by the sum of a tensor of `size` bytes."""
    numbers = torch.ones(size // 4, device=device)
    return size / best_seconds(numbers.sum, repetitions, device)


def matrix_rate(
    device: torch.device, repetitions: int = 3, size: int = 1024, dtype: torch.dtype = torch.float32
) -> float:
    """Floating-point operations per second of a matrix product (float32 products in TF32 where torch allows it)."""
    left, right = torch.randn(2, size, size, device=device, dtype=dtype)
    return 2 * size**3 / best_seconds(lambda: left @ right, repetitions, device)


def kept_bytes(loss: Callable[[], torch.Tensor]) -> int:
    """Bytes of the tensors that a forward pass keeps for the backward pass, without parameters."""
    storages = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        source = tensor if tensor._base is None else tensor._base
        if not (source.is_leaf and source.requires_grad):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = loss()  # alive, so that no storage is reused
    del kept
    return sum(storages.values())


def conditions(device: torch.device, threads: Sequence[int] | None = None) -> str:
    """Device, threads, torch version and load, for the title of a table.

    Args:
        threads: CPU threads, if the table has several numbers of them; by default those in use.
    """
    counts = " and ".join(map(str, threads or [torch.get_num_threads()]))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {counts} thread(s)"
    load = f", load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs" if hasattr(os, "getloadavg") else ""
    return f"{where}, torch {torch.__version__}{load}"


def markdown_row(cells: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def markdown_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(map(markdown_row, [columns, ["---"] * len(columns), *lines]))


def add_shared_options(parser: argparse.ArgumentParser, *, rows: Sequence[str], streams: int, rounds: int) -> None:
    """Add the options for models, streams, rounds, threads, device and output; the values are the defaults."""
    shown = " ".join(rows)
    parser.add_argument("--rows", nargs="+", default=list(rows), help=f"model sizes (default {shown})")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--streams", type=int, default=streams, help=f"B (default {streams})")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"the best one counts (default {rounds})")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--output", type=Path, help="also write OUTPUT.md and OUTPUT.png")


def report(
    title: str,
    columns: Sequence[str],
    rows: dict[str, tuple[list[list[str]], dict[str, float], float]],
    path: Path | None,
) -> None:
    """Print the table of all rows; with a path, save table and plot.

    Args:
        rows: row → lines of the table, bytes per second of each model, and the limit.
        path: without a suffix.
    """
    table = markdown_table(columns, [line for lines, _, _ in rows.values() for line in lines])
    print(f"{title}\n\n{table}")
    if path is not None:
        rates, limits = ({row: measured[part] for row, measured in rows.items()} for part in (1, 2))
        save_report(path, title, table, rates, limits)


def save_report(
    path: Path,
    title: str,
    table: str,
    rates: dict[str, dict[str, float]],
    limits: dict[str, float],
    rate: str = "bytes per second",
) -> None:
    """Save title and table as Markdown, and the plot of [`save_bars`].

    Args:
        path: without a suffix.
    """
    save_tables(path, title, table)
    save_bars(path.with_suffix(".png"), rates, limits, title.partition(";")[0], rate)


def save_tables(path: Path, title: str, *tables: str) -> None:
    """Save title and tables as Markdown.

    Args:
        path: without a suffix; its directory is created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text("\n\n".join((title, *tables)) + "\n", encoding="utf-8")


def save_bars(path: Path, rows: dict[str, dict[str, float]], limits: dict[str, float], title: str, rate: str) -> None:
    """Save a plot with one group of bars per row, row → model → rate, and the row's limit as a line.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = require_pyplot()
    names = list(dict.fromkeys(name for models in rows.values() for name in models))
    figure, axes = pyplot.subplots(figsize=(2 + 2.2 * len(rows), 4), layout="constrained")
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        found = [(group, models[name]) for group, models in enumerate(rows.values()) if name in models]
        axes.bar([group + place * width for group, _ in found], [value for _, value in found], width, label=name)
    for group, row in enumerate(rows):
        label = "limit" if group == 0 else None
        axes.hlines(limits[row], group - width / 2, group + 0.8 - width / 2, colors="black", label=label)
    axes.set_xticks([group + 0.4 - width / 2 for group in range(len(rows))], list(rows))
    axes.set_yscale("log")
    axes.set_ylabel(rate)
    axes.set_title(title)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
