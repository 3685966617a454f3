"""The stream that changes its language: its texts, and the measurements of its rows."""

import itertools
import math
from collections import Counter

import pytest

from hf_recurrent import Corpus
from papers import load_experiment
from papers.engine.report import plot
from papers.learner.drift import ORDER, endless, pydoc_prose, random_genome


def test_the_genome_is_a_markov_chain_with_repeats():
    episodes = random_genome(12_000, 0)
    assert episodes == random_genome(12_000, 0)
    assert episodes != random_genome(12_000, 1)
    assert [len(episode) for episode in episodes] == [5000, 5000, 5000]
    text = b"".join(episodes)
    assert set(text) == set(b"ACGT")

    def entropy(order):
        """Bits of a base after `order` others."""
        after = Counter(text[place : place + order + 1] for place in range(len(text) - order))
        before = Counter(text[place : place + order] for place in range(len(text) - order))
        return -sum(count * math.log2(count / before[word[:-1]]) for word, count in after.items()) / len(text)

    assert entropy(0) > 1.9
    assert entropy(4) < 1.6
    words = Counter(text[place : place + 20] for place in range(0, len(text) - 20))
    assert max(words.values()) >= 2  # none by chance


def test_the_english_is_prose():
    texts = pydoc_prose()
    assert sum(map(len, texts)) > 120_000
    letters = sum(character.isalpha() or character in " ,.\n" for character in "".join(texts))
    assert letters > 0.9 * sum(map(len, texts))
    assert "\0" not in "".join(texts)


def test_texts_go_on_and_begin_again():
    corpus = Corpus.from_documents([b"one", b"two", b"three"])
    source = endless(corpus, 0)
    first, second = (bytes(itertools.islice(source, 14)) for _ in range(2))
    assert first == second
    assert sorted(first.split(b"\0")) == [b"", b"one", b"three", b"two"]


def test_learning_that_is_off_is_off(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "a.txt").write_text("def f(): return 1\n" * 20)
    short = {"segment_bytes": 64, "window": 32, "stride": 8, "seed": 0, "python": str(tmp_path / "a.txt")}
    rows, experiment = [], load_experiment("drift")
    for settings in experiment.rows("small"):
        settings = {**settings, **short}
        rows.append({**settings, **experiment.run(settings)})
    on, truncated, off = rows
    assert on["curve"][:8] == off["curve"][:8]
    assert on["curve"][8:] != off["curve"][8:]
    assert on["value"]["1"] != truncated["value"]["1"]
    assert [place for place, _ in off["curve"]] == list(range(8, 321, 8))
    for row in rows:
        for number in range(len(ORDER)):
            halves = [row["curve"][8 * number + 3][1], row["curve"][8 * number + 7][1]]
            assert row["value"][str(number + 1)] == pytest.approx(sum(halves) / 2)
            assert [row["after_switch"][number], row["before_switch"][number]] == halves
    plot(experiment, rows, tmp_path / "drift.png")
    assert (tmp_path / "drift.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="`window` is 30"):
        experiment.run({**rows[0], "window": 30})
