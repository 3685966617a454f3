"""Simple detectors that an evaluation compares the watch with: they read the same lines in the same order, once.

Each scores a line, or a session, before it learns from it; higher scores are less usual. Memory grows with the log.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from hf_recurrent.watch.evaluation import SessionLog

# IP addresses with a port, hexadecimal numbers, and runs of digits.
_VARIABLES = re.compile(rb"/?\d+\.\d+\.\d+\.\d+(?::\d+)?|0x[0-9a-fA-F]+|\b(?=[a-fA-F]*\d)[0-9a-fA-F]{6,}\b|-?\d+")
_DIGIT_WORDS = re.compile(rb"\S*\d\S*")
_ESCAPE = 0.25  # weight of the shorter context of the trigrams; 1 is Witten-Bell's
_SMALLEST_REFIT, _BUCKETS = 100, 256  # lines; width of a vector, in which runs of bytes are hashed
_GROWTH = 2 ** (1 / 1000)  # of the weight of a line: 1,000 lines before count half


def trigram_scores(lines: Sequence[bytes]) -> Iterator[float]:
    """Bits per byte of a trigram model of bytes, smoothed by shorter contexts as Witten and Bell do."""
    # For each length of contexts: context → byte → count, and context → sum of the counts.
    counts: list[defaultdict[int, dict[int, int]]] = [defaultdict(dict) for _ in range(3)]
    totals: list[Counter[int]] = [Counter() for _ in range(3)]
    masks = (0, 0xFF, 0xFFFF)
    for line in lines:
        text, bits, context = line + b"\n", 0.0, 0x0A0A
        for byte in text:
            probability = 1 / 256
            for table, sums, mask in zip(counts, totals, masks, strict=True):
                followers = table.get(context & mask)
                if not followers:
                    break
                escaped = _ESCAPE * len(followers)
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


def forest_scores(lines: Sequence[bytes]) -> Iterator[float]:
    """Scores of an isolation forest on TF-IDF of runs of 3 bytes; 0 before the first fit.

    It is fitted to all lines before, at line 100 and then whenever a tenth more lines, or 100, have been read.
    """
    from sklearn.ensemble import IsolationForest
    from sklearn.feature_extraction import FeatureHasher
    from sklearn.feature_extraction.text import TfidfTransformer

    # Hashed, as a forest does not see a run of bytes that it was not fitted to.
    hasher = FeatureHasher(_BUCKETS, input_type="string", alternate_sign=False)
    runs = ([line[begin : begin + 3] for begin in range(len(line) - 2)] for line in lines)
    counts = hasher.transform(runs).tocsr()
    yield from [0.0] * min(_SMALLEST_REFIT, len(lines))
    begin = _SMALLEST_REFIT
    while begin < len(lines):
        weighting = TfidfTransformer().fit(counts[:begin])
        forest = IsolationForest(random_state=0).fit(weighting.transform(counts[:begin]))
        end = begin + max(_SMALLEST_REFIT, begin // 10)
        yield from (-forest.score_samples(weighting.transform(counts[begin:end]))).tolist()
        begin = end


def rarity_scores(lines: Sequence[bytes]) -> Iterator[float]:
    """-log2 of the smoothed share of equal lines before, but for words with digits; recent lines count more."""
    counts: defaultdict[bytes, float] = defaultdict(float)
    total, weight = 0.0, 1.0
    for line in lines:
        template = _DIGIT_WORDS.sub(b"*", line)
        yield -math.log2((counts.get(template, 0.0) + weight) / (total + weight * (len(counts) + 1)))
        counts[template] += weight
        total += weight
        weight *= _GROWTH
        if weight > 1e100:  # growing weights in place of shrinking counts
            counts = defaultdict(float, {key: count / weight for key, count in counts.items()})
            total, weight = total / weight, 1.0


def sequence_scores(log: SessionLog) -> list[float]:
    """Mean bits per event of a Markov model of order 2 over the templates of a session, its end included."""
    counts: defaultdict[tuple[bytes, bytes], Counter[bytes]] = defaultdict(Counter)
    totals: Counter[tuple[bytes, bytes]] = Counter()
    histories = [(b"", b"")] * len(log.names)
    bits: list[list[float]] = [[] for _ in log.names]
    known = {b"\n"}  # the end

    def read(session: int, event: bytes) -> None:
        history = histories[session]
        size = len(known) + (event not in known)
        bits[session].append(-math.log2((counts[history][event] + 1) / (totals[history] + size)))
        counts[history][event] += 1
        totals[history] += 1
        known.add(event)
        histories[session] = (history[1], event)

    for number, line, sessions in log.events():
        template = _VARIABLES.sub(b"*", line)
        for session in sessions:
            read(session, template)
            if log.ends[session] == number:
                read(session, b"\n")
    return [sum(found) / len(found) for found in bits]


def vector_scores(log: SessionLog) -> list[float]:
    """-log2 of the smoothed share of sessions that ended before with the same number of lines of each template."""
    vectors: list[Counter[bytes]] = [Counter() for _ in log.names]
    for _, line, sessions in log.events():
        template = _VARIABLES.sub(b"*", line)
        for session in sessions:
            vectors[session][template] += 1
    seen: Counter[frozenset[tuple[bytes, int]]] = Counter()
    scores = []
    for number, vector in enumerate(vectors):  # in the order of their ends
        key = frozenset(vector.items())
        scores.append(-math.log2((seen[key] + 1) / (number + len(seen) + 1)))
        seen[key] += 1
    return scores


LINE_PEERS = {"byte trigram": trigram_scores, "isolation forest": forest_scores, "template rarity": rarity_scores}
SESSION_PEERS = {"order-2 sequences": sequence_scores, "count vectors": vector_scores}
