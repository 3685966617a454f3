"""Exported learners of vectors and their targets in C, compared with `VectorLearner`."""

import ctypes
import functools
import shutil
import subprocess

import numpy as np
import pytest
import torch
from c_learner_cases import (
    BAD_INPUT,
    COMPILER,
    OK,
    SANITIZERS,
    STRICT,
    CompiledLearner,
    DoubleLearner,
    macro,
    write,
)

import hf_recurrent as hf
from hf_recurrent.export.c_learner import c_vector_learner

pytest.importorskip("hf_recurrent.kernels.block_cpu")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="gcc is not installed")
SIZES = {"hidden_size": 8, "state_size": 6}


def build():
    # 4 targets: the factor of the loss, 1/8, is exact in float32, which the constants of the recorded step are.
    return hf.VectorLearner.new(2, num_targets=4, seed=1, config=SIZES, learning_rate=1e-3, window=50)


@functools.cache
def exported():
    return c_vector_learner(build(), "tiny")


def series(size):
    """Vectors, and targets that depend on the present and the last one."""
    inputs = np.random.default_rng(0).normal(size=(size, 2)).astype(np.float32)
    before = np.roll(inputs, 1, 0)
    targets = 5 + inputs[:, 0], before[:, 1], inputs[:, 1] - before[:, 0], inputs.sum(1)
    return inputs, np.stack(targets, 1).astype(np.float32)


def call(learner, name, *arrays):
    """The outcome of a function of a learner in single precision, which may write to the last array."""
    addresses = [array.ctypes.data_as(ctypes.c_void_p) for array in arrays]
    return getattr(learner.library, f"tiny_{name}")(learner.memory, *addresses)


def learn(learner, vector, target):
    score = np.zeros(1, np.float32)
    assert call(learner, "learn", vector, target, score) == OK
    return float(score[0])


def predict(learner, vector):
    target = np.zeros(4, np.float32)
    assert call(learner, "predict", vector, target) == OK
    return target


def test_scores_and_predictions_are_those_of_python(tmp_path):
    learner, python = CompiledLearner(exported(), tmp_path), build()
    for number, (vector, target) in enumerate(zip(*series(120), strict=True)):
        if number == 60:
            learner.reset(), python.reset()
        before = learner.save()
        np.testing.assert_allclose(predict(learner, vector), python.predict(vector), rtol=1e-4, atol=1e-5)
        if number % 60:  # at the beginning of a series, the state is zeroed
            assert learner.save() == before
        assert learn(learner, vector, target) == pytest.approx(python.learn(vector, target), rel=1e-4)


def test_scores_in_double_precision_are_those_of_python(tmp_path):
    start = "for (int i = 0; i < TINY_TARGETS; i++) learner->saved.errors[i] = 1;"
    learner, python = DoubleLearner(exported(), tmp_path, 1e-3, start), build()
    python = hf.VectorLearner(python.model.double(), learning_rate=1e-3, window=50, targets=True)
    for vector, target in zip(*series(100), strict=True):
        score, vector, target = ctypes.c_double(), vector.astype("f8"), target.astype("f8")
        addresses = [array.ctypes.data_as(ctypes.c_void_p) for array in (vector, target)]
        assert learner.library.tiny_learn(learner.memory, *addresses, ctypes.byref(score)) == OK
        assert score.value == pytest.approx(python.learn(vector, target), rel=1e-9)


def test_it_learns_what_depends_on_the_past(tmp_path):
    learner, (vectors, targets), errors = CompiledLearner(exported(), tmp_path), series(20_000), []
    for vector, target in zip(vectors, targets, strict=True):
        errors.append((predict(learner, vector) - target) ** 2)
        learn(learner, vector, target)
    of_last = np.mean(errors[-2000:], 0) / targets.var(0)
    assert (of_last < (0.01, 0.4, 0.2, 0.01)).all()  # the best without a memory: 0, 1, 0.5, 0


