"""Simple detectors that an evaluation compares the watch with: they read the same lines in the same order, once.

Each scores a line before it learns from it; higher scores are less usual. Memory grows with the log.
"""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_recurrent.watch.evaluation import auroc
from hf_recurrent.watch.labelled_log import SessionLog

# IP addresses with a port, hexadecimal numbers, and runs of digits.
_VARIABLES = re.compile(rb"/?\d+\.\d+\.\d+\.\d+(?::\d+)?|0x[0-9a-fA-F]+|\b(?=[a-fA-F]*\d)[0-9a-fA-F]{6,}\b|-?\d+")
_DIGIT_WORDS = re.compile(rb"\S*\d\S*")
_WORDS = re.compile(rb"[^\s,;:=()\[\]{}|\"'/]+")
_DIGITS_AS_ZERO = bytes.maketrans(b"123456789", b"000000000")
_SMALLEST_REFIT = 100  # lines


@dataclass(frozen=True)
class Peer:
    """A detector.

    Args:
        name: as tables show it.
        scores: function of lines, or of a `SessionLog`, and settings, to one score per line or session.
        grid: up to four settings to choose from with [`choose_settings`]; the first are the default.
        requires: module that must be installed.
    """

    name: str
    scores: Callable[..., Iterable[float]]
    grid: Sequence[Mapping[str, Any]]
    requires: str | None = None


def template_of(line: bytes, masks_words: bool = False) -> bytes:
    """The line with `*` in place of addresses and numbers, or of every word with a digit."""
    return (_DIGIT_WORDS if masks_words else _VARIABLES).sub(b"*", line)


def trigram_scores(lines: Sequence[bytes], escape: float, masks_digits: bool) -> Iterator[float]:
    """Bits per byte of a trigram model of bytes with Witten-Bell smoothing.

    Args:
        escape: weight of the shorter context; 1 is Witten-Bell's.
        masks_digits: read every digit as 0.
    """
    # For each length of contexts: context → byte → count, and context → sum of the counts.
    counts: list[defaultdict[int, dict[int, int]]] = [defaultdict(dict) for _ in range(3)]
    totals: list[Counter[int]] = [Counter() for _ in range(3)]
    masks = (0, 0xFF, 0xFFFF)
    for line in lines:
        text = (line.translate(_DIGITS_AS_ZERO) if masks_digits else line) + b"\n"
        bits, context = 0.0, 0x0A0A
        for byte in text:
            probability = 1 / 256
            for table, sums, mask in zip(counts, totals, masks, strict=True):
                followers = table.get(context & mask)
                if not followers:
                    break
                escaped = escape * len(followers)
                share = followers.get(byte, 0) + escaped * probability
                probability = share / (sums[context & mask] + escaped)
            bits -= math.log2(probability)
            context = (context << 8 | byte) & 0xFFFF
        yield bits / len(text)
        context = 0x0A0A
        for byte in text:
            for table, sums, mask in zip(counts, totals, masks, strict=True):
                followers = table[context & mask]
                followers[byte] = followers.get(byte, 0) + 1
                sums[context & mask] += 1
            context = (context << 8 | byte) & 0xFFFF


