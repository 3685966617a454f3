"""Checks of a task's examples: against a slow solver written from its definition, and as pure functions."""

import numpy as np


def check_targets(task, solve):
    """The targets equal the result of `solve(task, row)`, which has None where there is no target."""
    inputs, targets = task.examples(np.arange(60))
    assert inputs.shape == targets.shape == (60, task.length)
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.min() >= 0 and inputs.max() < task.vocab_size and targets.max() < task.vocab_size
    for row, asked in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert solve(task, row) == [None if token == -100 else token for token in asked]


def check_neighbours(task, indices, split):
    """An example does not depend on the others of its batch."""
    together = task.examples(np.array(indices), split)
    for row, index in enumerate(indices):
        alone = task.examples(np.array([index]), split)
        assert np.array_equal(together[0][row], alone[0][0]) and np.array_equal(together[1][row], alone[1][0])
