"""Examples of a task against a slow solver written from its definition, and the promise that examples are pure."""

import numpy as np


def check_targets(task, solve):
    """The targets are what `solve(task, row)` finds; None where nothing is asked."""
    inputs, targets = task.examples(np.arange(60))
    assert inputs.shape == targets.shape == (60, task.length)
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.min() >= 0 and inputs.max() < task.vocab_size and targets.max() < task.vocab_size
    for row, asked in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert solve(task, row) == [None if token == -100 else token for token in asked]


def check_neighbours(task, indices, split):
    """An example does not depend on those that are made with it."""
    together = task.examples(np.array(indices), split)
    for row, index in enumerate(indices):
        alone = task.examples(np.array([index]), split)
        assert np.array_equal(together[0][row], alone[0][0]) and np.array_equal(together[1][row], alone[1][0])
