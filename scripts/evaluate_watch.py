"""Area under the ROC curve of `hf-recurrent watch` on logs with injected anomalies, next to two peers.

    python scripts/evaluate_watch.py LOGHUB --logs OpenSSH Spark Zookeeper

LOGHUB is a folder with `NAME_2k.log` of github.com/logpai/loghub. `inject_anomalies.py` defines the anomalies. Nothing
is trained before; all three read the lines in order, once. The peers, which need `pip install nltk scikit-learn`:

* a trigram model of bytes with Witten-Bell smoothing (`nltk.lm`), updated after every line: bits per byte;
* an isolation forest (`sklearn.ensemble`) on hashed 3-grams of the characters of a line, fitted anew every 100 lines
  to all lines before.

A row of numbers is printed for each log, kind and detector; `--clean` measures the share of lines flagged on the log
as it is, whose lines all count as normal.
"""

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from inject_anomalies import HEADER_WORDS, KINDS, QUIET, LabelledLine, inject, read_log

_REFIT_LINES = 100


def watch_scores(lines: Sequence[bytes], rate: float) -> Iterator[tuple[float, bool]]:
    """Score of each line, and whether it was flagged, with the defaults of the command."""
    from transformers import AutoModelForCausalLM, set_seed

    from hf_recurrent import OnlineLearner, config_from_preset
    from hf_recurrent.cli.watch import DEFAULT_MODEL, LEARNING_RATE, STRIDE
    from hf_recurrent.watch.log_watcher import LogWatcher, WatchSettings

    set_seed(0)
    model = AutoModelForCausalLM.from_config(config_from_preset(DEFAULT_MODEL))
    learner = OnlineLearner(model, rule="rtrl", stride=STRIDE, learning_rate=LEARNING_RATE, binary=True)
    watcher = LogWatcher(learner, WatchSettings(rate))
    for line in lines:
        report = watcher.read(line)
        yield report.score, report.is_unusual


def trigram_scores(lines: Sequence[bytes]) -> Iterator[float]:
    """Bits per byte of a trigram model."""
    from nltk.lm import Vocabulary, WittenBellInterpolated
    from nltk.util import everygrams, pad_sequence

    symbols = [chr(byte) for byte in range(256)]
    model = WittenBellInterpolated(3, vocabulary=Vocabulary([*symbols, "<s>"], unk_cutoff=1))
    model.fit([[(symbol,) for symbol in symbols]])
    for line in lines:
        padded = list(pad_sequence(line.decode("latin-1") + "\n", 3, pad_left=True, left_pad_symbol="<s>"))
        bits = [-math.log2(max(model.score(padded[i], padded[i - 2 : i]), 1e-9)) for i in range(2, len(padded))]
        yield sum(bits) / len(bits)
        model.fit([list(everygrams(padded, max_len=3))])


def forest_scores(lines: Sequence[bytes]) -> Iterator[float]:
    """Anomaly scores of an isolation forest."""
    from sklearn.ensemble import IsolationForest
    from sklearn.feature_extraction.text import HashingVectorizer

    vectorizer = HashingVectorizer(n_features=512, analyzer="char", ngram_range=(3, 3), alternate_sign=False)
    vectors = vectorizer.transform([line.decode("latin-1") for line in lines])
    for begin in range(0, len(lines), _REFIT_LINES):
        end = min(begin + _REFIT_LINES, len(lines))
        if begin:
            forest = IsolationForest(n_estimators=100, random_state=0).fit(vectors[:begin])
            yield from (-forest.score_samples(vectors[begin:end])).tolist()
        else:
            yield from [0.0] * end


def area(normal: np.ndarray, anomalous: np.ndarray) -> float:
    """The probability that an anomalous line has a higher score than a normal one; equal scores count half."""
    ordered = np.sort(normal)
    places = np.searchsorted(ordered, anomalous, "left") + np.searchsorted(ordered, anomalous, "right")
    return float(places.mean() / 2 / len(ordered)) if len(anomalous) else math.nan


def areas(lines: Sequence[LabelledLine], scores: Sequence[float]) -> list[float]:
    """The area for each kind."""
    found = np.array(scores)[QUIET:]
    kinds = np.array([str(line.kind) for line in lines])[QUIET:]
    return [area(found[kinds == "None"], found[kinds == kind]) for kind in KINDS]


def print_row(log: str, seed: int | str, detector: str, values: Sequence[float]) -> None:
    """A row of the table, with the mean over the kinds that the log has."""
    numbers = [*values, float(np.nanmean(values))]
    print(f"| {log} | {seed} | {detector} |", " | ".join("-" if math.isnan(x) else f"{x:.3f}" for x in numbers), "|")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--logs", nargs="+", choices=[*HEADER_WORDS], default=[*HEADER_WORDS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--lines", type=int, help="only the first lines of each log")
    parser.add_argument("--rate", type=float, default=0.01, help="stated rate of false alarms")
    parser.add_argument("--clean", action="store_true", help="measure the share of lines flagged without anomalies")
    parser.add_argument("--detectors", nargs="+", choices=("watch", "trigram", "forest"))
    arguments = parser.parse_args()
    print("| log | seed | detector |", " | ".join(KINDS), "| mean |")
    print("|---|---|---|" + "---|" * (len(KINDS) + 1))
    for log in arguments.logs:
        lines = read_log(os.fspath(arguments.folder / f"{log}_2k.log"))[: arguments.lines]
        if arguments.clean:
            flagged = [is_flagged for _, is_flagged in watch_scores(lines, arguments.rate)]
            print(f"{log}: {sum(flagged)} of {len(flagged)} lines flagged, {np.mean(flagged):.2%}; ", end="")
            print(f"after line {QUIET}: {np.mean(flagged[QUIET:]):.2%}", flush=True)
            continue
        for seed in arguments.seeds:
            labelled = inject(lines, HEADER_WORDS[log], seed)
            texts = [line.text for line in labelled]
            detectors = {
                "trigram": lambda texts=texts: trigram_scores(texts),
                "forest": lambda texts=texts: forest_scores(texts),
                "watch": lambda texts=texts: (score for score, _ in watch_scores(texts, arguments.rate)),
            }
            for detector in arguments.detectors or detectors:
                print_row(log, seed, detector, areas(labelled, list(detectors[detector]())))


if __name__ == "__main__":
    main()
