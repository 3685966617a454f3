"""A stream that changes its language: English, Python, a genome, and back, with learning on and off.

The sources are such as every Python installation has: English is the prose of the language's own help topics, Python
the source of the standard library, and the genome a seeded random one with repeats. Files of the user's own may stand
in for each, and should where segments are long: the help topics hold 160 kB, and are read again after that.
"""

import itertools
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_recurrent.reproduce.experiment import Experiment, Settings

if TYPE_CHECKING:
    from hf_recurrent import Corpus, OnlineLearner

SIZES: dict[str, Settings] = {
    "small": {"preset": "memora-tiny", "stride": 16, "segment_bytes": 60_000, "window": 4000},
    "paper": {"preset": "memora-s0", "stride": 16, "segment_bytes": 1_000_000, "window": 20_000},
}
ORDER = ("english", "python", "genome", "python", "english")
# Label → the rule, and after how many segments learning ends.
ROWS: dict[str, Settings] = {
    "learning on, RTRL": {"rule": "rtrl", "learned_segments": len(ORDER)},
    "learning on, truncated": {"rule": "truncated", "learned_segments": len(ORDER)},
    "learning off after the first segment": {"rule": "rtrl", "learned_segments": 1},
}
# Records in a window: the disjoint ones make the mean of a segment, all of them the curve.
_RECORDS = 4
_EPISODE = 5000  # bases of an episode of the random genome


