"""Contexts and futures against slices of each row; anchors and cuts."""

import numpy as np
import pytest
import torch
from smt_cases import episodes, random_batch

from hf_recurrent.trainers.smt.windows import (
    choose_anchors,
    choose_cuts,
    episode_bounds,
    gather_contexts,
    gather_futures,
)


@pytest.mark.parametrize(("context", "future"), [(4, 3), (12, 12), (1, 1)])
def test_windows_are_slices_of_one_episode(context, future):
    inputs, labels, resets = random_batch()
    starts, ends = episode_bounds(resets)
    anchors = torch.arange(inputs.shape[1]).expand_as(inputs)
    ids, mask = gather_contexts(inputs, starts, anchors, context)
    next_inputs, targets = gather_futures(inputs, labels, ends, anchors, future)
    for row in range(len(inputs)):
        for place, (start, end) in enumerate(episodes(resets[row])):
            expected = inputs[row, max(start, place - context + 1) : place + 1]
            assert ids[row, place][mask[row, place]].tolist() == expected.tolist()
            assert mask[row, place].tolist() == sorted(mask[row, place].tolist())  # padding on the left
            expected = labels[row, place : min(end, place + future)].tolist()
            assert targets[row, place].tolist() == expected + [-100] * (future - len(expected))
            following = inputs[row, place + 1 : place + len(expected)].tolist()
            assert next_inputs[row, place, : len(following)].tolist() == following


def test_an_anchor_before_the_block_has_no_context():
    inputs, _, resets = random_batch()
    _, mask = gather_contexts(inputs, episode_bounds(resets)[0], torch.full((3, 1), -1), 4)
    assert not mask.any()


def rows(count, step=0):
    return np.arange(count), np.stack([np.full(count, step), np.zeros(count, int)], 1)


def test_anchors_are_equally_likely_and_do_not_depend_on_who_asks():
    anchors = choose_anchors(*rows(6000), seed=1, first=3, last=7, num_anchors=2)
    assert (anchors[:, 0] < anchors[:, 1]).all()
    counts = np.bincount(anchors.ravel(), minlength=8)
    assert counts[:3].sum() == 0
    assert abs(counts[3:] / 12000 - 0.2).max() < 0.02
    streams, positions = rows(6000)
    part = choose_anchors(streams[100:110], positions[100:110], seed=1, first=3, last=7, num_anchors=2)
    assert (part == anchors[100:110]).all()
    assert (choose_anchors(*rows(6000, step=1), seed=1, first=3, last=7, num_anchors=2) != anchors).any()
    assert choose_anchors(*rows(2), seed=1, first=3, last=5, num_anchors=3).tolist() == [[3, 4, 5]] * 2


def test_cuts_leave_contexts_of_every_length():
    anchors = np.full((8000, 1), 10)
    cuts = choose_cuts(*rows(8000), seed=0, anchors=anchors, context_length=4, share=0.25)
    assert abs((cuts >= 0).mean() - 0.25) < 0.02
    lengths = 10 - cuts[cuts >= 0] + 1
    assert abs(np.bincount(lengths)[1:] / len(lengths) - 0.25).max() < 0.05
    assert set(lengths) == {1, 2, 3, 4}
    assert (choose_cuts(*rows(10), seed=0, anchors=anchors[:10], context_length=4, share=0) == -1).all()
    assert (choose_cuts(*rows(10), seed=0, anchors=anchors[:10], context_length=1, share=1) == 10).all()
