"""Exported learners in C, compiled for this machine, compared with `OnlineLearner`."""

import functools
import subprocess

import numpy as np
import pytest
import torch
from breadth import some_of
from c_learner_cases import (
    BAD_INPUT,
    COMPILER,
    DIVERGED,
    NO_CONTEXT,
    OK,
    SANITIZERS,
    CompiledLearner,
    DoubleLearner,
    compile_c,
    macro,
    write,
)
from transformers import AutoModelForCausalLM

import hf_recurrent as hf
from hf_recurrent.export.c_learner import LearnerSetting, c_learner
from hf_recurrent.export.c_learner_plan import learner_setting

pytest.importorskip("hf_recurrent.kernels.block_cpu")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="gcc is not installed")
SIZES = {"hidden_size": 24, "state_size": 20, "num_hidden_layers": 2}

NGRAMS = {"ngram_orders": [2, 3, 5], "ngram_rows": 512}
# Preset, overrides, optimizer and its learning rate. Steps of RMSProp are a hundred times larger at first.
CASES = {
    "memora": ("memora-tiny", {}, "adamw", 1e-4),
    "hawk": ("hawk-tiny", {}, "adamw", 1e-4),
    "lru": ("lru-tiny", {}, "adamw", 1e-4),
    "complex": ("memora-tiny", {"recurrent_unit": "complex_glru"}, "adamw", 1e-4),
    "rmsprop": ("memora-tiny", {}, "rmsprop", 1e-6),
    "sgd": ("memora-tiny", {}, "sgd", 1e-2),
    "ngrams": ("memora-tiny", NGRAMS, "sgd", 1e-2),
    "ngrams and adamw": ("hawk-tiny", NGRAMS, "adamw", 1e-4),
}
COUNTS = {f"count_memory_{name}": size for name, size in {"slots": 64, "text": 1024, "window": 512, "rows": 4}.items()}
# Not among the others: its probabilities come in steps, so that rounding of the network may change them by more.
COUNTED = {
    "counts": ("memora-tiny", COUNTS, "sgd", 1e-2),
    "small counts": ("memora-tiny", COUNTS | {"count_memory_small": True}, "sgd", 1e-2),
}
# Of row-wise Adagrad, whose first steps have this size whatever the gradient, and the same relative rounding.
TABLE_RATE = 1e-3


def build_model(name):
    preset, overrides, *_ = (CASES | COUNTED)[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(hf.config_from_preset(preset, **SIZES, **overrides)).eval()


def export(model, optimizer="adamw", learning_rate=1e-4, **options):
    learner = python_learner(model, optimizer, learning_rate)
    return c_learner(model, LearnerSetting(learner.step.optimizer, **options), "tiny")


def python_learner(model, optimizer, learning_rate):
    rates = {"learning_rate": learning_rate, "table_learning_rate": TABLE_RATE}
    return hf.OnlineLearner(model, optimizer=optimizer, **rates)


@functools.cache
def exported(name):
    return export(build_model(name), *(CASES | COUNTED)[name][2:])


class Learner(CompiledLearner):
    """The compiled learner of a case."""

    def __init__(self, name, folder):
        super().__init__(exported(name), folder)


def stream(size):
    """Bytes with episodes of several lengths, of one byte too."""
    generator = np.random.default_rng(0)
    words = [generator.integers(97, 123, length, dtype=np.uint8).tobytes() for length in generator.integers(1, 8, 20)]
    data = b" ".join(words[k] for k in generator.integers(0, 20, size))[:size]
    return data[:30] + b"\0a\0\0" + data[30 : size - 4]


def record_losses(learner):
    """A list that gets the losses of all further bytes."""
    losses, add = [], learner.meter.add

    def adding(nats):
        losses.extend(nats.tolist())
        add(nats)

    learner.meter.add = adding
    return losses


def python_losses(name, data):
    learner = python_learner(build_model(name), *CASES[name][2:])
    losses = record_losses(learner)
    learner.read(data)
    assert learner.slow_because is None
    return np.array(losses), learner


def check_losses(name, folder, size):
    data = stream(size)
    learner = Learner(name, folder)
    found, (expected, python) = learner.read(data), python_losses(name, data)
    assert len(found) == len(expected) > 0.9 * size
    np.testing.assert_allclose(found[:500], expected[:500], rtol=1e-5)
    # Later, rounding adds up: plain torch and the compiled kernel differ by up to 4.5e-4 nats after 10,000 bytes.
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=1e-5)
    with torch.no_grad():
        logits = python.model(**python.context()).logits[0, -1].numpy()
    np.testing.assert_allclose(learner.predict(), logits, atol=1e-3)


