"""The page and the plots of `gpu_report.py`, from the rows that its parts have written."""

from pathlib import Path

import benchmarking as bench

TITLES = {
    "environment": "Environment",
    "tests": "Tests that use the GPU",
    "scan": "The scan against its peers",
    "training": "Training",
    "profile": "Where a training step spends its time",
    "generation": "Generation",
    "rtrl": "Real-time recurrent learning",
    "smt": "A step of Supervised Memory Training",
    "memory": "Peak memory, counted and measured",
}
NOTES = {
    "scan": "The bound is the time of the passes over memory, three forward and eight with backward, at the bandwidth "
    "of a large copy in the same process.",
    "training": "Forward, backward and AdamW. The limit is six operations per parameter and byte at the rate of a "
    "large matrix product in the same process; the plot shows the highest of each group.",
    "profile": "Operations by time on the device, as a share of all of it.",
    "generation": "Bytes per second of all streams; the limit is one pass over the weights, or their products; "
    "the plot shows the highest of each group.",
    "rtrl": "A step with sensitivities against one of BPTT; the bound is reading and writing all sensitivities once.",
    "smt": "One timestep of each sequence against plain modules with the same products.",
    "memory": "What `hf-recurrent plan` counts against the largest memory that torch allocated in a step.",
}
# Part → columns of the group, the bar and its height, the limit of the group, and the words at the axis.
PLOTS = {
    "scan": (("shape", "dtype"), "backend", "elements/s", "limit elements/s", "elements per second"),
    "training": (("size", "precision"), "model and way", "bytes/s", "limit bytes/s", "bytes per second"),
    "generation": (("size", "streams"), "model", "bytes/s", "limit bytes/s", "bytes per second"),
}


def write(folder: Path, results: list[dict], rehearse: bool) -> None:
    """Write report.md and the plots."""
    title = "# A GPU in ten minutes"
    if rehearse:
        title += "\n\n**A rehearsal at tiny sizes on a CPU. The numbers say nothing about speed.**"
    sections = [title, _overview(results)]
    for result in results:
        name = result["part"]
        lines = [f"## {TITLES.get(name, name)}", *filter(None, [NOTES.get(name)])]
        if result["outcome"] != "done":
            lines.append(f"*{result['outcome'].capitalize()}{_reason(result)}*")
        if result["rows"]:
            lines.append(table(in_groups(name, result["rows"])))
        if draw(folder / f"{name}.png", name, result["rows"]):
            lines.append(f"![{name}]({name}.png)")
        sections.append("\n\n".join(lines))
    (folder / "report.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def _overview(results: list[dict]) -> str:
    rows = [
        {"part": it["part"], "outcome": it["outcome"], "seconds": it["seconds"], "rows": len(it["rows"])}
        for it in results
    ]
    return table(rows)


def _reason(result: dict) -> str:
    return f": {result['error']}" if result.get("error") else "."


def table(rows: list[dict]) -> str:
    """Rows as a Markdown table with the columns of all of them."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return bench.markdown_table(columns, [[cell(row.get(column)) for column in columns] for row in rows])


def cell(value: object) -> str:
    """A value as text: four digits of a number, without the characters that end a cell."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "/").replace("\n", " ")


def in_groups(name: str, rows: list[dict]) -> list[dict]:
    """The rows of a part with those of one group of its plot together: they are measured in another order."""
    columns = PLOTS[name][0] if name in PLOTS else ()
    keys = [tuple(row.get(column) for column in columns) for row in rows]
    order = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    return [row for _, row in sorted(zip(keys, rows, strict=True), key=lambda pair: order[pair[0]])]


def draw(path: Path, name: str, rows: list[dict]) -> bool:
    """Draw the plot of a part, if it has one, its rows have numbers, and matplotlib is installed."""
    if name not in PLOTS:
        return False
    groups, bar, height, limit, words = PLOTS[name]
    rates: dict[str, dict[str, float]] = {}
    limits: dict[str, float] = {}
    for row in rows:
        if row.get(height):
            group = "\n".join(str(row[column]) for column in groups)
            rates.setdefault(group, {})[row[bar]] = row[height]
            limits[group] = max(limits.get(group, 0), row[limit])
    if not rates:
        return False
    try:
        bench.save_bars(path, TITLES[name], rates, limits, words)
    except ImportError:
        return False
    return True