def forest_scores(lines: Sequence[bytes], units: str, buckets: int) -> Iterator[float]:
    """Scores of an isolation forest on TF-IDF; 0 before the first fit.

    It is fitted to all lines before, at line 100 and then whenever a tenth more lines, or 100, have been read.

    Args:
        units: "words" of templates, or "pieces", the runs of 3 bytes of lines.
        buckets: width of a vector. Units are hashed, as a forest does not see a word that it was not fitted to.
    """
    from sklearn.ensemble import IsolationForest
    from sklearn.feature_extraction import FeatureHasher
    from sklearn.feature_extraction.text import TfidfTransformer

    hasher = FeatureHasher(buckets, input_type="string", alternate_sign=False)
    counts = hasher.transform(_words(line) if units == "words" else _pieces(line) for line in lines).tocsr()
    yield from [0.0] * min(_SMALLEST_REFIT, len(lines))
    begin = _SMALLEST_REFIT
    while begin < len(lines):
        weighting = TfidfTransformer().fit(counts[:begin])
        forest = IsolationForest(random_state=0).fit(weighting.transform(counts[:begin]))
        end = begin + max(_SMALLEST_REFIT, begin // 10)
        yield from (-forest.score_samples(weighting.transform(counts[begin:end]))).tolist()
        begin = end


def _words(line: bytes) -> list[bytes]:
    return _WORDS.findall(template_of(line))


def _pieces(line: bytes) -> list[bytes]:
    return [line[begin : begin + 3] for begin in range(len(line) - 2)]


def rarity_scores(lines: Sequence[bytes], half_life: float | None, masks_words: bool) -> Iterator[float]:
    """-log2 of the smoothed share of a line's template among the lines before.

    Args:
        half_life: lines after which a line counts half; None to count all alike.
        masks_words: a template has no word with a digit, see [`template_of`].
    """
    growth = 1.0 if half_life is None else 2 ** (1 / half_life)
    counts: defaultdict[bytes, float] = defaultdict(float)
    total, weight = 0.0, 1.0
    for line in lines:
        template = template_of(line, masks_words)
        yield -math.log2((counts.get(template, 0.0) + weight) / (total + weight * (len(counts) + 1)))
        counts[template] += weight
        total += weight
        weight *= growth
        if weight > 1e100:  # growing weights in place of shrinking counts
            counts = defaultdict(float, {key: count / weight for key, count in counts.items()})
            total, weight = total / weight, 1.0


def sequence_scores(log: SessionLog, alpha: float, summary: str) -> list[float]:
    """Bits per event of a Markov model of order 2 over the templates of a session, its end included.

    Args:
        log: lines and their sessions.
        alpha: added to every count.
        summary: "mean" over the events of a session, or "max".
    """
    counts: defaultdict[tuple[bytes, bytes], Counter[bytes]] = defaultdict(Counter)
    totals: Counter[tuple[bytes, bytes]] = Counter()
    histories = [(b"", b"")] * len(log.names)
    bits: list[list[float]] = [[] for _ in log.names]
    known = {b"\n"}  # the end

    def read(session: int, event: bytes) -> None:
        history = histories[session]
        size = len(known) + (event not in known)
        bits[session].append(-math.log2((counts[history][event] + alpha) / (totals[history] + alpha * size)))
        counts[history][event] += 1
        totals[history] += 1
        known.add(event)
        histories[session] = (history[1], event)

    for number, line, sessions in log.events():
        template = template_of(line)
        for session in sessions:
            read(session, template)
            if log.ends[session] == number:
                read(session, b"\n")
    return [max(found) if summary == "max" else sum(found) / len(found) for found in bits]


def vector_scores(log: SessionLog, counts: str, is_joint: bool) -> list[float]:
    """-log2 of the smoothed share of a session's vector of template counts among the sessions that ended before.

    Args:
        log: lines and their sessions.
        counts: "exact", or "presence" to count every template once.
        is_joint: share of equal vectors; else the product of the shares of each template's count.
    """
    vectors: list[Counter[bytes]] = [Counter() for _ in log.names]
    for _, line, sessions in log.events():
        template = template_of(line)
        for session in sessions:
            vectors[session][template] = 1 if counts == "presence" else vectors[session][template] + 1
    joint: Counter[frozenset[tuple[bytes, int]]] = Counter()
    single: defaultdict[bytes, Counter[int]] = defaultdict(Counter)  # template → count above 0 → sessions
    present: Counter[bytes] = Counter()
    scores = []
    for seen, vector in enumerate(vectors):  # in the order of their ends
        key = frozenset(vector.items())
        if is_joint:
            scores.append(-math.log2((joint[key] + 1) / (seen + len(joint) + 1)))
        else:
            equal = [single[name][vector[name]] if vector[name] else seen - present[name] for name in present | vector]
            scores.append(sum(-math.log2((count + 0.5) / (seen + 1)) for count in equal))
        joint[key] += 1
        for name, count in vector.items():
            single[name][count] += 1
            present[name] += 1
    return scores


def _grid(**choices: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    return tuple(dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))


LINE_PEERS = (
    Peer("byte trigram", trigram_scores, _grid(escape=(0.25, 1.0), masks_digits=(False, True))),
    Peer("isolation forest", forest_scores, _grid(units=("pieces", "words"), buckets=(256, 32)), requires="sklearn"),
    Peer("template rarity", rarity_scores, _grid(half_life=(1000.0, None), masks_words=(True, False))),
)
SESSION_PEERS = (
    Peer("order-2 sequences", sequence_scores, _grid(alpha=(1.0, 0.1), summary=("mean", "max"))),
    Peer("count vectors", vector_scores, _grid(counts=("exact", "presence"), is_joint=(True, False))),
)


def choose_settings(
    scores: Callable[..., Iterable[float]],
    grid: Sequence[Mapping[str, Any]],
    logs: Sequence[tuple[Any, Any]],
    measure: Callable[[Sequence[float], Any], float] = auroc,
) -> Mapping[str, Any]:
    """The settings of a grid with the highest mean AUROC over other logs; the first of equal ones.

    Args:
        scores: of a `Peer`.
        grid: settings.
        logs: lines, or a `SessionLog`, and their labels.
        measure: of scores and labels, in place of the AUROC.
    """

    def mean(settings: Mapping[str, Any]) -> float:
        return float(np.mean([measure(list(scores(log, **settings)), labels) for log, labels in logs]))

    return max(grid, key=mean)
