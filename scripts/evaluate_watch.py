"""Area under the ROC curve of `hf-recurrent watch` on logs with injected anomalies, beside simple peers.

    python scripts/evaluate_watch.py LOGHUB --logs OpenSSH Spark Zookeeper

LOGHUB is a folder with `NAME_2k.log` of github.com/logpai/loghub. `inject_anomalies.py` defines the anomalies. Nothing
is trained before; all detectors read the lines in order, once. The peers are the ones of `hf-recurrent watch
evaluate`.

A row of numbers is printed for each log and detector, with its lines a second and, if it is installed, Drain3's with
its default settings in the same run. `--clean` measures the share of lines flagged on the log as it is, whose
lines all count as normal.
"""

import argparse
import importlib.util
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from inject_anomalies import HEADER_WORDS, KINDS, QUIET, LabelledLine, inject, read_log

from hf_recurrent.watch.evaluation import auroc, run_engine
from hf_recurrent.watch.peers import LINE_PEERS
from hf_recurrent.watch.watched_log import WatchSettings


def areas(lines: Sequence[LabelledLine], scores: Sequence[float]) -> list[float]:
    found = np.array(scores)[QUIET:]
    kinds = np.array([str(line.kind) for line in lines])[QUIET:]
    normal, result = found[kinds == "None"], []
    for kind in KINDS:
        values = found[kinds == kind]
        labels = np.arange(len(normal) + len(values)) >= len(normal)
        result.append(auroc(np.concatenate([normal, values]), labels))
    return result


def print_row(log: str, seed: int | str, detector: str, values: Sequence[float], speed: float) -> None:
    """A row of the table, with the mean over the six kinds that the log has."""
    numbers = [*values, float(np.nanmean(values))]
    cells = " | ".join("-" if math.isnan(x) else f"{x:.3f}" for x in numbers)
    print(f"| {log} | {seed} | {detector} | {cells} | {speed:,.0f} |", flush=True)


def drain3_speed(lines: Sequence[bytes]) -> float | None:
    """Lines a second of Drain3, which finds templates only."""
    if importlib.util.find_spec("drain3") is None:
        return None
    from drain3 import TemplateMiner

    texts, miner = [line.decode("utf-8", "replace") for line in lines], TemplateMiner()
    begin = time.perf_counter()
    for text in texts:
        miner.add_log_message(text)
    return len(lines) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--logs", nargs="+", choices=[*HEADER_WORDS], default=[*HEADER_WORDS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--rate", type=float, default=0.01, help="stated rate of false alarms")
    parser.add_argument("--clean", action="store_true", help="measure the share of lines flagged without anomalies")
    parser.add_argument("--detectors", nargs="+", choices=("watch", *LINE_PEERS))
    arguments = parser.parse_args()
    if not arguments.clean:
        print("| log | seed | detector |", " | ".join(KINDS), "| mean of six | lines/s |")
        print("|---|---|---|" + "---|" * (len(KINDS) + 2))
    for log in arguments.logs:
        lines = read_log(os.fspath(arguments.folder / f"{log}_2k.log"))
        if arguments.clean:
            flags = run_engine(lines, WatchSettings(arguments.rate)).line_flags
            print(f"{log}: {sum(flags)} of {len(flags)} lines flagged, {np.mean(flags):.2%}", flush=True)
            continue
        for seed in arguments.seeds:
            labelled = inject(lines, HEADER_WORDS[log], seed)
            texts = [line.text for line in labelled]
            if arguments.detectors is None or "watch" in arguments.detectors:
                result = run_engine(texts, WatchSettings(arguments.rate))
                print_row(log, seed, "watch", areas(labelled, result.line_scores), len(texts) / result.seconds)
            for name, peer in LINE_PEERS.items():
                if arguments.detectors is None or name in arguments.detectors:
                    begin = time.perf_counter()
                    scores = list(peer(texts))
                    speed = len(texts) / (time.perf_counter() - begin)
                    print_row(log, seed, name, areas(labelled, scores), speed)
        if speed := drain3_speed(lines):
            print(f"| {log} | | Drain3, templates only |{' |' * (len(KINDS) + 1)} {speed:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
