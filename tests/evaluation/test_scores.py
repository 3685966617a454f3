"""Scores of a model with a count memory are those of the mixture."""

import pytest
from counted_model import counted_model, word_corpus

from hf_recurrent import evaluate_bits_per_byte
from hf_recurrent.data.token_encoding import TokenEncoding
from hf_recurrent.evaluation.scores import score_blocks


def test_scores_are_those_of_the_mixture():
    corpus = word_corpus()
    model = counted_model(corpus)
    documents = [(f"{number}", iter([episode.tobytes()])) for number, episode in enumerate(corpus)]
    scores = [scores for _, scores in score_blocks(model, documents, TokenEncoding(None, False), block_size=50)]
    found = evaluate_bits_per_byte(model, corpus, progress=False)
    assert -sum(each.sum() for each in scores) == pytest.approx(found["nats"], rel=1e-5)
    assert found["nats"] < 0.9 * found["network_nats"]