@pytest.mark.parametrize("name", some_of(CASES, ("ngrams and adamw",)))
def test_losses_are_those_of_python(name, tmp_path):
    check_losses(name, tmp_path, 1000)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_losses_in_double_precision_are_those_of_python(name, tmp_path):
    data, start = stream(300), "learner->saved.last = -1;"
    start += f"learner->table_learning_rate = {TABLE_RATE};" if "ngrams" in name else ""
    learner = DoubleLearner(exported(name), tmp_path, CASES[name][3], start)
    python = python_learner(build_model(name).double(), *CASES[name][2:])
    losses = record_losses(python)
    python.read(data)
    np.testing.assert_allclose(learner.read(data), losses, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_of_a_long_stream_are_those_of_python(name, tmp_path):
    check_losses(name, tmp_path, 10_000)


def test_a_saved_learner_continues_with_the_same_bits(tmp_path):
    data, learner = stream(200), Learner("memora", tmp_path)
    learner.read(data[:100])
    saved = learner.save()
    expected = learner.read(data[100:])
    other = Learner("memora", tmp_path)
    damaged = [saved[:-1], saved + b"\0", b""]
    for place in (0, 4, 8, 12, 16, 20, len(saved) // 2, len(saved) - 1):
        damaged.append(saved[:place] + bytes([saved[place] ^ 16]) + saved[place + 1 :])
    before = other.memory.raw
    assert [other.load(content) for content in damaged] == [BAD_INPUT] * len(damaged)
    assert other.memory.raw == before
    assert other.load(saved) == OK
    assert np.array_equal(other.read(data[100:]), expected)
    weights = learner.text.weights
    assert learner.init(weights[:-1]) == learner.init(weights[:100] + b"x" + weights[101:]) == BAD_INPUT
    assert learner.init(exported("hawk").weights) == learner.init(saved) == BAD_INPUT


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", ["memora", "rmsprop", "sgd", "ngrams", "ngrams and adamw"])
@pytest.mark.parametrize("size", [0, 60, 31, 32])  # 30 bytes, and the ends of two episodes
def test_a_state_moves_between_c_and_python(name, size, tmp_path):
    data, learner = stream(200), Learner(name, tmp_path)
    expected, _ = python_losses(name, data)
    before = learner.read(data[:size])
    _, python = python_losses(name, b"")
    hf.load_c_state(python, learner.save())
    losses = record_losses(python)
    python.read(data[size:120])
    other = Learner(name, tmp_path)
    assert other.load(hf.save_c_state(python)) == OK
    after = other.read(data[120:])
    np.testing.assert_allclose(np.concatenate([before, losses, after]), expected, rtol=1e-5)
    assert python.bytes_read == 120 and python.updates == len(before) + len(losses)


@pytest.mark.long
@pytest.mark.parametrize("name", ["memora", "sgd", "ngrams", "small counts", "complex"])
def test_matrices_in_fixed_point_learn_and_move_to_python(name, tmp_path):
    text = export(build_model(name), *(CASES | COUNTED)[name][2:], numbers="int16")
    assert macro(text, "LEARNER_BYTES") < 0.9 * macro(exported(name), "LEARNER_BYTES")
    learner, data = CompiledLearner(text, tmp_path), stream(300)
    python = python_learner(build_model(name), *(CASES | COUNTED)[name][2:])
    losses = record_losses(python)
    python.read(data)
    assert np.mean(learner.read(data)) == pytest.approx(np.mean(losses), abs=0.02)
    content = learner.save()
    hf.load_c_state(python, content)
    assert python.model.get_input_embeddings().weight.mul(1 << 12).frac().abs().max() == 0
    assert learner.load(hf.save_c_state(python, "int16")) == OK and learner.save()[:12] == content[:12]
    # Probabilities of counts come in steps.
    expected = pytest.approx(record_next(python, data[0]), rel=0.05 if name in COUNTED else 1e-3)
    assert learner.learn(data[0])[1] == expected


def counted_learners(folder, name, *, zero_network):
    """A learner with a count memory, in C and in Python."""
    rate = 1e-30 if zero_network else 1e-2
    python = python_learner(build_model(name), "sgd", rate)
    if zero_network:  # logits and gradients of 0
        with torch.no_grad():
            python.model.get_input_embeddings().weight.zero_()
    return CompiledLearner(c_learner(python.model, learner_setting(python), "tiny"), folder), python


@pytest.mark.long
@pytest.mark.parametrize("name", COUNTED)
def test_a_count_memory_learns_as_in_python_bit_for_bit(name, tmp_path):
    learner, python = counted_learners(tmp_path, name, zero_network=True)
    losses, data = record_losses(python), stream(1000)
    python.read(data)
    assert np.array_equal(learner.read(data), np.float32(losses))
    with torch.no_grad():
        logits = python.model(**python.context()).logits[0, -1].numpy()
    assert np.array_equal(learner.predict(), logits)
    content = learner.save()
    assert learner.predict() is not None and learner.save() == content  # a prediction changes nothing
    assert hf.save_c_state(python)[20:] == content[20:]


@pytest.mark.long
@pytest.mark.parametrize("name", COUNTED)
def test_counts_and_network_learn_together_and_move_to_python(name, tmp_path):
    learner, python = counted_learners(tmp_path, name, zero_network=False)
    losses, data = record_losses(python), stream(300)
    python.read(data)
    np.testing.assert_allclose(learner.read(data), losses, rtol=1e-3)
    for size in (0, 1, 40):  # the first byte of an episode too
        learner.learn(0), learner.read(data[:size])
        content, (_, other) = learner.save(), counted_learners(tmp_path, name, zero_network=False)
        hf.load_c_state(other, content)
        # After an end, Python writes the zeros that C has from the next byte on.
        written = hf.save_c_state(other)
        assert size == 0 or written == content
        assert learner.load(written) == OK and learner.save() == written
        losses = record_losses(other)
        other.read(data[:60])
        assert learner.load(hf.save_c_state(other)) == OK
        np.testing.assert_allclose(learner.learn(data[60])[1], record_next(other, data[60]), rtol=1e-3)


def record_next(learner, byte):
    losses = record_losses(learner)
    learner.read(bytes([byte]))
    return losses[-1]


@pytest.mark.long
def test_damaged_states_are_refused_by_python(tmp_path):
    learner, (_, python) = Learner("memora", tmp_path), python_losses("memora", b"some text")
    saved, own = learner.save(), hf.save_c_state(python)
    with pytest.raises(ValueError, match="its checksum differs"):
        hf.load_c_state(python, saved[:100] + b"x" + saved[101:])
    for content in (b"", saved[:-1], saved + b"x", exported("memora").weights, b"x" + saved[1:]):
        with pytest.raises(ValueError, match="was not saved by a learner in C of this model"):
            hf.load_c_state(python, content)
    assert hf.save_c_state(python) == own
    with pytest.raises(ValueError, match="by the rule 'rtrl' with stride 1"):
        hf.save_c_state(hf.OnlineLearner(build_model("memora"), stride=2))


def test_wrong_tokens_and_missing_contexts(tmp_path):
    learner = Learner("memora", tmp_path)
    assert learner.predict() == NO_CONTEXT
    assert [learner.learn(token)[0] for token in (-1, 256, 1 << 30)] == [BAD_INPUT] * 3
    learner.read(b"abc")
    assert isinstance(learner.predict(), np.ndarray)
    learner.read(b"\0")  # the end of an episode
    assert learner.predict() == NO_CONTEXT


def test_a_loss_or_gradient_that_is_not_finite_changes_no_weight(tmp_path):
    learner = Learner("memora", tmp_path)
    learner.read(b"some text")
    for value in (np.nan, 1e30):  # the loss; then only the gradient, whose square is infinite
        saved = learner.save()
        learner.numbers[24 * ord("t") : 24 * ord("t") + 24] = value
        weights = learner.numbers[: (len(learner.text.weights) - 20) // 4].copy()
        outcome, _ = learner.learn(ord("t"))
        if outcome == DIVERGED:
            assert np.array_equal(learner.numbers[: len(weights)], weights, equal_nan=True)
        assert outcome == DIVERGED or np.isfinite(value)
        assert learner.load(saved) == OK
        learner.read(b"more")


def test_nothing_is_allocated_and_nothing_is_global(tmp_path):
    write(exported("memora"), tmp_path)
    compile_c(tmp_path, "-O2", "-c", "tiny.c")
    symbols = subprocess.run(["nm", "tiny.o"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert not [line for line in symbols.splitlines() if line.split()[-2] in "bBdDC"]
    assert "malloc" not in symbols


PROGRAM = """#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "tiny.h"

static struct tiny_learner learner;
static unsigned char weights[TINY_WEIGHTS_FILE_SIZE], saved[TINY_SAVED_SIZE];
static float logits[TINY_VOCAB_SIZE];

int main(void) {
    const char *text = "abracadabra abracadabra";
    const size_t size = fread(weights, 1, sizeof weights, stdin);
    float nats;
    if (sizeof learner != TINY_LEARNER_BYTES || tiny_init(&learner, weights, size) != TINY_OK) return 1;
    for (int k = 0; text[k]; k++)
        if (tiny_learn(&learner, text[k], &nats) != TINY_OK || tiny_predict(&learner, logits) != TINY_OK) return 2;
    tiny_save(&learner, saved);
    for (size_t k = 0; k < 1 + 2000000 / sizeof saved; k++) {
        const size_t at = (size_t)rand() % sizeof saved;
        const unsigned char change = (unsigned char)(1 + rand() % 255);
        saved[at] ^= change;
        if (tiny_load(&learner, saved, sizeof saved) != TINY_BAD_INPUT) return 4;
        saved[at] ^= change;
        if (tiny_load(&learner, saved, at) != TINY_BAD_INPUT) return 5;
    }
    for (int k = 0; k < 3000; k++) { /* a file with any content but `last`, and a checksum that fits */
        const size_t at = (size_t)rand() % (sizeof learner.saved - 4);
        ((unsigned char *)&learner.saved)[at] = (unsigned char)rand();
        if (k % 100 == 0) tiny_learn(&learner, rand() % 256, &nats), tiny_predict(&learner, logits);
    }
    return tiny_load(&learner, saved, sizeof saved) == TINY_OK && tiny_learn(&learner, 0, &nats) == TINY_OK ? 0 : 3;
}
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "memora",
        *COUNTED,
        *(pytest.param(one, marks=pytest.mark.slow) for one in CASES if one != "memora"),
    ],
)
def test_under_sanitizers(name, tmp_path):
    write(exported(name), tmp_path)
    (tmp_path / "main.c").write_text(PROGRAM)
    compile_c(tmp_path, *SANITIZERS, "main.c", "tiny.c", "-o", "main")
    done = subprocess.run([tmp_path / "main"], input=exported(name).weights, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_what_is_refused():
    model = build_model("memora")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"`setting\.optimizer` is SGD; it must be AdamW, RMSprop or SGD without"):
        c_learner(model, LearnerSetting(sgd))
    with pytest.raises(ValueError, match=r"`setting\.max_grad_norm` is -1; it must be finite and at least 0"):
        export(model, max_grad_norm=-1)
    with pytest.raises(ValueError, match="`model` is a MemoraModel; it must be a language model that reads tokens"):
        export(model.model)
    with pytest.raises(ValueError, match=r"torch\.float64 weights; a learner in C needs float32"):
        export(build_model("memora").double())
    config = hf.config_from_preset("memora-tiny", **SIZES, **NGRAMS)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"`setting\.optimizer` must have RowwiseAdagrad for the table of n-grams"):
        c_learner(model, LearnerSetting(torch.optim.SGD(model.parameters(), lr=0.1)))
    config = hf.config_from_preset("memora-tiny", **SIZES, recurrent_unit="gru")
    with pytest.raises(ValueError, match="is a GRU, whose recurrence mixes its channels"):
        export(AutoModelForCausalLM.from_config(config))
