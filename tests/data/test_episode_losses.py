"""Losses on whole episodes of a model with a count memory: mixture and network alone."""

import copy
import math

import numpy as np
import pytest
import torch
from counted_model import counted_model, word_corpus

from hf_recurrent import evaluate_bits_per_byte
from hf_recurrent.data.episode_source import EvaluationShare


@pytest.fixture(scope="module")
def corpus():
    return word_corpus()


@pytest.fixture(scope="module")
def model(corpus):
    return counted_model(corpus)


def logits_oracle(model, corpus, window: int | None = None) -> float:
    """Total nats from the logits of `forward`."""
    total = 0.0
    for episode in corpus:
        tokens = torch.from_numpy(episode.astype(np.int64))
        targets = torch.cat([tokens[1:], torch.zeros(1, dtype=torch.int64)])
        for part, following in zip(*(each.split(window or len(tokens)) for each in (tokens, targets)), strict=True):
            with torch.no_grad():
                logits = model(part[None]).logits[0].double()
            total += float(torch.nn.functional.cross_entropy(logits, following, reduction="sum"))
    return total


@pytest.mark.parametrize(("num_streams", "block_size"), [(1, 1000), (3, 33), (8, 7)])
def test_mixture_and_network_are_those_of_forward(model, corpus, num_streams, block_size):
    alone = copy.deepcopy(model)
    alone.count_memory = None
    result = evaluate_bits_per_byte(model, corpus, num_streams=num_streams, block_size=block_size, progress=False)
    assert result["nats"] == pytest.approx(logits_oracle(model, corpus), rel=1e-4)
    assert result["network_nats"] == pytest.approx(logits_oracle(alone, corpus), rel=1e-5)
    assert result["network_bits_per_byte"] == result["network_nats"] / math.log(2) / corpus.num_bytes
    assert result["bits_per_byte"] < result["network_bits_per_byte"] - 1  # the corpus repeats a few words
    plain = evaluate_bits_per_byte(alone, corpus, num_streams=num_streams, block_size=block_size, progress=False)
    assert "network_bits_per_byte" not in plain
    assert plain["nats"] == pytest.approx(result["network_nats"], rel=1e-5)


def test_windows_begin_without_short_term_memory(model, corpus):
    result = evaluate_bits_per_byte(model, corpus, num_streams=3, block_size=16, carry_state=False, progress=False)
    assert result["nats"] == pytest.approx(logits_oracle(model, corpus, 16), rel=1e-4)
    assert result["bits_per_byte"] > evaluate_bits_per_byte(model, corpus, progress=False)["bits_per_byte"]


def test_shares_add_up_and_an_empty_one_has_both_sums(model, corpus):
    whole = corpus.evaluate(model, EvaluationShare())
    shares = [corpus.evaluate(model, EvaluationShare(index, 6)) for index in range(6)]
    assert shares[5] == {"nats": 0.0, "network_nats": 0.0}
    for name, total in whole.items():
        assert sum(share[name] for share in shares) == pytest.approx(total, rel=1e-5)


def test_the_result_names_both(model, corpus):
    metrics = evaluate_bits_per_byte(model, corpus, progress=False)
    words = corpus.describe_result(metrics)
    network = f"(network alone {metrics['network_bits_per_byte']:.3f})"
    assert words.startswith(f"{metrics['bits_per_byte']:.3f} bits per byte {network} on 5 held-out documents")
