"""Exported learners of vectors in C, compared with `VectorLearner`."""

import functools
import subprocess

import numpy as np
import pytest
import torch
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

import hf_recurrent as hf
from hf_recurrent.export.c_learner import c_vector_learner

pytest.importorskip("hf_recurrent.kernels.block_cpu")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="gcc is not installed")
RATES = {"adamw": 1e-3, "rmsprop": 1e-5, "sgd": 1e-2}
START = "for (int i = 0; i < TINY_INPUTS; i++) learner->saved.errors[i] = 1;"


def build(optimizer="adamw", inputs=2, **settings):
    config = {"hidden_size": 8, "state_size": 6}
    settings = {"learning_rate": RATES[optimizer], "window": 50} | settings
    return hf.VectorLearner.new(inputs, seed=1, config=config, optimizer=optimizer, **settings)


@functools.cache
def exported(optimizer):
    return c_vector_learner(build(optimizer), "tiny")


def series(size, inputs=2):
    generator = np.random.default_rng(0)
    times = np.arange(size)[:, None]
    waves = 20 + 3 * np.sin(times / (5 + 2 * np.arange(inputs))) + 0.1 * generator.normal(size=(size, inputs))
    return waves.astype(np.float32)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", RATES)
def test_scores_and_predictions_are_those_of_python(optimizer, tmp_path):
    data, learner, python = series(60), CompiledLearner(exported(optimizer), tmp_path), build(optimizer)
    assert learner.predict("INPUTS") == NO_CONTEXT
    for vector in data:
        outcome, score = learner.learn(vector)
        assert outcome == OK
        assert score == pytest.approx(python.learn(vector), rel=1e-4)
        np.testing.assert_allclose(learner.predict("INPUTS"), python.predict(), rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", RATES)
def test_scores_in_double_precision_are_those_of_python(optimizer, tmp_path):
    data, python = series(60), build(optimizer)
    learner = DoubleLearner(exported(optimizer), tmp_path, RATES[optimizer], START)
    other = hf.VectorLearner(python.model.double(), optimizer=optimizer, learning_rate=RATES[optimizer], window=50)
    expected = [other.learn(torch.from_numpy(vector).double()) for vector in data]
    np.testing.assert_allclose(learner.read(data), [score for score in expected if score], rtol=1e-9)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", RATES)
@pytest.mark.parametrize("size", [0, 1, 20])
def test_a_state_moves_between_c_and_python_bit_for_bit(optimizer, size, tmp_path):
    data, learner, python = series(30), CompiledLearner(exported(optimizer), tmp_path), build(optimizer)
    learner.read(data[:size])
    saved = learner.save()
    hf.load_c_state(python, saved)
    assert hf.save_c_state(python) == saved
    assert (python.vectors_read, python.updates) == (size, max(size - 1, 0))
    for vector in data[size:28]:
        assert python.learn(vector) == pytest.approx(learner.learn(vector)[1], rel=1e-4)
    content, other = hf.save_c_state(python), CompiledLearner(exported(optimizer), tmp_path)
    assert other.load(content) == OK and other.save() == content
    assert other.learn(data[28])[1] == pytest.approx(python.learn(data[28]), rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(("short", "size"), [("bfloat16", 0.75), ("int16", 0.6)])
def test_numbers_of_16_bits_learn_as_well_and_move_to_python(short, size, tmp_path):
    texts = {numbers: c_vector_learner(build(), "tiny", numbers) for numbers in ("float32", short)}
    data, scores, losses = series(3000), {}, {}
    for numbers, text in texts.items():
        (tmp_path / numbers).mkdir()
        learner = CompiledLearner(text, tmp_path / numbers)
        found = []
        for vector in data:
            found.append(learner.predict("INPUTS"))
            scores[numbers] = learner.learn(vector)
        losses[numbers] = np.square(np.array(found[-1000:]) - data[-1000:]).mean()
    assert losses[short] < 1.1 * losses["float32"] < 0.7 * np.square(np.diff(data[-1000:], axis=0)).mean()
    assert macro(texts[short], "SAVED_SIZE") < size * macro(texts["float32"], "SAVED_SIZE")
    python, content = build(), learner.save()
    hf.load_c_state(python, content)
    back = hf.save_c_state(python, short)
    # All but the random number and the checksum.
    assert back[20:-16] == content[20:-16] and back[-12:] == content[-12:]
    assert learner.load(back) == OK
    assert learner.learn(data[0])[1] == pytest.approx(python.learn(data[0]), rel=1e-4)


def test_another_series_begins_with_what_was_learned(tmp_path):
    data, learner, python = series(20), CompiledLearner(exported("adamw"), tmp_path), build()
    for _ in range(2):
        learner.reset(), python.reset()
        assert learner.predict("INPUTS") == NO_CONTEXT
        for vector in data:
            assert learner.learn(vector)[1] == pytest.approx(python.learn(vector), rel=1e-4)
    content = learner.save()
    learner.reset()
    hf.load_c_state(python, learner.save())
    assert python.last is None and not any(bool(part.any()) for part in python.state.values())
    assert learner.load(content) == OK


def test_bad_vectors_and_damaged_files_change_nothing(tmp_path):
    learner, data = CompiledLearner(exported("adamw"), tmp_path), series(20)
    learner.read(data)
    saved = learner.save()
    for value in (np.nan, np.inf, -np.inf, 1e16):
        assert learner.learn([0, value])[0] == BAD_INPUT
    assert learner.save() == saved
    for place in (0, 4, 8, 12, 16, 20, len(saved) // 2, len(saved) - 4, len(saved) - 1):
        damaged = saved[:place] + bytes([saved[place] ^ 16]) + saved[place + 1 :]
        assert learner.load(damaged) == BAD_INPUT
    assert learner.load(saved[:-1]) == learner.load(b"") == learner.load(exported("rmsprop").weights) == BAD_INPUT
    assert learner.save() == saved
    with pytest.raises(ValueError, match="its checksum differs"):
        hf.load_c_state(build(), saved[:100] + b"x" + saved[101:])


def test_extreme_values_are_learned_from_without_harm(tmp_path):
    learner = CompiledLearner(exported("adamw"), tmp_path)
    generator = np.random.default_rng(0)
    constant, huge = np.full((60, 2), 20.1), generator.choice([-1e15, 0, 1e-30, 1e15], (100, 2))
    for vector in (*constant, [20.1, 20.2], *huge, *series(50)):
        outcome, score = learner.learn(vector)
        assert outcome == OK and np.isfinite(score)
        assert np.isfinite(learner.predict("INPUTS")).all()


def test_a_loss_that_is_not_finite_changes_nothing(tmp_path):
    learner = CompiledLearner(exported("adamw"), tmp_path)
    learner.read(series(20))
    learner.numbers[0] = np.nan  # a weight
    before = learner.save()
    assert learner.learn([20, 20])[0] == DIVERGED
    assert learner.save() == before


def test_a_learner_of_one_sensor_needs_less_than_32_kb(tmp_path):
    """In the memory of a learner with the default sizes, its weights, and its code for this machine."""
    text = c_vector_learner(hf.VectorLearner.new(1), "tiny")
    write(text, tmp_path)
    compile_c(tmp_path, "-Os", "-c", "tiny.c")
    sizes = subprocess.run(["size", "tiny.o"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    code = int(sizes.splitlines()[1].split()[0])
    assert macro(text, "LEARNER_BYTES") + macro(text, "WEIGHTS_FILE_SIZE") + code < 32 * 1024


PROGRAM = """#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "tiny.h"

static struct tiny_learner learner;
static unsigned char weights[TINY_WEIGHTS_FILE_SIZE], saved[TINY_SAVED_SIZE];

int main(void) {
    const size_t size = fread(weights, 1, sizeof weights, stdin);
    float values[TINY_INPUTS], score;
    if (sizeof learner != TINY_LEARNER_BYTES || tiny_init(&learner, weights, size) != TINY_OK) return 1;
    for (int k = 0; k < 200; k++) { /* any bits */
        for (size_t i = 0; i < sizeof values; i++) ((unsigned char *)values)[i] = (unsigned char)(rand() >> 7);
        const int outcome = tiny_learn(&learner, values, &score);
        if (outcome != TINY_OK && outcome != TINY_BAD_INPUT) return 2;
        if (outcome == TINY_OK && tiny_predict(&learner, values) != TINY_OK) return 3;
    }
    tiny_save(&learner, saved);
    for (int k = 0; k < 200; k++) {
        const size_t at = (size_t)rand() % sizeof saved;
        const unsigned char change = (unsigned char)(1 + rand() % 255);
        saved[at] ^= change;
        if (tiny_load(&learner, saved, sizeof saved) != TINY_BAD_INPUT) return 4;
        saved[at] ^= change;
        if (tiny_load(&learner, saved, at) != TINY_BAD_INPUT) return 5;
    }
    return tiny_load(&learner, saved, sizeof saved) == TINY_OK ? 0 : 6;
}
"""


def test_any_bits_under_sanitizers(tmp_path):
    write(exported("adamw"), tmp_path)
    (tmp_path / "main.c").write_text(PROGRAM)
    compile_c(tmp_path, *SANITIZERS, "main.c", "tiny.c", "-o", "main")
    done = subprocess.run([tmp_path / "main"], input=exported("adamw").weights, capture_output=True)
    assert done.returncode == 0, done.stderr
