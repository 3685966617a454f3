"""Flip-flop and copying as streams of bytes: what is asked."""

import itertools

import numpy as np

from papers import load_experiment
from papers.learner.task_rules import task_bytes, task_examples

ROWS = load_experiment("task-rules").rows("small")


def row_of(task):
    return next(row | {"seed": 3} for row in ROWS if row["task"] == task)


def test_the_byte_after_a_read_is_the_last_bit_written():
    inputs, asked = task_examples(row_of("flip-flop"), range(20), "train")
    for text, reads in zip(inputs.astype(np.uint8), asked, strict=True):
        letters = bytes(text).decode()
        for at in np.flatnonzero(reads):
            assert letters[at] == "3" and letters[at + 1] == letters[letters.rindex("2", 0, at) + 1]


def test_after_the_marker_the_symbols_are_read_again():
    settings = row_of("copying")
    inputs, asked = task_examples(settings, range(20), "train")
    count = settings["task_options"]["num_tokens"]
    assert (asked.sum(1) == count).all() and (inputs[:, -count - 1] == ord("5")).all()
    following = inputs[:, 1:][asked[:, :-1]].reshape(20, count)
    assert (following == inputs[:, :count]).all() and len(np.unique(following)) == 4


def test_the_stream_has_an_end_byte_after_each_example():
    inputs, _ = task_examples(row_of("copying"), range(150), "train")
    expected = b"".join(bytes(text.astype(np.uint8)) + b"\0" for text in inputs)
    assert bytes(itertools.islice(task_bytes(row_of("copying")), len(expected))) == expected
