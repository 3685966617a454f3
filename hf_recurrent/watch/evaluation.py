"""Logs with labels of their lines or sessions, their scores, and measures of scores against labels.

Scores are higher for less usual lines; labels are true for anomalous ones. Undefined measures are NaN: the AUROC
without a normal or without an anomalous line, for example.
"""

import csv
import io
import math
import re
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hf_recurrent.data.decompression import read_chunks
from hf_recurrent.watch.log_records import decode_records
from hf_recurrent.watch.watched_log import WatchSettings

_NORMAL = (b"0", b"-")
_SESSION_COLUMNS = ("session", "anomalous")


class LabelledLog(NamedTuple):
    """Lines without their ends, and a label of each line, or of each session by its id as written in the lines."""

    lines: Sequence[bytes]
    line_labels: Sequence[bool] | None = None
    session_labels: dict[str, bool] | None = None


@dataclass(frozen=True)
class SessionLog:
    """Lines and their sessions. A session is a number, an index of `names`; they are in the order of their last lines.

    `members` has the sessions of each line, usually none or one, and `ends` the index of each session's last line.
    """

    lines: Sequence[bytes]
    names: Sequence[str]
    members: Sequence[Sequence[int]]
    ends: Sequence[int]

    def events(self) -> Iterator[tuple[int, bytes, Sequence[int]]]:
        """Index, text and sessions of every line that has any."""
        return ((i, self.lines[i], sessions) for i, sessions in enumerate(self.members) if sessions)


def read_labelled_log(lines_file: Path, labels_file: Path | None, label_column: int | None = None) -> LabelledLog:
    """Read a log and its labels; both may be compressed with gzip or Zstandard.

    Args:
        labels_file: one label per line, of which 0 and - mean normal and all others anomalous; or CSV with the columns
            session and anomalous.
        label_column: in place of `labels_file`, the word of a line that is its label, from 1. It is removed.
    """
    lines = _read_lines(lines_file)
    if not lines:
        raise ValueError(f"`LINES` is {str(lines_file)!r}, which is empty; there is nothing to evaluate.")
    if label_column is not None:
        log = _without_labels(lines_file, lines, label_column)
    elif labels_file is None:
        raise ValueError("`LABELS` is missing; name a file of labels, or the column of LINES with --label_column.")
    else:
        rows = _read_lines(labels_file)
        header = rows[0].decode("utf-8", "replace").removeprefix("\ufeff").split(",") if rows else []
        if set(_SESSION_COLUMNS) <= {name.strip() for name in header}:
            log = LabelledLog(lines, session_labels=_session_labels(labels_file, rows))
        else:
            log = LabelledLog(lines, _line_labels(labels_file, rows, len(lines)))
    labels = [*log.line_labels] if log.session_labels is None else [*log.session_labels.values()]
    if len({*labels}) < 2:
        kind = "anomalous" if any(labels) else "normal"
        raise ValueError(f"`LABELS` says that everything is {kind}; both kinds are needed.")
    return log


def find_sessions(lines: Sequence[bytes], ids: Collection[str]) -> SessionLog:
    """The sessions of every line, by their ids, which are found where they stand between characters that no id has."""
    known = {name.encode("utf-8", "surrogateescape") for name in ids}
    # A word is a run of characters that ids contain; punctuation at its ends may belong to the sentence.
    others = bytes(sorted({byte for name in known for byte in name if byte < 128}))
    words = re.compile(rb"[A-Za-z0-9\x80-\xff" + re.escape(others) + rb"]+")

    def find(line: bytes) -> list[bytes]:
        found = [word if word in known else word.strip(b".,:;-/()[]'\"") for word in words.findall(line)]
        return [*dict.fromkeys(word for word in found if word in known)]

    found = [find(line) for line in lines]
    ends = {name: index for index, names in enumerate(found) for name in names}
    ordered = sorted(ends, key=ends.__getitem__)
    numbers = {name: number for number, name in enumerate(ordered)}
    return SessionLog(
        lines,
        [name.decode("utf-8", "surrogateescape") for name in ordered],
        [[numbers[name] for name in names] for names in found],
        [ends[name] for name in ordered],
    )


def _read_lines(path: Path) -> list[bytes]:
    lines = b"".join(read_chunks(path)).split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix(b"\r") for line in lines]


