"""A stream that changes its language: English, Python, a genome, and back, with learning on and off.

By default the sources need no download: English is the prose of Python's help topics, Python the source of the
standard library, and the genome a seeded random one with repeats. Use your own files for long segments: the help
topics hold 160 kB, and are repeated after that.
"""

import itertools
import re
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hf_recurrent import Corpus, OnlineLearner, load_corpus
from papers.engine.experiment import Experiment, Settings
from papers.engine.tables import core_seconds, in_interval
from papers.engine.training import build_model, measured_run

ORDER = ("english", "python", "genome", "python", "english")
RATES = {"adamw": (3e-4, 1e-3, 3e-3), "rmsprop": (3e-6, 3e-5, 3e-4)}
# Records per window: the disjoint ones make the mean of a segment, all of them the curve.
_RECORDS = 4
_EPISODE = 5000  # bases per episode of the random genome


def rule_settings(rule: str, stride: int, optimizer: str) -> Settings:
    """Settings of rows with a rule, an update after each `stride` bytes, and an optimizer with its learning rates."""
    candidates = [{"learning_rate": rate} for rate in RATES[optimizer]]
    return {"rule": rule, "stride": stride, "optimizer": optimizer, "candidates": candidates}


RULES: dict[str, Settings] = {
    "RTRL, AdamW": rule_settings("rtrl", 1, "adamw"),
    "RTRL, RMSprop": rule_settings("rtrl", 1, "rmsprop"),
    "immediate derivatives, AdamW": rule_settings("truncated", 1, "adamw"),
    "immediate derivatives, RMSprop": rule_settings("truncated", 1, "rmsprop"),
    "truncated to 16 bytes, AdamW": rule_settings("truncated", 16, "adamw"),
}


