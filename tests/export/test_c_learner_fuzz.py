"""`NAME_load` of every kind of learner in C, with damaged, cut, and forged states, under sanitizers."""

import shutil
import subprocess

import pytest
from breadth import some_of
from c_learner_cases import COMPILER, SANITIZERS, STRICT, write
from test_c_learner import build_model, export, exported
from test_c_target_learner import exported as exported_targets

import hf_recurrent as hf
from hf_recurrent.export.c_learner import c_vector_learner

pytestmark = pytest.mark.skipif(COMPILER is None, reason="gcc is not installed")
KINDS = {
    "memora": lambda: exported("memora"),
    "complex": lambda: exported("complex"),
    "bfloat16": lambda: export(build_model("memora"), numbers="bfloat16"),
    "int16": lambda: export(build_model("memora"), numbers="int16"),
    "ngrams": lambda: exported("ngrams"),
    "counts": lambda: exported("counts"),
    "small counts": lambda: exported("small counts"),
    "int16, one sensor": lambda: c_vector_learner(hf.VectorLearner.new(1), "tiny", "int16"),
    "vectors": lambda: c_vector_learner(hf.VectorLearner.new(2), "tiny"),
    "targets": exported_targets,
}
ROUNDS = {"counts": 4}  # 4 MB

# Forged states have a right checksum: whatever they hold, nothing outside of the struct is read or written.
PROGRAM = r"""#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "tiny.h"

static struct tiny_learner learner;
static unsigned char weights[TINY_WEIGHTS_FILE_SIZE + 1];
static unsigned char saved[TINY_SAVED_SIZE + 1], damaged[TINY_SAVED_SIZE + 1];

static uint32_t crc32_of(const unsigned char *x, size_t size) {
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < size; i++) {
        crc ^= x[i];
        for (int k = 0; k < 8; k++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return ~crc;
}

static int step(int forged) {
#ifdef TINY_INPUTS
    float values[TINY_INPUTS], score;
    for (int i = 0; i < TINY_INPUTS; i++) values[i] = (float)(rand() % 2000 - 1000);
#ifdef TINY_TARGETS
    float target[TINY_TARGETS];
    for (int i = 0; i < TINY_TARGETS; i++) target[i] = (float)(rand() % 2000 - 1000);
    tiny_predict(&learner, values, target);
    const int outcome = tiny_learn(&learner, values, target, &score);
#else
    const int outcome = tiny_learn(&learner, values, &score);
    tiny_predict(&learner, values);
#endif
#else
    static float logits[TINY_VOCAB_SIZE];
    float nats;
    const int outcome = tiny_learn(&learner, rand() % 40 ? rand() % 8 + 97 : rand() % 300 - 20, &nats);
    tiny_predict(&learner, logits);
#endif
    return forged || outcome == TINY_OK || outcome == TINY_BAD_INPUT;
}

int main(int count, char **arguments) {
    const int rounds = count > 1 ? atoi(arguments[1]) : 200;
    const size_t size = fread(weights, 1, sizeof weights, stdin);
    srand(count > 2 ? (unsigned)atoi(arguments[2]) : 1);
    if (sizeof learner != TINY_LEARNER_BYTES || tiny_init(&learner, weights, size) != TINY_OK) return 1;
    for (int k = 0; k < 400; k++) if (!step(0)) return 2;
    tiny_save(&learner, saved);
    for (int k = 0; k < rounds; k++) {
        memcpy(damaged, saved, sizeof saved);
        const int changes = 1 + rand() % 8;
        for (int c = 0; c < changes; c++) {
            const size_t at = ((size_t)rand() * 32768u + (size_t)rand()) % (rand() % 3 ? TINY_SAVED_SIZE : 64);
            damaged[at] ^= (unsigned char)(1 + rand() % 255);
        }
        const int outcome = tiny_load(&learner, damaged, TINY_SAVED_SIZE);
        if (outcome != TINY_BAD_INPUT && memcmp(damaged, saved, TINY_SAVED_SIZE)) return 3;
        if (tiny_load(&learner, saved, (size_t)rand() % TINY_SAVED_SIZE) != TINY_BAD_INPUT) return 4;
        if (tiny_load(&learner, saved, TINY_SAVED_SIZE + 1) != TINY_BAD_INPUT) return 5;
        if (tiny_init(&learner, damaged, TINY_SAVED_SIZE) != TINY_BAD_INPUT) return 6;
        memcpy(damaged, saved, 20); /* a header and a checksum that are right */
        const uint32_t crc = crc32_of(damaged + 20, TINY_SAVED_SIZE - 20);
        memcpy(damaged + 16, &crc, 4);
        if (tiny_load(&learner, damaged, TINY_SAVED_SIZE) == TINY_OK) {
            for (int s = 0; s < 40; s++) step(1);
        }
        if (tiny_load(&learner, saved, TINY_SAVED_SIZE) != TINY_OK) return 7;
        if (!step(0)) return 8;
    }
    return 0;
}
"""


@pytest.mark.parametrize("compiler", ["gcc", pytest.param("clang", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", some_of(KINDS, ("targets", "int16, one sensor")))
def test_damaged_and_forged_states_do_no_harm(kind, compiler, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    learner = KINDS[kind]()
    write(learner, tmp_path)
    (tmp_path / "main.c").write_text(PROGRAM)
    command = [compiler, *STRICT, *SANITIZERS, "main.c", "tiny.c", "-o", "main", "-lm"]
    subprocess.run(command, cwd=tmp_path, check=True)
    command = [tmp_path / "main", str(ROUNDS.get(kind, 30))]
    done = subprocess.run(command, input=learner.weights, capture_output=True)
    assert done.returncode == 0, done.stderr
