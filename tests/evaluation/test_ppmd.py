"""PPMd as a baseline: sizes as those of one encoder that reads everything."""

import pytest
from counted_model import word_corpus

from hf_recurrent.evaluation import compressors

pyppmd = pytest.importorskip("pyppmd")
MEMORY = 400 << 20


def compressed(data: bytes, order: int) -> int:
    encoder = pyppmd.Ppmd7Encoder(order, MEMORY)
    return len(encoder.encode(data)) + len(encoder.flush())


@pytest.mark.parametrize("before", [b"", b"def x = return self.(1)\n" * 20])
def test_every_episode_is_compressed_after_the_same_bytes(before):
    corpus = word_corpus((3, 200, 40))
    found = compressors.ppmd_bits_per_byte(corpus, before, orders=(2, 8))
    assert list(found) == [2, 8]
    for order, bits in found.items():
        start = compressed(before, order) if before else 0
        sizes = [compressed(before + episode.tobytes(), order) - start for episode in corpus]
        assert bits == 8 * sum(sizes) / corpus.num_bytes


def test_bytes_before_help():
    corpus = word_corpus((3, 200, 40))
    alone, primed = (
        compressors.ppmd_bits_per_byte(corpus, before, orders=(8,))[8] for before in (b"", corpus[1].tobytes())
    )
    assert primed < alone / 2


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(compressors, "has_ppmd", lambda: False)
    with pytest.raises(ImportError, match=r"hf-recurrent\[baselines\]"):
        compressors.ppmd_bits_per_byte(word_corpus((3,)))


@pytest.mark.parametrize("before", [b"", bytes(1 << 20)])
def test_a_program_that_fails_is_an_error(monkeypatch, tmp_path, before):
    monkeypatch.setattr(compressors, "_PROGRAM", str(tmp_path / "none.py"))
    with pytest.raises(RuntimeError, match="PPMd of order 8 ended with status 2"):
        compressors.ppmd_bits_per_byte(word_corpus((3,)), before, orders=(8,))
