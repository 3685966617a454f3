"""Flip-flop language: reads and whole sets, on answers that are known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_recurrent import FlipFlop
from papers.mgrade import flip_flop


def test_flip_flop_is_judged_by_reads_and_whole_sets():
    task = FlipFlop(length=64, p_ignore=0.8)

    class Answers:
        device = "cpu"

        def __init__(self, change):
            self.change = change

        def eval(self):
            pass

        def __call__(self, input_ids, use_cache):
            logits = torch.from_numpy(flip_flop.possible_next(input_ids.numpy())).float() * 40 - 20
            self.change(logits, input_ids)
            return SimpleNamespace(logits=logits)

    def always_zero(logits, input_ids):
        logits[input_ids == 3] = torch.tensor([0.9, -0.2, -1.0, -1.0, -1.0])

    assert flip_flop.measure(Answers(lambda logits, ids: None), task, 30) == (1, 1)
    reads, sets = flip_flop.measure(Answers(always_zero), task, 200)
    _, targets = task.examples(np.arange(200), "test")
    assert reads == (targets == 0).sum() / (targets >= 0).sum() and 0.4 < reads < 0.6
    assert sets == pytest.approx(1 - (targets == 1).sum() / targets.size)
    item = flip_flop.PredictionSets(task, 10).__getitems__([3])[0]
    assert item["labels"].shape == (64, 5) and item["labels"].sum(-1).unique().tolist() == [1, 2, 3]
    assert flip_flop.set_loss(SimpleNamespace(logits=item["labels"] * 40 - 20), item["labels"]) < 1e-8


def test_flip_flop_possible_next_tokens():
    task = FlipFlop(length=64, p_ignore=0.5)
    inputs, targets = task.examples(np.arange(30))
    possible = flip_flop.possible_next(inputs)
    assert possible.shape == (30, 64, 5)
    for row, sets in zip(inputs.tolist(), possible.tolist(), strict=True):
        memory = None
        for place, token in enumerate(row):
            if place % 2:
                memory = token if row[place - 1] == 2 else memory
                expected = {2, 3, 4}
            else:
                expected = {memory} if token == 3 else {0, 1}
            assert {number for number, allowed in enumerate(sets[place]) if allowed} == expected
    reads = targets >= 0
    assert (possible[reads].argmax(-1) == targets[reads]).all()