class Drift(Experiment):
    lines = {
        "learning on, RTRL": {"rule": "rtrl", "learned_segments": len(ORDER)},
        "learning on, truncated": {"rule": "truncated", "learned_segments": len(ORDER)},
        "learning off after the first segment": {"rule": "rtrl", "learned_segments": 1},
    }
    shared = {"learning_rate": 1e-3, "stride": 16, "english": "pydoc", "python": "python", "genome": "random"}
    sizes = {
        "small": {"preset": "memora-tiny", "segment_bytes": 60_000, "window": 4000},
        "paper": {"preset": "memora-s0", "segment_bytes": 1_000_000, "window": 20_000},
    }

    def run(self, settings: Settings) -> dict[str, Any]:
        window, segment_bytes, seed = settings["window"], settings["segment_bytes"], settings["seed"]
        if window % _RECORDS or segment_bytes % window:
            raise ValueError(
                f"`window` is {window}; it must be a multiple of {_RECORDS}, and divide `segment_bytes`, which is "
                f"{segment_bytes}."
            )
        texts = {name: endless(load_text(settings[name], segment_bytes, seed), seed) for name in dict.fromkeys(ORDER)}
        learner = OnlineLearner(
            build_model(settings["preset"], 256, seed, **settings.get("fields", {})),
            window=window,
            **{key: settings[key] for key in ("rule", "stride", "learning_rate", "optimizer") if key in settings},
        )
        curve = []
        with measured_run() as record:
            for number, name in enumerate(ORDER):
                if number == settings["learned_segments"]:
                    learner = without_learning(learner)
                segment = bytes(itertools.islice(texts[name], segment_bytes - 1)) + b"\0"
                curve += [
                    [entry.bytes_read, entry.windowed_bits_per_byte]
                    for entry in learner.learn(segment, window // _RECORDS)
                ]
        bits = np.array([value for _, value in curve]).reshape(len(ORDER), -1)[:, _RECORDS - 1 :: _RECORDS]
        return {
            "value": {str(number): mean for number, mean in enumerate(bits.mean(1).tolist(), 1)},
            "curve": curve,
            "after_switch": bits[:, 0].tolist(),
            "before_switch": bits[:, -1].tolist(),
            "num_parameters": learner.model.num_parameters(),
            **record,
        }

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        first, last = (
            [statistics.fmean(seeds) for seeds in zip(*(row[name] for row in rows), strict=True)]
            for name in ("after_switch", "before_switch")
        )
        cells = ", ".join(f"{before:.2f} → {after:.2f}" for before, after in zip(first, last, strict=True))
        return {**super().details(rows), "first → last window of each segment": cells}

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        """Windowed bits per byte over the stream, with the switches marked; all seeds."""
        colours = {label: f"C{number}" for number, label in enumerate(dict.fromkeys(row["label"] for row in rows))}
        for row in rows:
            label = row["label"] if row["seed"] == rows[0]["seed"] else None
            axes.plot(*zip(*row["curve"], strict=True), color=colours[row["label"]], label=label, linewidth=1)
        for number, name in enumerate(ORDER):
            begin = number * rows[0]["segment_bytes"]
            axes.axvline(begin, color="grey", linewidth=0.8, linestyle=":")
            axes.text(begin, 0.99, f" {name}", transform=axes.get_xaxis_transform(), va="top", fontsize="small")
        axes.set(xlabel="bytes read", ylabel=f"bits per byte, last {rows[0]['window']:,} bytes")
        axes.figure.legend(fontsize="small", loc="outside lower center", ncols=len(colours))


class DriftRules(Drift):
    """The same stream by learning rule and optimizer, each with the best of as many learning rates."""

    lines = RULES
    shared = {"learned_segments": len(ORDER), "english": "pydoc", "python": "python", "genome": "random"}
    sizes = {
        "small": {
            "preset": "memora-tiny", "fields": {"hidden_size": 64, "state_size": 96}, "segment_bytes": 12_000,
            "window": 1000,
        },
        "paper": {"preset": "memora-s0", "fields": {}, "segment_bytes": 1_000_000, "window": 20_000},
    }  # fmt: skip
    tuning = {"small": {"segment_bytes": 4000}, "paper": {"segment_bytes": 100_000}}

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        means = [statistics.fmean(row["value"].values()) for row in rows]
        seconds = f"{statistics.fmean(map(core_seconds, rows)):.1f}"
        return {"all segments, 95 % interval": in_interval(means), "core seconds": seconds}


def without_learning(learner: OnlineLearner) -> OnlineLearner:
    """The same learner, from now on only reading."""
    with tempfile.TemporaryDirectory() as directory:
        learner.save(f"{directory}/learner")
        return OnlineLearner.load(f"{directory}/learner", learner.model, learn=False)


def load_text(source: str, num_bytes: int, seed: int) -> Corpus:
    """The episodes of a built-in source, "pydoc" or "random", or of any source of `load_corpus`."""
    if source == "pydoc":
        return Corpus.from_documents(pydoc_prose(), name=source)
    if source == "random":
        return Corpus.from_documents(random_genome(num_bytes, seed), name=source)
    return load_corpus(source)


def pydoc_prose() -> list[str]:
    """The prose of Python's help topics, one text per topic, without grammars and examples."""
    from pydoc_data.topics import topics

    texts = []
    for topic in sorted(topics):
        paragraphs = (" ".join(part.split()) for part in topics[topic].split("\n\n") if "\n  " not in part)
        prose = [part for part in paragraphs if re.match(r"[A-Z].*[.:]$", part)]
        if prose:
            texts.append("\n".join(prose) + "\n")
    return texts


def random_genome(length: int, seed: int, *, order: int = 4, repeats: float = 1 / 300) -> list[bytes]:
    """Bases of a Markov chain with copies of earlier bases, cut into episodes.

    A copy of 50 to 500 bases begins with probability `repeats` at each base; one in twenty of its bases is new.
    """
    generator = np.random.default_rng(seed)
    chances = generator.dirichlet([0.7] * 4, size=4**order).cumsum(1).tolist()
    bases, context, copied_from, left = [], 0, 0, 0
    while len(bases) < length:
        for number, other in generator.random((_EPISODE, 2)).tolist():
            if not left and len(bases) > 500 and other < repeats:
                left = 50 + int(other / repeats * 450)
                copied_from = int(number * (len(bases) - 500))
            if left and other < 0.95:
                base = bases[copied_from]
            else:
                base = min(sum(number > chance for chance in chances[context]), 3)
            if left:
                copied_from, left = copied_from + 1, left - 1
            bases.append(base)
            context = (context * 4 + base) % 4**order
    text = np.frombuffer(b"ACGT", dtype=np.uint8)[bases].tobytes()
    return [text[begin : begin + _EPISODE] for begin in range(0, len(text), _EPISODE)]


def endless(corpus: Corpus, seed: int) -> Iterator[int]:
    """The bytes of all episodes in a random order, with an end byte after each, repeated forever."""
    order = np.random.default_rng(seed).permutation(len(corpus))
    for number in itertools.cycle(order.tolist()):
        yield from corpus[number].tolist()
        yield 0
