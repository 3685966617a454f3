"""`hf-recurrent watch evaluate LOG LABELS`: measure the scores of the watch, and of simple peers, against labels."""

import argparse
import dataclasses
import importlib.util
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent.cli.parsing import CommandParser, add_json_argument, check_at_least, check_parent, command

if TYPE_CHECKING:
    from hf_recurrent.watch.labelled_log import LabelledLog

_COLUMNS = {
    "AUROC": "auroc",
    "average precision": "average_precision",
    "precision at labelled": "precision_at_anomalous",
    "precision at budget": "precision_at_budget",
    "incidents found": "incidents_found",
    "median delay": "median_delay",
}


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = CommandParser(
        prog="hf-recurrent watch evaluate",
        description="Read a log once, from its first line, and compare the scores of lines or\n"
        "sessions with labels. Beside the watch: a byte trigram, an isolation forest and\n"
        "the rarity of templates; for sessions, an order-2 model and counts.",
        epilog="examples:\n"
        "  hf-recurrent watch evaluate app.log labels.txt      # 0 and - are normal\n"
        "  hf-recurrent watch evaluate BGL.log --label_column 1\n"
        "  hf-recurrent watch evaluate hdfs.log.gz sessions.csv\n\n"
        "Incidents are runs of labelled lines with at most --gap normal ones between.\n"
        "The alarms are the --budget highest scores, by default as many as labels.",
    )
    parser.add_argument("lines", type=Path, metavar="LOG", help="the log; may be compressed")
    parser.add_argument("labels", type=Path, nargs="?", metavar="LABELS", help="a label a line, or CSV of sessions")
    parser.add_argument(
        "--label_column", type=int, metavar="N", help="word of a line that is its label; it is removed"
    )
    parser.add_argument("--budget", type=int, metavar="ALARMS", help="alarms (default: the number of labelled ones)")
    parser.add_argument("--warm_up", type=int, metavar="N", help="lines or sessions that do not count in a second row")
    parser.add_argument("--gap", type=int, default=100, help="normal lines within an incident, at most (default: 100)")
    parser.add_argument(
        "--peers", choices=("all", "none"), default="all", help="measure the peers, too (default: all)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results to this JSON file")
    add_json_argument(parser)
    return parser


def _evaluate(arguments: argparse.Namespace) -> None:
    from hf_recurrent.watch.engine import run_engine
    from hf_recurrent.watch.labelled_log import read_labelled_log

    for least, names in ((1, ("label_column", "budget")), (0, ("warm_up", "gap"))):
        check_at_least(least, arguments, *(name for name in names if getattr(arguments, name) is not None))
    check_parent("--output", arguments.output)
    log = read_labelled_log(arguments.lines, arguments.labels, arguments.label_column)
    result = run_engine(log.lines)
    if log.session_labels is None:
        rows = [_row("watch", result.line_scores, log.line_labels or (), result.seconds, arguments)]
        rows += _line_peers(log, arguments) if arguments.peers == "all" else []
    else:
        names = [*log.session_labels]
        labels = [*log.session_labels.values()]
        scores = [result.sessions.get(name, 0.0) for name in names]
        rows = [_row("watch", scores, labels, result.seconds, arguments)]
        rows[0]["sessions_found"] = sum(name in result.sessions for name in names) / len(names)
        rows += _session_peers(log, arguments) if arguments.peers == "all" else []
    for row in rows:
        row["lines_per_second"] = round(len(log.lines) / max(row.pop("seconds"), 1e-9))
    text = json.dumps(rows, indent=1, default=float).replace("NaN", "null")
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    if arguments.json:
        print(text)
    else:
        _print(rows, "sessions" if log.session_labels else "lines")


def _row(
    name: str, scores: Iterable[float], labels: Sequence[bool], seconds: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    from hf_recurrent.watch.evaluation import measure

    values = list(scores)
    options = {"budget": arguments.budget or sum(labels), "gap": arguments.gap}
    row: dict[str, Any] = {"detector": name, "from": 0, **dataclasses.asdict(measure(values, labels, **options))}
    row["seconds"] = seconds
    warm_up = min(len(values) // 5, 400) if arguments.warm_up is None else arguments.warm_up
    if warm_up:
        row["after_warm_up"] = {
            "from": warm_up,
            **dataclasses.asdict(measure(values, labels, warm_up=warm_up, **options)),
        }
    return row


def _line_peers(log: "LabelledLog", arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from hf_recurrent.watch.peers import LINE_PEERS

    rows = []
    for peer in LINE_PEERS:
        if peer.requires is not None and importlib.util.find_spec(peer.requires) is None:
            print(
                f"Without {peer.name}, which needs {peer.requires}: pip install 'hf-recurrent[peers]'.",
                file=sys.stderr,
            )
            continue
        begin = time.perf_counter()
        scores = list(peer.scores(log.lines, **peer.grid[0]))
        rows.append(_row(peer.name, scores, log.line_labels or (), time.perf_counter() - begin, arguments))
    return rows


def _session_peers(log: "LabelledLog", arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from hf_recurrent.watch.labelled_log import find_sessions
    from hf_recurrent.watch.peers import SESSION_PEERS

    labels = log.session_labels or {}
    sessions, rows = find_sessions(log.lines, labels), []
    for peer in SESSION_PEERS:
        begin = time.perf_counter()
        scores = dict(zip(sessions.names, peer.scores(sessions, **peer.grid[0]), strict=True))
        seconds = time.perf_counter() - begin
        rows.append(
            _row(peer.name, [scores.get(name, 0.0) for name in labels], [*labels.values()], seconds, arguments)
        )
    return rows


def _print(rows: Sequence[dict[str, Any]], unit: str) -> None:
    first = rows[0]
    print(f"{first['count']:,} {unit}, {first['anomalous']:,} of them labelled")
    if unit == "lines":
        print(f"{first['incidents']:,} incidents")
    else:
        print(f"{first['sessions_found']:.1%} of the sessions were found in the lines")
    header = ["detector", "from", *_COLUMNS, "lines/s"]
    table = [header]
    for row in rows:
        for part in (row, row.get("after_warm_up")):
            if part is not None:
                cells = [_shown(part[name]) for name in _COLUMNS.values()]
                speed = f"{row['lines_per_second']:,}" if part is row else ""
                table.append([row["detector"] if part is row else "", f"{part['from']:,}", *cells, speed])
    if unit == "sessions":
        table = [[cell for index, cell in enumerate(cells) if index not in (6, 7)] for cells in table]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def _shown(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


main = command(build_parser, _evaluate)
