"""Synthetic tasks: the bound of modular arithmetic."""

import numpy as np
import pytest

from hf_recurrent import ModularArithmetic
from papers.smt.tasks import best_answers


def test_best_answers_of_a_linear_rule():
    task = ModularArithmetic(num_shots=8, max_a=2, max_b=6, vocab_size=7)
    inputs, targets = task.examples(np.arange(3000))
    best = best_answers(task, inputs)
    assert np.array_equal(best == -100, targets == -100)
    accuracy = (best == targets)[:, 0::2].mean(0)
    assert accuracy[0] == pytest.approx(1 / 7, abs=0.03)  # all b are equally likely, so x_0 tells nothing
    # V is prime: two different x determine a and b, and after the first pair one of a few a is guessed.
    assert 0.3 < accuracy[1] < 0.6 and accuracy[-1] > 0.99 and (np.diff(accuracy) > -0.02).all()
    # Against a plain loop.
    for row, chosen in zip(inputs[:20].tolist(), best[:20].tolist(), strict=True):
        for shot in range(8):
            votes = [0] * 7
            for a in range(3):
                for b in range(7):
                    if all((a * row[2 * i] + b) % 7 == row[2 * i + 1] for i in range(shot)):
                        votes[(a * row[2 * shot] + b) % 7] += 1
            assert votes[chosen[2 * shot]] == max(votes) > 0
    certain = ModularArithmetic(num_shots=3, max_a=0, max_b=0, vocab_size=5)
    assert (certain.examples(np.arange(9))[1][:, 0::2] == 0).all()