class Drift(Experiment):
    name = "drift"
    source = "Learning during use"
    claim = "After each switch a model that goes on learning predicts better than one that has stopped."
    metric = "prequential bits per byte"
    x_label = "segment"

    def rows(self, size: str) -> list[Settings]:
        shared = {"learning_rate": 1e-3, "english": "pydoc", "python": "python", "genome": "random", **SIZES[size]}
        return [{"label": label, **own, **shared} for label, own in ROWS.items()]

    def run(self, settings: Settings) -> dict[str, Any]:
        from hf_recurrent import OnlineLearner
        from hf_recurrent.reproduce.training import build_model, device_name

        window, segment_bytes = settings["window"], settings["segment_bytes"]
        if window % _RECORDS or segment_bytes % window:
            raise ValueError(
                f"`window` is {window}; it must be a multiple of {_RECORDS}, and divide `segment_bytes`, which is "
                f"{segment_bytes}."
            )
        seed = settings["seed"]
        texts = {name: endless(load_text(settings[name], segment_bytes, seed), seed) for name in dict.fromkeys(ORDER)}
        learner = OnlineLearner(
            build_model(settings["preset"], 256, seed),
            rule=settings["rule"],
            stride=settings["stride"],
            learning_rate=settings["learning_rate"],
            window=window,
        )
        start, curve = time.perf_counter(), []
        for number, name in enumerate(ORDER):
            if number == settings["learned_segments"]:
                learner = without_learning(learner)
            segment = bytes(itertools.islice(texts[name], segment_bytes - 1)) + b"\0"
            curve += [
                [record.bytes_read, record.windowed_bits_per_byte]
                for record in learner.learn(segment, window // _RECORDS)
            ]
        bits = np.array([value for _, value in curve]).reshape(len(ORDER), -1)[:, _RECORDS - 1 :: _RECORDS]
        return {
            "value": {str(number): mean for number, mean in enumerate(bits.mean(1).tolist(), 1)},
            "curve": curve,
            "after_switch": bits[:, 0].tolist(),
            "before_switch": bits[:, -1].tolist(),
            "num_parameters": learner.model.num_parameters(),
            "seconds": round(time.perf_counter() - start, 1),
            "device": device_name(),
        }

    def draw(self, axes: Any, rows: Sequence[Settings]) -> bool:
        """Windowed bits per byte over the stream, with the switches marked; all seeds."""
        from hf_recurrent.online.prequential import mark_places

        colours = {label: f"C{number}" for number, label in enumerate(dict.fromkeys(row["label"] for row in rows))}
        labelled = set()
        for row in rows:
            label = row["label"] if row["label"] not in labelled else None
            labelled.add(row["label"])
            axes.plot(*zip(*row["curve"], strict=True), color=colours[row["label"]], label=label, linewidth=1)
        mark_places(axes, {number * rows[0]["segment_bytes"]: name for number, name in enumerate(ORDER)})
        axes.set_xlabel("bytes read")
        axes.set_ylabel(f"bits per byte, last {rows[0]['window']:,} bytes")
        axes.figure.legend(fontsize="small", loc="outside lower center", ncols=len(colours))
        return True

    def note(self, rows: Sequence[Settings]) -> str:
        row = rows[0]
        order = ", ".join(f"{number} {name}" for number, name in enumerate(ORDER, 1))
        return (
            f"Segments of {row['segment_bytes']:,} bytes: {order}; one stream, read once, learned from in blocks of "
            f"{row['stride']} bytes, AdamW, learning rate {row['learning_rate']:g}. English is {_SAYS[row['english']]}"
            f", Python {_SAYS[row['python']]}, the genome {_SAYS[row['genome']]}. A segment's number is the mean over "
            f"all of it; over its first {row['window']:,} bytes and its last ones: {_first_and_last(rows)}."
        )


class _Says(dict):
    """What a source is called in the report; a path as it is."""

    def __missing__(self, source: str) -> str:
        return f"`{source}`"


_SAYS = _Says(
    pydoc="the prose of Python's help topics",
    python="the standard library's source",
    random="a random one with repeats",
)


def _first_and_last(rows: Sequence[Settings]) -> str:
    seen: dict[str, Settings] = {}
    for row in rows:
        seen.setdefault(row["label"], row)
    pairs = {
        label: ", ".join(
            f"{first:.2f} → {last:.2f}" for first, last in zip(row["after_switch"], row["before_switch"], strict=True)
        )
        for label, row in seen.items()
    }
    return "; ".join(f"{label}: {text}" for label, text in pairs.items())


def without_learning(learner: "OnlineLearner") -> "OnlineLearner":
    """The same learner where it stands, from now on only reading."""
    from hf_recurrent import OnlineLearner

    with tempfile.TemporaryDirectory() as directory:
        learner.save(f"{directory}/learner")
        return OnlineLearner.load(f"{directory}/learner", learner.model, learn=False)


def load_text(source: str, num_bytes: int, seed: int) -> "Corpus":
    """The episodes that a segment's bytes come from: built in, or whatever `load_corpus` reads."""
    from hf_recurrent import Corpus, load_corpus

    if source == "pydoc":
        return Corpus.from_documents(pydoc_prose(), name=source)
    if source == "random":
        return Corpus.from_documents(random_genome(num_bytes, seed), name=source)
    return load_corpus(source)


def pydoc_prose() -> list[str]:
    """The English of Python's help topics, a text each: paragraphs of sentences, without grammar and examples."""
    from pydoc_data.topics import topics

    texts = []
    for topic in sorted(topics):
        paragraphs = (" ".join(part.split()) for part in topics[topic].split("\n\n") if "\n  " not in part)
        prose = [part for part in paragraphs if re.match(r"[A-Z].*[.:]$", part)]
        if prose:
            texts.append("\n".join(prose) + "\n")
    return texts


def random_genome(length: int, seed: int, *, order: int = 4, repeats: float = 1 / 300) -> list[bytes]:
    """Bases of a Markov chain, with copies of what came before; in episodes.

    A copy of 50 to 500 bases begins with the probability `repeats` at each base; one base in twenty of it is new.
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


def endless(corpus: "Corpus", seed: int) -> Iterator[int]:
    """The bytes of all episodes in an order of their own, an end byte after each, again and again."""
    order = np.random.default_rng(seed).permutation(len(corpus))
    for number in itertools.cycle(order.tolist()):
        yield from corpus[number].tolist()
        yield 0


EXPERIMENT = Drift()