def _without_labels(path: Path, lines: Sequence[bytes], column: int) -> LabelledLog:
    before = rb"\s*" + rb"(?:\S+\s+){%d}" % (column - 1)
    expression = re.compile(rb"(" + before + rb")(\S+)(?:\s|$)")
    texts, labels = [], []
    for number, line in enumerate(lines, start=1):
        match = expression.match(line)
        if match is None:
            raise ValueError(f"`--label_column` is {column}, but line {number} of {path} has fewer words.")
        texts.append(match[1] + line[match.end() :])
        labels.append(match[2] not in _NORMAL)
    return LabelledLog(texts, labels)


def _line_labels(path: Path, rows: Sequence[bytes], count: int) -> list[bool]:
    words = [row.strip() for row in rows]
    if len(words) != count:
        raise ValueError(
            f"`LABELS` is {str(path)!r} with {len(words):,} labels, but there are {count:,} lines; it must have one "
            "label per line, or be CSV with the header session,anomalous."
        )
    if b"" in words:
        raise ValueError(f"`LABELS` has no label in line {words.index(b'') + 1} of {path}; use 0 or - for normal.")
    return [word not in _NORMAL for word in words]


def _session_labels(path: Path, rows: Sequence[bytes]) -> dict[str, bool]:
    text = b"\n".join(rows).decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    labels: dict[str, bool] = {}
    for number, row in enumerate(csv.DictReader(io.StringIO(text), skipinitialspace=True), start=2):
        name, label = ((row[column] or "").strip() for column in _SESSION_COLUMNS)
        if not name or not label:
            raise ValueError(f"`LABELS` has no session or no label in line {number} of {path}.")
        if name in labels:
            raise ValueError(f"`LABELS` has session {name!r} twice, again in line {number} of {path}.")
        labels[name] = label.encode("utf-8", "surrogateescape") not in _NORMAL
    return labels


class EngineResult(NamedTuple):
    """Scores and alarms of the lines of a log, scores of its sessions, if there are any, and the time of reading."""

    line_scores: list[float]
    line_flags: list[bool]
    sessions: dict[str, float]
    seconds: float


def run_engine(lines: Sequence[bytes], settings: WatchSettings | None = None) -> EngineResult:
    """Read the lines in order, once, as `hf-recurrent watch` does; of several records in a line the highest counts."""
    settings = settings or WatchSettings()
    judge, scores, flags = settings.new_judge(), [], []
    begin = time.perf_counter()
    for line in lines:
        records = decode_records(line, settings.format) or ((line, None),)
        reports = [judge.judge(text, when) for text, when in records]
        scores.append(max((report.score for report in reports), default=0.0))
        flags.append(any(report.is_unusual for report in reports))
    judge.tracker.finish()
    seconds = time.perf_counter() - begin
    sessions = {ended.name.decode("utf-8", "surrogateescape"): ended.score for ended in judge.tracker.ended}
    return EngineResult(scores, flags, sessions, seconds)


def auroc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Probability that an anomalous line has a higher score than a normal one; equal scores count half."""
    values, marks = np.asarray(scores, dtype=float), np.asarray(labels, dtype=bool)
    normal, anomalous = np.sort(values[~marks]), values[marks]
    if not len(normal) or not len(anomalous):
        return math.nan
    ranks = np.searchsorted(normal, anomalous, "left") + np.searchsorted(normal, anomalous, "right")
    return float(ranks.mean() / 2 / len(normal))


def average_precision(scores: ArrayLike, labels: ArrayLike) -> float:
    """Mean precision over the anomalous lines, each at the threshold that just includes it."""
    values, marks = np.asarray(scores, dtype=float), np.asarray(labels, dtype=bool)
    if not marks.any():
        return math.nan
    order = np.argsort(-values, kind="stable")
    values, found = values[order], np.cumsum(marks[order])
    last = np.append(values[1:] != values[:-1], True)  # of lines with equal scores
    ranks = np.flatnonzero(last) + 1
    found = found[last]
    return float(np.sum(np.diff(found, prepend=0) * found / ranks) / found[-1])


def precision_at(scores: ArrayLike, labels: ArrayLike, budget: int) -> float:
    """Share of anomalous lines among the `budget` highest scores; of equal ones, the first."""
    values, marks = np.asarray(scores, dtype=float), np.asarray(labels, dtype=bool)
    chosen = marks[np.argsort(-values, kind="stable")[:budget]]
    return float(chosen.mean()) if len(chosen) else math.nan