@pytest.mark.parametrize("size", [0, 1, 20])
def test_a_state_moves_between_c_and_python_bit_for_bit(size, tmp_path):
    (vectors, targets), learner, python = series(30), CompiledLearner(exported(), tmp_path), build()
    for vector, target in zip(vectors[:size], targets, strict=False):
        learn(learner, vector, target)
    content = learner.save()
    hf.load_c_state(python, content)
    assert hf.save_c_state(python) == content
    assert python.learn(vectors[size], targets[size]) == pytest.approx(
        learn(learner, vectors[size], targets[size]), rel=1e-4
    )
    assert learner.load(hf.save_c_state(python)) == OK
    np.testing.assert_allclose(predict(learner, vectors[29]), python.predict(vectors[29]), rtol=1e-4, atol=1e-5)


def test_what_is_refused(tmp_path):
    learner, python, (vectors, targets) = CompiledLearner(exported(), tmp_path), build(), series(3)
    learn(learner, vectors[0], targets[0])
    content = learner.save()
    for value in (np.nan, np.inf, 1e16):
        bad, wrong, score = np.float32([0, value]), np.float32([0, value, 0, 0]), np.zeros(1, np.float32)
        assert call(learner, "learn", bad, targets[1], score) == call(learner, "predict", bad, wrong) == BAD_INPUT
        assert call(learner, "learn", vectors[1], wrong, score) == BAD_INPUT
    assert learner.save() == content
    assert learner.load(content[:-1]) == learner.load(content[:50] + b"x" + content[51:]) == BAD_INPUT
    assert macro(exported(), "TARGETS") == 4
    with pytest.raises(ValueError, match="`target` is missing; a learner with targets needs one"):
        python.learn(vectors[0])
    with pytest.raises(ValueError, match=r"`target` has shape \(2,\); it must be \(4,\)"):
        python.learn(vectors[0], vectors[0])
    with pytest.raises(ValueError, match="`values` must be given for a learner with targets"):
        python.predict()
    with pytest.raises(ValueError, match="`target` is given, but the learner predicts the next vector"):
        hf.VectorLearner.new(2).learn(vectors[0], vectors[0])
    assert torch.equal(python.target_mean, torch.zeros(4))


PROGRAM = """#include <stdio.h>
#include <stdlib.h>
#include "tiny.h"

static struct tiny_learner learner;
static unsigned char weights[TINY_WEIGHTS_FILE_SIZE], saved[TINY_SAVED_SIZE];

int main(void) {
    const size_t size = fread(weights, 1, sizeof weights, stdin);
    float values[TINY_INPUTS], target[TINY_TARGETS], score;
    if (sizeof learner != TINY_LEARNER_BYTES || tiny_init(&learner, weights, size) != TINY_OK) return 1;
    for (int k = 0; k < 500; k++) { /* any bits */
        for (size_t i = 0; i < sizeof values; i++) ((unsigned char *)values)[i] = (unsigned char)(rand() >> 7);
        for (size_t i = 0; i < sizeof target; i++) ((unsigned char *)target)[i] = (unsigned char)(rand() >> 7);
        const int outcome = tiny_learn(&learner, values, target, &score);
        if (outcome != TINY_OK && outcome != TINY_BAD_INPUT) return 2;
        tiny_predict(&learner, values, target);
    }
    tiny_save(&learner, saved);
    for (int k = 0; k < 200; k++) {
        const size_t at = (size_t)rand() % sizeof saved;
        saved[at] ^= 64;
        if (tiny_load(&learner, saved, sizeof saved) != TINY_BAD_INPUT) return 3;
        saved[at] ^= 64;
    }
    return tiny_load(&learner, saved, sizeof saved) == TINY_OK ? 0 : 4;
}
"""


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_any_bits_under_sanitizers(compiler, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    write(exported(), tmp_path)
    (tmp_path / "main.c").write_text(PROGRAM)
    command = [compiler, *STRICT, *SANITIZERS, "main.c", "tiny.c", "-o", "main", "-lm"]
    subprocess.run(command, cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "main"], input=exported().weights, capture_output=True)
    assert done.returncode == 0, done.stderr
