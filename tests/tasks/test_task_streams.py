"""Streams of examples against a row written out by hand, and their independence of everything but task, n and seed."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hf_recurrent import Copying, FlipFlop, Parity, SelectiveCopying, TaskStreams
from hf_recurrent.data.document_order import DocumentOrder

TASKS = [
    Parity(length=5),
    Copying(num_tokens=2, delay=3, num_symbols=4, num_examples=7),
    SelectiveCopying(length=20, num_tokens=3, vocab_size=6),
]


def expected_row(task, stream, num_streams, steps, seed=0):
    """(inputs, targets, resets) of a stream from the definition, one example after another."""
    order = (lambda place: place) if task.num_examples is None else DocumentOrder(task.num_examples, seed)
    inputs, targets, resets = [], [], []
    for number in range(-(-steps // task.length)):
        index = np.asarray(order(np.array([stream + number * num_streams])))
        example = task.examples(index)
        inputs += example[0][0].tolist()
        targets += example[1][0].tolist()
        resets += [True] + [False] * (task.length - 1)
    return inputs[:steps], targets[:steps], resets[:steps]


def rows(batches, key):
    """One list per stream, over all batches."""
    found = {}
    for batch in batches:
        for stream, row in zip(batch["stream_indices"].tolist(), batch[key].tolist(), strict=True):
            found.setdefault(stream, []).extend(row)
    return found


@settings(max_examples=25, deadline=None)
@given(task=st.sampled_from(TASKS), num_streams=st.integers(1, 5), block_size=st.integers(1, 23), data=st.data())
def test_streams_are_examples_in_a_row(task, num_streams, block_size, data):
    groups = data.draw(st.sampled_from([g for g in range(1, num_streams + 1) if num_streams % g == 0]))
    streams = TaskStreams(task, num_streams, block_size, accumulation_groups=groups)
    batches = list(itertools.islice(streams, 6 * groups))
    for batch in batches:
        assert batch["input_ids"].shape == (num_streams // groups, block_size)
        assert batch["input_ids"].dtype == batch["shift_labels"].dtype == torch.int64
        assert batch["reset_mask"].dtype == torch.bool
    found = [rows(batches, key) for key in ("input_ids", "shift_labels", "reset_mask")]
    for stream in range(num_streams):
        expected = expected_row(task, stream, num_streams, 6 * block_size)
        assert tuple(part[stream] for part in found) == expected


@settings(max_examples=25, deadline=None)
@given(task=st.sampled_from(TASKS), block_size=st.integers(1, 23), done=st.integers(0, 9), other=st.integers(1, 30))
def test_going_on_from_positions(task, block_size, done, other):
    """Also with another block size, another grouping and only some of the streams."""
    num_streams = 4
    whole = list(itertools.islice(TaskStreams(task, num_streams, block_size), done + 1))
    positions = whole[-1]["stream_positions"].numpy()
    steps = (done + 1) * block_size
    assert positions.tolist() == [list(divmod(steps, task.length))] * num_streams
    part = TaskStreams(task, num_streams, other, stream_indices=[3, 1], accumulation_groups=2, positions=positions)
    found = rows(itertools.islice(part, 6), "input_ids")
    for stream in (1, 3):
        expected = expected_row(task, stream, num_streams, steps + 3 * other)[0]
        assert found[stream] == expected[steps:]


def test_streams_at_different_positions():
    task = Parity(length=5)
    positions = np.array([[0, 3], [40, 0], [7, 4]])
    found = rows(itertools.islice(TaskStreams(task, 3, 4, positions=positions), 5), "input_ids")
    for stream, (number, offset) in enumerate(positions.tolist()):
        begin = number * 5 + offset
        assert found[stream] == expected_row(task, stream, 3, begin + 20)[0][begin:]


@pytest.mark.parametrize("block_size", [3, 20, 33])
def test_workers_change_nothing(block_size):
    task = SelectiveCopying(length=20, num_tokens=3, vocab_size=6, num_examples=11)
    streams = TaskStreams(task, 4, block_size, seed=5, accumulation_groups=2)
    alone = list(itertools.islice(streams, 9))
    shared = itertools.islice(DataLoader(streams, batch_size=None, num_workers=2), 9)
    for first, second in zip(alone, shared, strict=True):
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_finite_task_is_permuted_anew_each_epoch():
    task = Copying(num_tokens=6, delay=0, num_examples=10)
    batches = itertools.islice(TaskStreams(task, 5, task.length, seed=3), 6)
    shown = [tuple(row) for batch in batches for row in batch["input_ids"].tolist()]
    epochs = [shown[:10], shown[10:20], shown[20:]]
    assert len(set(epochs[0])) == 10
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]


def test_another_seed_of_the_streams_shows_other_examples():
    task = FlipFlop(length=64)

    def shown(seed):
        batches = itertools.islice(TaskStreams(task, 2, 64, seed=seed), 20)
        return {tuple(row) for batch in batches for row in batch["input_ids"].tolist()}

    seen = [shown(seed) for seed in (0, 1, 42, -1, 2**40)]
    assert all(len(part) == 40 for part in seen)
    assert len(set.union(*seen)) == 200
    assert shown(42) == seen[2]


def test_bad_arguments():
    with pytest.raises(ValueError, match="offset 5, but examples of 'parity' have 5 steps"):
        TaskStreams(Parity(length=5), 1, 4, positions=np.array([[0, 5]]))
    with pytest.raises(ValueError, match="`block_size` is 0"):
        TaskStreams(Parity(length=5), 1, 0)
