"""Mixing of predictions with counts of contexts."""

import io
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent import config_from_preset
from hf_recurrent.compression import mixed_predictor
from hf_recurrent.compression.archive import ArchiveError, read_header
from hf_recurrent.compression.files import compress, decompress
from hf_recurrent.compression.mixed_predictor import MixedPredictor, build_mixture
from hf_recurrent.compression.predictors import FrozenPredictor

pytest.importorskip("hf_recurrent.kernels.context_mixture_cpu")
RANDOM = np.random.default_rng(0)


class Fixed:
    """Predicts the same distribution always."""

    def __init__(self, rows: np.ndarray):
        self.probabilities, self.streams = rows, len(rows)

    def read(self, tokens):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, values):
        pass


def uniform(streams: int) -> np.ndarray:
    return np.full((streams, 256), 1 / 256)


def mixed(predictor, size: int) -> MixedPredictor:
    return MixedPredictor(predictor, build_mixture(predictor.streams, size))


def bits(predictor, data: np.ndarray) -> np.ndarray:
    """Bits of every byte of data (steps, B)."""
    found = []
    for tokens in data:
        rows = predictor.probabilities
        np.testing.assert_allclose(rows.sum(-1), 1, rtol=1e-9)
        found.append(-np.log2(rows[np.arange(len(tokens)), tokens]))
        predictor.read(tokens)
    return np.array(found)


def as_steps(data: bytes, streams: int = 1) -> np.ndarray:
    return np.frombuffer(data, np.uint8).reshape(streams, -1).T.copy()


@pytest.fixture(scope="module")
def text():
    return b"".join(b"%d bottles of beer on the wall\n" % number for number in range(40))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "state_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    return AutoModelForCausalLM.from_config(config_from_preset("memora-tiny", **sizes)).eval()


def test_a_repetition_costs_nearly_nothing():
    once = RANDOM.bytes(600)
    found = bits(mixed(Fixed(uniform(1)), 1200), as_steps(once + once))
    assert found[:600].mean() > 7.9 and found[620:].mean() < 0.3


def test_streams_share_what_they_learn():
    once = RANDOM.bytes(600)
    late = bytes(600)
    found = bits(mixed(Fixed(uniform(2)), 2400), as_steps(once + late + late + once, 2))
    assert found[620:, 1].mean() < 0.5


def test_a_good_model_is_trusted_and_a_bad_one_is_not():
    data = RANDOM.integers(0, 256, (2000, 1))
    data[RANDOM.random(2000) < 0.9] = 65
    good, bad = np.full((1, 256), 0.1 / 255), np.full((1, 256), 1e-6)
    good[:, 65] = 0.9
    bad[:, 66] = 1 - 255e-6
    entropy = -(0.9 * math.log2(0.9) + 0.1 * math.log2(0.1 / 255))
    assert bits(mixed(Fixed(good), 2000), data).mean() < 1.1 * entropy
    assert bits(mixed(Fixed(bad), 2000), data)[1000:].mean() < 1.5 * entropy


def test_it_continues_where_it_was_saved():
    data = as_steps(b"the cat sat on the mat; the cat ate the rat. " * 6)
    whole = mixed(Fixed(uniform(1)), len(data))
    bits(whole, data[:100])
    other = mixed(Fixed(uniform(1)), len(data))
    saved = whole.state_dict()
    other.load_state_dict(saved | {"mixture": saved["mixture"].clone()})
    assert np.array_equal(bits(whole, data[100:]), bits(other, data[100:]))
    with pytest.raises(ValueError, match="another size"):
        mixed(Fixed(uniform(2)), len(data)).load_state_dict(saved)


def test_damaged_memory_is_read_without_a_crash():
    predictor = mixed(Fixed(uniform(3)), 100)
    memory = torch.randint(256, predictor.state_dict()["mixture"].shape, dtype=torch.uint8)
    memory[:16] = predictor.state_dict()["mixture"][:16]
    predictor.load_state_dict({"predictor": {}, "mixture": memory})
    for _ in range(50):
        predictor.read(RANDOM.integers(0, 256, 3))


def test_the_size_is_the_cross_entropy_of_the_mixture(model, text):
    packed = compress(text, model)
    predictor = mixed(FrozenPredictor(model), len(text))
    expected = bits(predictor, as_steps(text)).sum()
    assert expected <= 8 * len(packed) <= expected * 1.001 + 8 * 64
    assert len(packed) < 0.8 * len(compress(text, model, mixes=False))


def test_without_the_kernel_nothing_is_mixed(model, text, monkeypatch):
    packed = compress(text, model)
    assert read_header(io.BytesIO(packed), len(packed)).settings == {}
    monkeypatch.setattr(mixed_predictor, "ContextMixture", None)
    with pytest.raises(ArchiveError, match="kernel that mixes predictions was not built"):
        decompress(packed, model)
    alone = compress(text, model)
    assert decompress(alone, model) == text
    assert read_header(io.BytesIO(alone), len(alone)).settings == {"m": 0}
