"""Samples of Python: what parses, what is copied, what repeats itself."""

import pytest
from counted_model import counted_model, word_corpus

from hf_recurrent import Corpus
from hf_recurrent.evaluation.byte_windows import KnownWindows
from hf_recurrent.evaluation.python_samples import (
    function_headers,
    measure_samples,
    parses,
    sample_continuations,
)

HEADER = b"def f(x):\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"    return x\n", True),
        (b"    y = x\n    if y:\n        retu", True),  # the unfinished `if` goes
        (b"    y = x\n    z = (x,\n         x", True),
        (b"    y = x\n    try:\n        y = 2\n", True),
        (b"    y = x\n    '''A string that does not\n", True),
        (b"    '''A string that does not end.\n    y = x\n    return y\n", False),
        (b"    retu", False),
        (b"    if x:\n    y = 1\n    return y\n", False),
        (b"    y = = 1\n    return x\n", False),
        (b"    y = (x]\n    return x\n", False),
        (b"\x00\n", False),
    ],
)
def test_what_parses(body, expected):
    assert parses(HEADER + body) == expected


def test_headers_are_lines_that_a_body_can_follow():
    source = (
        b"def a(x):\n  pass\nclass B:\n    def c(self):\n        pass\nasync def d() -> int:\n  pass\ndef e(\n  x):\n"
    )
    corpus = Corpus.from_documents([source, b"def a(x):\n    return 1\ndef ((:\n", b"def g(x=1):\n  pass\n"])
    assert function_headers(corpus, 10) == [b"def a(x):\n", b"async def d() -> int:\n", b"def g(x=1):\n"]
    assert function_headers(corpus, 2) == [b"def a(x):\n", b"async def d() -> int:\n"]


def test_shares():
    training = b"import sys; print(sys.version_info, 42)\n"
    samples = [training[:35], b"0123456789abcdefghij" * 2, b"    return x\n"]
    found = measure_samples([HEADER] * 3, samples, KnownWindows(training, 30))
    assert found["parses"] == pytest.approx(1 / 3)
    assert found["copied"] == pytest.approx(6 / (6 + 11 + 0))
    assert found["repeated"] == pytest.approx(1 / (16 + 21 + 0))


def test_samples_do_not_depend_on_their_batch(monkeypatch):
    corpus = word_corpus()
    model = counted_model(corpus)
    prompts = [b"def ", b"return self.", b"x"]
    samples = sample_continuations(model, prompts, 12, temperature=1e-4)
    assert [len(sample) <= 12 for sample in samples] == [True] * 3
    monkeypatch.setattr("hf_recurrent.evaluation.python_samples._BATCH", 1)
    assert sample_continuations(model, prompts, 12, temperature=1e-4) == samples
