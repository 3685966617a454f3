"""Kinds of bytes, windows that occur again, and losses by kind."""

import math

import numpy as np
import pytest
from counted_model import counted_model, word_corpus

from hf_recurrent import Corpus, evaluate_bits_per_byte
from hf_recurrent.evaluation.byte_kinds import ALL, CONTEXT, CONTEXTS, KINDS, bits_by_kind, byte_kinds, context_kinds
from hf_recurrent.evaluation.byte_windows import KnownWindows, is_repeated, window_hashes
from hf_recurrent.evaluation.counts_alone import CountsAlone


def test_windows_are_those_of_a_plain_loop():
    data = np.random.default_rng(0).integers(97, 100, 300, dtype=np.uint8).tobytes()
    other = np.random.default_rng(1).integers(97, 100, 200, dtype=np.uint8).tobytes()
    windows = [data[start : start + 5] for start in range(len(data) - 4)]
    assert is_repeated(window_hashes(data, 5)).tolist() == [
        window in windows[:start] for start, window in enumerate(windows)
    ]
    assert KnownWindows(other, 5).contains(window_hashes(data, 5)).tolist() == [window in other for window in windows]
    assert not KnownWindows(b"abc", 5).contains(window_hashes(data, 5)).any()
    assert not len(window_hashes(b"abc", 5))


def test_kinds_of_bytes():
    names = [KINDS[kind].split()[0] for kind in byte_kinds("x_1 = né(\n)".encode())]
    assert names == ["inside", "inside", "space", "punctuation", "space", "first", "inside", "inside", "punctuation",
                     "space", "punctuation"]  # fmt: skip


def test_kinds_of_contexts():
    repeated, known, end = b"0123456789ab", b"trainingtext", b"!"
    assert len(repeated) == len(known) == CONTEXT
    document = repeated + end + repeated + end + known + end
    kinds = context_kinds(document, KnownWindows(b"..." + known + b"...", CONTEXT))
    assert len(kinds) == len(document) - 1
    found = {position + 1: CONTEXTS[kind] for position, kind in enumerate(kinds)}  # of the byte at a position
    assert found[12] == "context new" and found[25] == "context repeated in the document"
    assert found[38] == "context only in training data"
    assert not context_kinds(b"short", KnownWindows(known, CONTEXT))[:-1].sum() % 2


def test_losses_add_up_to_those_of_the_evaluation():
    corpus = word_corpus((1, 40, 7, 90))
    model = counted_model(corpus)
    counts = CountsAlone(model.count_memory)
    found = bits_by_kind({"both": model, "counts": counts}, corpus, corpus[3].tobytes(), progress=False)
    shares, bits = found["shares"], found["bits_per_byte"]
    for group in (KINDS, CONTEXTS):
        assert sum(shares[name] for name in group) == pytest.approx(1)
        for method in bits.values():
            assert sum(shares[name] * method[name] for name in group) == pytest.approx(method[ALL])
    assert shares[CONTEXTS[0]] > 0.05 and bits["both"][CONTEXTS[0]] < bits["both, network"][CONTEXTS[0]]

    # Without end bytes, which belong to no kind, the sums are those of the evaluation.
    binary = Corpus(corpus.store, corpus.offsets, end_token_id=None)
    expected = evaluate_bits_per_byte(model, binary, progress=False)
    targets = (corpus.num_bytes - len(corpus)) * math.log(2)
    assert bits["both"][ALL] == pytest.approx(expected["nats"] / targets, rel=1e-5)
    assert bits["both, network"][ALL] == pytest.approx(expected["network_nats"] / targets, rel=1e-5)
