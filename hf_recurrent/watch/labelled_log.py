"""Logs with labels of their lines or sessions, as files."""

import csv
import io
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_recurrent.data.decompression import read_chunks

_NORMAL = (b"0", b"-")
_SESSION_COLUMNS = ("session", "anomalous")


@dataclass(frozen=True)
class LabelledLog:
    """Lines, and labels that are true for anomalous lines or sessions. One of the two labels is None.

    Args:
        lines: without their ends.
        line_labels: one per line.
        session_labels: id as written in the lines → label.
    """

    lines: Sequence[bytes]
    line_labels: Sequence[bool] | None = None
    session_labels: dict[str, bool] | None = None

    @property
    def labels(self) -> Collection[bool]:
        return self.line_labels if self.session_labels is None else self.session_labels.values()


@dataclass(frozen=True)
class SessionLog:
    """Lines and their sessions. A session is a number, an index of `names`; they are in the order of their last lines.

    Args:
        lines: without their ends.
        names: ids as written in the lines.
        members: numbers of the sessions of each line, usually none or one.
        ends: index of the last line of each session.
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
        lines_file: one line of the log per line.
        labels_file: one label per line, of which 0 and - mean normal and all others anomalous; or CSV with the columns
            session and anomalous.
        label_column: in place of `labels_file`, the word of a line that is its label, from 1. It is removed.

    Raises:
        ValueError: labels are missing, are not one per line, or are all equal.
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
    if len(set(log.labels)) < 2:
        kind = "anomalous" if any(log.labels) else "normal"
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
