"""ListOps against a recursive evaluator of its text, and its grammar."""

import numpy as np
import pytest
import torch

from hf_recurrent import ListOps, collate_sequences
from hf_recurrent.tasks.classification import TOKENS


def evaluate(words):
    """(value, depth, remaining words) of the expression at the beginning of a list of words."""
    word, *rest = words
    if not word.startswith("["):
        return int(word), 1, rest
    values, depths = [], []
    while rest[0] != "]":
        value, depth, rest = evaluate(rest)
        values.append(value)
        depths.append(depth)
    assert 2 <= len(values) <= 10
    value = {
        "[MIN": np.min,
        "[MAX": np.max,
        "[MED": lambda numbers: int(np.median(numbers)),
        "[SM": lambda numbers: sum(numbers) % 10,
    }[word](values)
    return int(value), 1 + max(depths), rest[1:]


@pytest.mark.parametrize("bounds", [(500, 2000), (4, 40)])
def test_labels_are_the_values_of_the_expressions(bounds):
    dataset = ListOps(60, min_length=bounds[0], max_length=bounds[1])
    assert dataset.vocab_size == len(TOKENS) == 16
    depths = set()
    for index in range(60):
        item = dataset[index]
        assert bounds[0] <= len(item["input_ids"]) <= bounds[1] and item["input_ids"].dtype == torch.int64
        value, depth, rest = evaluate([TOKENS[token] for token in item["input_ids"].tolist()])
        assert (value, rest) == (item["labels"], [])
        depths.add(depth)
    # Long expressions need all allowed levels.
    assert depths == {10} if bounds[0] == 500 else len(depths) > 2


def test_depth_and_arguments_are_limited():
    dataset = ListOps(200, min_length=1, max_length=40, max_depth=2, max_args=3)
    texts = [dataset.show(index) for index in range(200)]
    assert {text.count("[") for text in texts} == {0, 1}
    assert {len(text.split()) for text in texts} == {3, 6, 7}  # with "= value"; a digit, two and three arguments
    assert sum("[" in text for text in texts) / 200 == pytest.approx(0.25, abs=0.1)


def test_an_example_depends_on_seed_split_and_index_only():
    options = {"min_length": 10, "max_length": 60}
    dataset, longer = ListOps(5, **options), ListOps(500, **options)
    shown = [dataset.show(index) for index in (3, 0, 4, 1, 2)]
    assert shown == [longer.show(index) for index in (3, 0, 4, 1, 2)]
    others = [ListOps(5, "validation", **options), ListOps(5, seed=1, **options)]
    assert len({*shown, *(other.show(index) for other in others for index in range(5))}) == 15
    # A change here would silently change the data of every measured number.
    assert dataset.show(0) == (
        "[MAX 5 6 6 [MED [MED [MED 6 0 1 1 1 ] 7 8 [MIN 7 0 0 [MIN 2 0 1 ] 7 8 ] ] 1 3 2 3 0 ] 2 7 7 7 ] = 7"
    )


def test_all_values_occur_and_batches_are_padded():
    dataset = ListOps(300, min_length=4, max_length=60)
    labels = [dataset[index]["labels"] for index in range(300)]
    assert set(labels) == set(range(10))
    items = [dataset[index] for index in range(4)]
    batch = collate_sequences(items)
    longest = max(len(item["input_ids"]) for item in items)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (4, longest)
    assert batch["labels"].tolist() == labels[:4]
    for row, item in enumerate(items):
        size = len(item["input_ids"])
        assert torch.equal(batch["input_ids"][row, :size], item["input_ids"])
        assert batch["attention_mask"][row].tolist() == [1] * size + [0] * (longest - size)
        assert not batch["input_ids"][row, size:].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "dev"}, "`split` is 'dev'"),
        ({"max_args": 1}, "`max_args` is 1"),
        ({"min_length": 9, "max_length": 8}, "`max_length` is 8; it must be an integer of at least 9"),
        ({"num_examples": 0}, "`num_examples` is 0"),
        (
            {"min_length": 5, "max_length": 5, "max_args": 2},
            "they must allow one of 2,000 expressions",
        ),
    ],
)
def test_bad_arguments(arguments, message, monkeypatch):
    monkeypatch.setattr("hf_recurrent.tasks.classification._MOST_DRAWS", 2000)
    with pytest.raises(ValueError, match=message):
        ListOps(**arguments)
    with pytest.raises(ValueError, match="`items` holds no sequence"):
        collate_sequences([{"labels": 1}])
