"""`hf-recurrent watch evaluate LOG LABELS`: measure the scores of the watch, and of simple peers, against labels."""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_recurrent.cli.parsing import CommandParser, add_json_argument, check_at_least, check_parent, command

_COLUMNS = {
    "AUROC": "auroc",
    "average precision": "average_precision",
    "precision at labelled": "precision_at_anomalous",
}


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-recurrent watch evaluate",
        description="Read a log once, from its first line, and compare the scores of lines or\n"
        "sessions with labels. Beside the watch: a byte trigram, an isolation forest and\n"
        "the rarity of templates; for sessions, an order-2 model and counts.",
        epilog="examples:\n"
        "  hf-recurrent watch evaluate app.log labels.txt      # 0 and - are normal\n"
        "  hf-recurrent watch evaluate BGL.log --label_column 1\n"
        "  hf-recurrent watch evaluate hdfs.log.gz sessions.csv\n\n"
        "The last column is the precision among as many highest scores as are labelled.",
    )
    parser.add_argument("lines", type=Path, metavar="LOG", help="the log; may be compressed")
    parser.add_argument("labels", type=Path, nargs="?", metavar="LABELS", help="a label a line, or CSV of sessions")
    column = "word of a line that is its label; it is removed"
    parser.add_argument("--label_column", type=int, metavar="N", help=column)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results to this JSON file")
    add_json_argument(parser)
    return parser


def _evaluate(arguments: argparse.Namespace) -> None:
    from hf_recurrent.watch.evaluation import find_sessions, read_labelled_log, run_engine
    from hf_recurrent.watch.peers import LINE_PEERS, SESSION_PEERS

    check_at_least(1, arguments, "label_column")
    check_parent("--output", arguments.output)
    log = read_labelled_log(arguments.lines, arguments.labels, arguments.label_column)
    result, names = run_engine(log.lines), [*(log.session_labels or ())]
    if log.session_labels is None:
        labels, scores, peers, read = log.line_labels, result.line_scores, LINE_PEERS, log.lines
    else:
        labels, scores = [*log.session_labels.values()], [result.sessions.get(name, 0.0) for name in names]
        peers, read = SESSION_PEERS, find_sessions(log.lines, names)
    rows = [_row("watch", scores, labels, result.seconds)]
    if names:
        rows[0]["sessions_found"] = sum(name in result.sessions for name in names) / len(names)
    for detector, peer in peers.items():
        begin = time.perf_counter()
        try:
            scores = list(peer(read))
        except ImportError as error:
            print(f"Without {detector} ({error}): pip install 'hf-recurrent[peers]'.", file=sys.stderr)
            continue
        seconds = time.perf_counter() - begin
        if log.session_labels is not None:
            found = dict(zip(read.names, scores, strict=True))
            scores = [found.get(name, 0.0) for name in names]
        rows.append(_row(detector, scores, labels, seconds))
    for row in rows:
        row["lines_per_second"] = round(len(log.lines) / max(row.pop("seconds"), 1e-9))
    text = json.dumps(rows, indent=1, default=float).replace("NaN", "null")
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    if arguments.json:
        print(text)
    else:
        _print(rows, "sessions" if names else "lines")


def _row(name: str, scores: Sequence[float], labels: Sequence[bool], seconds: float) -> dict[str, Any]:
    from hf_recurrent.watch.evaluation import auroc, average_precision, precision_at

    anomalous = sum(labels)
    values = auroc(scores, labels), average_precision(scores, labels), precision_at(scores, labels, anomalous)
    sizes = {"detector": name, "count": len(labels), "anomalous": anomalous}
    return sizes | dict(zip(_COLUMNS.values(), values, strict=True)) | {"seconds": seconds}


def _print(rows: Sequence[dict[str, Any]], unit: str) -> None:
    first = rows[0]
    print(f"{first['count']:,} {unit}, {first['anomalous']:,} of them labelled")
    if "sessions_found" in first:
        print(f"{first['sessions_found']:.1%} of the sessions were found in the lines")
    table = [["detector", *_COLUMNS, "lines/s"]]
    for row in rows:
        values = ("-" if math.isnan(row[name]) else f"{row[name]:.3f}" for name in _COLUMNS.values())
        table.append([row["detector"], *values, f"{row['lines_per_second']:,}"])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


main = command(build_parser, _evaluate)
