"""Rarities, thresholds and the memory of lines."""

import math

import numpy as np
import pytest

from hf_recurrent.watch.line_memory import LineMemory
from hf_recurrent.watch.rarity import AdaptiveThreshold, RecentValues


def filled(values, size=1000):
    recent = RecentValues(size)
    for value in values:
        recent.add(float(value))
    return recent


def test_rarity_is_that_of_the_rank():
    recent = filled(range(1, 100))
    assert recent.rarity(0.0) == 0.0
    assert recent.rarity(50.5) == pytest.approx(math.log2(100 / 50))
    assert recent.rarity(102.0) > recent.rarity(100.0) > recent.rarity(99.0) > 3
    assert recent.rarity(1e9) == pytest.approx(math.log2(10 * 100))


def test_too_few_values_say_nothing():
    recent = filled(range(49))
    assert recent.rarity(1e9) == 0.0 and recent.quantile(0.1) == math.inf
    recent.add(0.0)
    assert recent.rarity(1e9) > 8 and recent.quantile(0.1) < 50


def test_equal_values_are_not_rare():
    assert filled([3.0] * 500).rarity(3.0) == 0.0
    assert filled([3.0] * 500).rarity(4.0) > 10
    recent = RecentValues(500, resolution=2.0)
    for value in [3.0] * 500:
        recent.add(value)
    assert recent.rarity(4.0) < 5


@pytest.mark.parametrize("draw", ["exponential", "standard_cauchy", "standard_normal"])
@pytest.mark.parametrize("rate", [0.01, 0.05])
def test_the_threshold_keeps_its_rate(draw, rate):
    """For any distribution, and for one that drifts, as while a model improves."""
    scores = getattr(np.random.default_rng(0), draw)(size=4000) + np.linspace(2, 0, 4000)
    threshold = AdaptiveThreshold(rate, 1000)
    share = np.mean([threshold.add(score) for score in scores])
    assert share == pytest.approx(rate, rel=0.2)


def test_the_threshold_continues_from_its_state():
    scores = np.random.default_rng(0).exponential(size=600)
    whole, first = AdaptiveThreshold(0.02, 100), AdaptiveThreshold(0.02, 100)
    expected = [whole.add(score) for score in scores]
    found = [first.add(score) for score in scores[:300]]
    second = AdaptiveThreshold(0.02, 100)
    second.load(first.state())
    assert found + [second.add(score) for score in scores[300:]] == expected


def memory_of(lines, size=50):
    memory = LineMemory(size)
    for line in lines:
        memory.add(line)
    return memory


def test_the_memory_knows_new_lines_repetitions_and_what_follows():
    cycle = [b"job %d started", b"job %d reads its input", b"job %d finished"]
    memory = memory_of([line % number for number in range(20) for line in cycle])
    usual = memory.compare(b"job 20 started")
    assert memory.compare(b"job 20 finished")["order"] > usual["order"] + 0.1  # its start is missing
    assert memory.compare(b"job 20 finished")["transition"] > usual["transition"] + 2
    assert memory.compare(b"kernel panic: no init found")["novelty"] > usual["novelty"] + 0.5
    for _ in range(8):
        memory.add(b"job 20 started")
    assert memory.compare(b"job 20 started")["repetition"] == pytest.approx(8, abs=1e-3)
    assert usual["repetition"] < 2


def test_the_memory_forgets_and_continues_from_its_state():
    lines = [b"line number %d of the log" % (7 * number) for number in range(260)]
    small, recent = memory_of(lines), memory_of(lines[-50:])
    assert small.compare(b"line number 7") == pytest.approx(recent.compare(b"line number 7"))
    loaded = LineMemory(50)
    loaded.load(small.state())
    assert loaded.compare(b"line number 7") == small.compare(b"line number 7")
    assert [tuple(bits.shape) for bits in small.state().values()] == [(50, 128), (50, 128)]
    with pytest.raises(ValueError, match="50 and 49 lines"):
        loaded.load({"exact": small.state()["exact"], "kinds": small.state()["kinds"][1:]})
