"""The five tasks of SMT: the paper's examples, solvers written from its definitions, and the effect of each field."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from solver_checks import check_neighbours, check_targets

from hf_recurrent import (
    KeysValues,
    ModularArithmetic,
    Retrieval,
    StackOperations,
    StringCopy,
    TaskStreams,
)

TASKS = [
    Retrieval(length=20, vocab_size=6),
    Retrieval(length=3, vocab_size=3),
    StringCopy(length=14, vocab_size=5),
    StringCopy(length=2, vocab_size=300),
    StackOperations(length=30, max_depth=3, vocab_size=4),
    StackOperations(length=5, max_depth=1, vocab_size=2),
    KeysValues(num_pairs=5),
    KeysValues(num_pairs=4, key_length=2, value_length=3, vocab_size=6),
    KeysValues(num_pairs=1, vocab_size=4),
    KeysValues(num_pairs=3, key_length=15, vocab_size=33),
    ModularArithmetic(num_shots=6, max_a=4, max_b=2, vocab_size=7),
    ModularArithmetic(num_shots=1, max_a=0, max_b=0, vocab_size=2),
]


def names(task):
    return f"{task.name}-{task.length}"


# ---- The paper's examples: inputs x, targets y ----


def asked(task, row):
    return [None if target == -100 else target for target in task.answers(np.array([row]))[0].tolist()]


def test_the_papers_examples():
    nothing = None
    assert asked(Retrieval(length=8), [3, 4, 0, 2, 1, 3, 1, 0]) == [nothing] * 7 + [2]
    assert asked(StringCopy(length=8), [3, 4, 1, 2, 0, 0, 0, 0]) == [nothing] * 4 + [2, 1, 4, 3]
    stack = StackOperations(length=8)
    assert asked(stack, [1, 0, 2, 3, 0, 1, 0, 0]) == [nothing, 1, nothing, nothing, 3, nothing, 1, 2]
    a, b, d = 11, 12, 14
    keys_values = KeysValues(num_pairs=3)
    assert keys_values.length == 8
    assert asked(keys_values, [b, 1, a, 3, d, 2, 4, a]) == [nothing] * 7 + [3]
    arithmetic = ModularArithmetic(num_shots=4, vocab_size=8)
    pairs = [(x, (3 * x + 2) % 8) for x in (5, 0, 7, 4)]
    assert asked(arithmetic, [token for pair in pairs for token in pair]) == [
        target for _, y in pairs for target in (y, nothing)
    ]


# ---- Solvers ----


def solve_retrieval(task, row):
    assert row[-1] == 0 and row.count(0) == 2
    return [None] * (task.length - 1) + [row[row.index(0) + 1]]


def solve_string_copy(task, row):
    string, rest = row[: task.length // 2], row[task.length // 2 :]
    assert 0 not in string and set(rest) == {0} and len(string) == len(rest)
    return [None] * len(string) + [string.pop() for _ in rest]


def solve_stack_operations(task, row):
    stack, answers = [], []
    for token in row:
        answers.append(None if token else stack.pop())
        stack += [token] * (token > 0)
        assert len(stack) <= task.max_depth
    return answers


def solve_keys_values(task, row):
    words = [task.token_name(token) for token in row]
    end = words.index("|")
    pairs, size = {}, task.key_length + task.value_length
    for place in range(0, end, size):
        key, value = words[place : place + task.key_length], words[place + task.key_length : place + size]
        assert {word[0] for word in key} == {"k"} and {word[0] for word in value} == {"v"}
        assert tuple(key) not in pairs
        pairs[tuple(key)] = row[place + task.key_length : place + size]
    assert len(pairs) == task.num_pairs
    key = tuple(words[end + 1 : end + 1 + task.key_length])
    assert words[end + 1 + task.key_length :] == ["|"] * (task.value_length - 1)
    return [None] * (end + task.key_length) + pairs[key]


def solve_modular_arithmetic(task, row):
    pairs = list(zip(row[0::2], row[1::2], strict=True))
    rules = [
        (a, b)
        for a in range(task.max_a + 1)
        for b in range(task.max_b + 1)
        if all((a * x + b) % task.vocab_size == y for x, y in pairs)
    ]
    assert rules
    return [target for _, y in pairs for target in (y, None)]


@pytest.mark.parametrize("task", TASKS, ids=names)
def test_targets_are_what_a_solver_finds(task):
    check_targets(task, globals()[f"solve_{task.name}"])


@settings(max_examples=30, deadline=None)
@given(
    task=st.sampled_from([*TASKS, Retrieval(length=9, label_noise=0.5)]),
    indices=st.lists(st.integers(0, 2**62), min_size=1, max_size=9),
    split=st.sampled_from(["train", "validation", "test"]),
)
def test_an_example_does_not_depend_on_its_neighbours(task, indices, split):
    check_neighbours(task, indices, split)


# ---- Fields ----


def test_label_noise_is_of_the_probability_asked_for_and_in_training_only():
    for noise in (0.0, 0.3, 1.0):
        task = Retrieval(length=6, vocab_size=5, label_noise=noise)
        inputs, targets = task.examples(np.arange(8000))
        right = task.answers(inputs)[:, -1]
        # A random token is the right one with probability 1/4.
        assert (targets[:, -1] != right).mean() == pytest.approx(0.75 * noise, abs=0.02)
        if noise == 1:
            assert np.bincount(targets[:, -1], minlength=5)[1:].min() > 2000 * 0.9
        assert np.array_equal(inputs, Retrieval(length=6, vocab_size=5).examples(np.arange(8000))[0])
        for split in ("validation", "test"):
            inputs, targets = task.examples(np.arange(200), split)
            assert np.array_equal(targets, task.answers(inputs))


def test_retrieval_asks_from_every_distance():
    inputs, _ = Retrieval(length=12, vocab_size=5).examples(np.arange(4000))
    first = (inputs == 0).argmax(1)
    assert first.max() == 9 and np.bincount(first).min() > 400 * 0.8


def test_the_stack_is_used_to_its_depth():
    for depth in (1, 2, 5):
        inputs, _ = StackOperations(length=80, max_depth=depth).examples(np.arange(50))
        heights = np.cumsum(np.where(inputs == 0, -1, 1), axis=1)
        assert heights.max() == depth and heights.min() == 0
        free = (heights[:, :-1] > 0) & (heights[:, :-1] < depth)
        if depth > 1:
            assert (inputs[:, 1:][free] == 0).mean() == pytest.approx(0.5, abs=0.05)


def test_keys_are_all_different_and_uniform():
    """Also if all keys are used, and if there are far too many to list."""
    task = KeysValues(num_pairs=4, key_length=2, vocab_size=6)  # 4 of the 4 keys that 2 symbols make
    inputs, _ = task.examples(np.arange(3000))
    keys = inputs[:, :12].reshape(-1, 4, 3)[:, :, :2] @ [2, 1]
    assert (np.sort(keys, axis=1) == [3, 4, 5, 6]).all()
    orders = np.unique(keys, axis=0, return_counts=True)[1]
    assert len(orders) == 24 and orders.min() > 125 * 0.65
    some = KeysValues(num_pairs=2, vocab_size=9).examples(np.arange(6000))[0][:, 0:4:2]
    pairs = np.bincount(some[:, 0] * 5 + some[:, 1])
    assert (pairs > 0).sum() == 12 and pairs[pairs > 0].min() > 500 * 0.8
    long = KeysValues(num_pairs=2, key_length=15, vocab_size=33).examples(np.arange(2000))[0]
    assert np.bincount(long[:, :15].ravel(), minlength=17)[1:].min() > 2000 * 15 / 16 * 0.9
    queries = (some[:, 0] == KeysValues(num_pairs=2, vocab_size=9).examples(np.arange(6000))[0][:, -1]).mean()
    assert queries == pytest.approx(0.5, abs=0.03)


# ---- Every trainer's view ----


@pytest.mark.parametrize("task", [TASKS[0], TASKS[4], TASKS[7]], ids=names)
def test_streams_and_datasets_show_the_same_examples(task):
    inputs, targets = task.examples(np.arange(4))
    batch = next(iter(TaskStreams(task, 4, task.length)))
    assert np.array_equal(batch["input_ids"], inputs) and np.array_equal(batch["shift_labels"], targets)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Retrieval(length=2), "`length` is 2; it must be an integer of at least 3"),
        (lambda: Retrieval(label_noise=1.1), "`label_noise` is 1.1; it must be a probability from 0 to 1"),
        (lambda: Retrieval(label_noise=float("nan")), "`label_noise` is nan"),
        (lambda: StringCopy(length=9), "`length` is 9; it must be even"),
        (lambda: StackOperations(max_depth=0), "`max_depth` is 0"),
        (lambda: StackOperations(vocab_size=1), "`vocab_size` is 1"),
        (lambda: KeysValues(num_pairs=17), "`num_pairs` is 17; it must be an integer from 1 to 16"),
        (lambda: KeysValues(vocab_size=33, key_length=16), "`key_length` is 16; it must be an integer from 1 to 15"),
        (lambda: KeysValues(value_length=0), "`value_length` is 0"),
        (lambda: ModularArithmetic(max_a=16), "`max_a` is 16; it must be an integer from 0 to 15"),
        (lambda: ModularArithmetic(num_shots=0), "`num_shots` is 0"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
