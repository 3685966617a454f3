"""Every generator against a slow solver written from the task's definition; examples are pure functions."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operation_counts import count_operations
from solver_checks import check_neighbours, check_targets

from hf_recurrent import (
    AssociativeRecall,
    Copying,
    FlipFlop,
    InductionHeads,
    Parity,
    PermutationComposition,
    SelectiveCopying,
    SentinelCopy,
)
from hf_recurrent.tasks.example_draws import ExampleDraws

TASKS = [
    SelectiveCopying(length=40, num_tokens=5, vocab_size=7),
    SelectiveCopying(length=8, num_tokens=4, vocab_size=3),
    Copying(num_tokens=4, delay=6, num_symbols=8),
    Copying(num_tokens=1, delay=0, num_symbols=2),
    SentinelCopy(max_length=7, num_letters=4),
    SentinelCopy(max_length=9, min_length=2),
    AssociativeRecall(num_pairs=4, num_keys=6, num_values=3, num_queries=3),
    InductionHeads(length=12, vocab_size=5),
    InductionHeads(length=3, vocab_size=3),
    FlipFlop(length=32),
    FlipFlop(length=32, p_ignore=0.1),
    Parity(length=13),
    Parity(length=9, final_only=True),
    PermutationComposition(length=11, num_elements=3),
    PermutationComposition(length=7, num_elements=5, final_only=True),
]


PINNED_PARITY = ["0011100111011100", "0101000001000111", "1001001001011000"]
PINNED_PLACES = [19, 39, 43, 48]


def names(task):
    return f"{task.name}-{task.length}"


def solve_selective_copying(task, row):
    before = row[: -task.num_tokens]
    assert row[-task.num_tokens :] == [task.vocab_size - 1] * task.num_tokens
    data = [token for token in before if token != 0]
    assert len(data) == task.num_tokens and max(data) < task.vocab_size - 1
    return [None] * len(before) + data


def solve_copying(task, row):
    k = task.num_tokens
    assert all(1 <= token <= task.num_symbols for token in row[:k])
    assert row[k:] == [0] * task.delay + [task.num_symbols + 1] * k
    return [None] * (k + task.delay) + row[:k]


def solve_sentinel_copy(task, row):
    sentinel = row.index(task.num_letters + 1)
    string = row[:sentinel]
    assert (task.min_length or task.max_length) <= sentinel <= task.max_length
    assert all(1 <= letter <= task.num_letters for letter in string)
    empty = len(row) - 2 * sentinel
    assert row[sentinel + 1 :] == string[:-1] + [0] * empty
    return [None] * sentinel + string + [None] * empty


def solve_associative_recall(task, row):
    pairs = {}
    for place in range(0, 2 * task.num_pairs, 2):
        assert row[place] not in pairs and row[place] < task.num_keys <= row[place + 1]
        pairs[row[place]] = row[place + 1]
    return [None] * (2 * task.num_pairs) + [pairs[key] for key in row[2 * task.num_pairs :]]


def solve_induction_heads(task, row):
    special = task.vocab_size - 1
    assert row.count(special) == 2 and row[-1] == special
    return [None] * (len(row) - 1) + [row[row.index(special) + 1]]


def solve_flip_flop(task, row):
    assert row[0] == 2 and row[-2] == 3
    memory, answers = None, []
    for place in range(0, len(row), 2):
        instruction, bit = row[place], row[place + 1]
        assert instruction in (2, 3, 4) and bit in (0, 1)
        if instruction == 2:
            memory = bit
        if instruction == 3:
            assert bit == memory
        answers += [memory if instruction == 3 else None, None]
    return answers


def solve_parity(task, row):
    odd, answers = 0, []
    for bit in row:
        odd = 1 - odd if bit else odd
        answers.append(odd)
    return [None] * (len(row) - 1) + answers[-1:] if task.final_only else answers


def solve_permutation_composition(task, row):
    things, answers = list(range(task.num_elements)), []
    for token in row:
        moves = [int(digit) for digit in task.token_name(token)]
        things = [moves[thing] for thing in things]
        word = "".join(map(str, things))
        answers.append(next(number for number in range(task.vocab_size) if task.token_name(number) == word))
    return [None] * (len(row) - 1) + answers[-1:] if task.final_only else answers


@pytest.mark.parametrize("task", TASKS, ids=names)
def test_targets_are_what_a_solver_finds(task):
    check_targets(task, globals()[f"solve_{task.name}"])


@settings(max_examples=40, deadline=None)
@given(
    task=st.sampled_from(TASKS),
    indices=st.lists(st.integers(0, 2**62), min_size=1, max_size=9),
    split=st.sampled_from(["train", "validation", "test"]),
)
def test_an_example_does_not_depend_on_its_neighbours(task, indices, split):
    check_neighbours(task, indices, split)


@pytest.mark.parametrize("task", [task for task in TASKS if task.length > 10], ids=names)
def test_seeds_splits_and_indices_give_other_examples(task):
    def rows(task, split="train", first=0):
        return {tuple(row) for row in task.examples(np.arange(first, first + 20), split)[0].tolist()}

    first = rows(task)
    assert len(first) > 15
    other_seed = replace(task, seed=1)
    for others in (rows(task, "validation"), rows(task, "test"), rows(task, first=20), rows(other_seed)):
        assert len(first & others) < 8
    assert other_seed.fingerprint != task.fingerprint
    assert replace(task).fingerprint == task.fingerprint


def test_fingerprints_tell_all_tasks_apart():
    assert len({task.fingerprint for task in TASKS}) == len(TASKS)


def test_the_examples_of_a_seed_stay_what_they_are():
    """A change here would silently change the data of every measured number."""
    inputs, _ = Parity(length=16).examples(np.array([0, 1, 10**12]))
    assert ["".join(map(str, row)) for row in inputs.tolist()] == PINNED_PARITY
    places = np.flatnonzero(SelectiveCopying(length=64, num_tokens=4).examples(np.array([7]))[0][0, :60])
    assert places.tolist() == PINNED_PLACES


def test_draws_have_the_distributions_they_promise():
    draws = ExampleDraws(3, "train", np.arange(4000))
    counts = np.bincount(draws.integers("a", 10, 7).ravel(), minlength=7)
    assert np.abs(counts / counts.sum() - 1 / 7).max() < 0.006
    uniform = draws.uniform("b", 10)
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.006
    normal = draws.normal("c", 10)
    assert abs(normal.mean()) < 0.02 and abs(normal.std() - 1) < 0.02 and abs((normal**3).mean()) < 0.06
    chosen = draws.choose("d", 6, 2)
    assert (np.diff(chosen, axis=1) > 0).all()
    pairs = np.bincount(chosen[:, 0] * 6 + chosen[:, 1], minlength=36)
    assert (pairs > 0).sum() == 15 and pairs[pairs > 0].min() > 4000 / 15 * 0.75
    orders = draws.permutation("e", 3)
    assert min(np.unique(orders, axis=0, return_counts=True)[1]) > 4000 / 6 * 0.85
    assert (np.sort(orders, axis=1) == np.arange(3)).all()
    # Draws of different purposes or examples are independent.
    bits = np.concatenate([draws.integers("f", 8, 2), draws.integers("g", 8, 2)], axis=1)
    correlations = np.corrcoef(bits.T) - np.eye(16)
    assert np.abs(correlations).max() < 0.07
    assert np.abs(np.corrcoef(bits[:-1].ravel(), bits[1:].ravel())[0, 1]) < 0.02


def test_flip_flop_has_the_probabilities_of_its_source():
    for p_ignore, distance in ((0.8, 10), (0.98, 100)):
        inputs, targets = FlipFlop(length=4096, p_ignore=p_ignore).examples(np.arange(100))
        instructions = inputs[:, 0::2]
        share = (instructions == 4).mean()
        assert share == pytest.approx(p_ignore, abs=0.005)
        assert (instructions == 2).mean() == pytest.approx((1 - p_ignore) / 2, abs=0.005)
        counts = (instructions == 2).sum()
        assert instructions.size / counts == pytest.approx(distance, rel=0.1)
        assert targets[targets >= 0].mean() == pytest.approx(0.5, abs=0.05)


def test_places_and_answers_are_spread_evenly():
    places = np.concatenate(
        [np.flatnonzero(row[:60]) for row in SelectiveCopying(length=64, num_tokens=4).examples(np.arange(3000))[0]]
    )
    assert np.bincount(places, minlength=60).min() > 200 * 0.7
    inputs, _ = InductionHeads(length=12, vocab_size=5).examples(np.arange(3000))
    first = (inputs == 4).argmax(1)
    assert np.bincount(first, minlength=10).min() > 300 * 0.75 and first.max() == 9


def test_show_is_readable():
    shown = FlipFlop(length=6, p_ignore=0.0, seed=1).show()
    reads, asked = shown.splitlines()
    assert reads.startswith("reads w ") and asked.split()[-2] in "01" and asked.split()[-1] == "."


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SelectiveCopying(length=10, num_tokens=6), "`num_tokens` is 6; it must be an integer from 1 to 5"),
        (lambda: SelectiveCopying(vocab_size=2), "`vocab_size` is 2"),
        (lambda: Copying(delay=-1), "`delay` is -1; it must be an integer of at least 0"),
        (lambda: SentinelCopy(min_length=9, max_length=8), "`min_length` is 9; it must be an integer from 1 to 8"),
        (lambda: AssociativeRecall(num_pairs=5, num_keys=4), "`num_pairs` is 5; it must be an integer from 1 to 4"),
        (lambda: InductionHeads(length=2), "`length` is 2"),
        (lambda: FlipFlop(length=7), "`length` is 7; it must be even"),
        (lambda: FlipFlop(p_ignore=1.5), "`p_ignore` is 1.5; it must be a probability"),
        (lambda: FlipFlop(p_ignore=math.nan), "`p_ignore` is nan"),
        (lambda: Parity(length=0), "`length` is 0"),
        (lambda: Parity(length=2.5), "`length` is 2.5"),
        (lambda: PermutationComposition(num_elements=7), "`num_elements` is 7; it must be an integer from 2 to 6"),
        (lambda: Parity(num_examples=0), "`num_examples` is 0"),
        (lambda: Parity(num_validation_examples=0), "`num_validation_examples` is 0"),
        (lambda: Parity().examples(np.array([-1])), "`indices` is"),
        (lambda: Parity().examples(np.array([0.5])), "`indices` is"),
        (lambda: Parity().examples(np.array([0]), "eval"), "`split` is 'eval'; it must be one of train, validation"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("task", TASKS, ids=names)
def test_operations_do_not_grow_with_the_number_of_examples(task):
    task.examples(np.arange(2))  # the first call fills caches
    few, many = (count_operations(lambda count=count: task.examples(np.arange(count))) for count in (2, 500))
    assert many == few


def test_operations_and_draws_of_long_examples(monkeypatch):
    """The largest setting of the papers: no operation for each step, and at most one random number."""
    short, task = SelectiveCopying(length=64), SelectiveCopying()
    assert count_operations(lambda: task.examples(np.arange(8))) == count_operations(
        lambda: short.examples(np.arange(8))
    )
    drawn = []
    words = ExampleDraws.words
    monkeypatch.setattr(ExampleDraws, "words", lambda *args: drawn.append(words(*args)) or drawn[-1])
    task.examples(np.arange(8))
    assert 0 < sum(map(np.size, drawn)) <= 8 * task.length
