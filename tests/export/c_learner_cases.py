"""Exported learners in C, compiled for this machine, for the tests."""

import ctypes
import re
import shutil
import subprocess

import numpy as np

COMPILER = shutil.which("gcc") or shutil.which("cc")
STRICT = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-Wpedantic"]
SANITIZERS = ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
OK, BAD_INPUT, NO_CONTEXT, DIVERGED = range(4)
_FUNCTIONS = r"\b(expf|logf|sqrtf|fabsf|fmaxf|fminf|sinf|cosf|tanhf|erff|expm1f|log1pf|powf)\b"


def macro(learner, name):
    (line,) = (line for line in learner.header.splitlines() if line.startswith(f"#define TINY_{name} "))
    return int(line.split()[2])


def write(learner, folder, *, double=False):
    """Write the text, on request with double in place of float."""
    for name, text in (("tiny.h", learner.header), ("tiny.c", learner.source)):
        (folder / name).write_text(as_double(text) if double else text)


def as_double(text):
    text = re.sub(r"\bfloat\b", "double", text)
    text = re.sub(r"(\d\.?\d*(?:e[-+]?\d+)?)f\b", r"\1", text)
    return re.sub(_FUNCTIONS, lambda match: match[0][:-1], text)


def compile_c(folder, *arguments):
    done = subprocess.run([COMPILER, *STRICT, *arguments, "-lm"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


# In double precision, files are not read: they have the sizes of floats.
BEGIN = """#include <string.h>
#include "tiny.h"
size_t memory_size(void) { return sizeof(struct tiny_learner); }
void begin(struct tiny_learner *learner, const float *weights, double learning_rate) {
    memset(learner, 0, sizeof *learner);
    for (size_t i = 0; i < sizeof learner->saved.weights / sizeof learner->saved.weights[0]; i++)
        learner->saved.weights[i] = weights[i];
    learner->learning_rate = learning_rate;
    learner->max_grad_norm = 1;
    START
}
"""


class CompiledLearner:
    """The functions of a compiled learner, of tokens or vectors."""

    def __init__(self, text, folder):
        self.text = text
        write(text, folder)
        if not (folder / "tiny.so").exists():
            compile_c(folder, "-O2", "-fno-math-errno", "-shared", "-fPIC", "tiny.c", "-o", "tiny.so")
        self.library = ctypes.CDLL(folder / "tiny.so")
        self.memory = ctypes.create_string_buffer(macro(text, "LEARNER_BYTES"))
        self.numbers = np.frombuffer(self.memory, dtype="<f4")
        assert self.init(text.weights) == OK

    def init(self, content):
        return self.library.tiny_init(self.memory, content, ctypes.c_size_t(len(content)))

    def learn(self, item):
        """The outcome and the loss or score of a token or vector."""
        number = ctypes.c_float()
        if not isinstance(item, int | np.integer):
            item = np.ascontiguousarray(item, dtype="<f4")
            item = item.ctypes.data_as(ctypes.c_void_p)
        outcome = self.library.tiny_learn(self.memory, item, ctypes.byref(number))
        return outcome, number.value

    def read(self, data):
        """Losses of all items that have one."""
        results = [self.learn(item) for item in data]
        assert all(outcome == OK for outcome, _ in results)
        return np.array([number for _, number in results if number])

    def predict(self, size="VOCAB_SIZE"):
        values = np.zeros(macro(self.text, size), dtype="<f4")
        outcome = self.library.tiny_predict(self.memory, values.ctypes.data_as(ctypes.c_void_p))
        return values if outcome == OK else outcome

    def reset(self):
        self.library.tiny_reset(self.memory)

    def save(self):
        content = ctypes.create_string_buffer(macro(self.text, "SAVED_SIZE"))
        self.library.tiny_save(self.memory, content)
        return content.raw

    def load(self, content):
        return self.library.tiny_load(self.memory, content, ctypes.c_size_t(len(content)))


class DoubleLearner:
    """The same learner in double precision."""

    def __init__(self, text, folder, learning_rate, start):
        write(text, folder, double=True)
        (folder / "begin.c").write_text(BEGIN.replace("START", start))
        compile_c(folder, "-O2", "-shared", "-fPIC", "tiny.c", "begin.c", "-o", "double.so")
        self.library = ctypes.CDLL(folder / "double.so")
        self.library.memory_size.restype = ctypes.c_size_t
        self.memory = ctypes.create_string_buffer(self.library.memory_size())
        self.library.begin(self.memory, text.weights[20:], ctypes.c_double(learning_rate))

    def read(self, data):
        losses = []
        for item in data:
            number = ctypes.c_double()
            if not isinstance(item, int):
                item = np.ascontiguousarray(item, dtype="<f8")
                item = item.ctypes.data_as(ctypes.c_void_p)
            assert self.library.tiny_learn(self.memory, item, ctypes.byref(number)) == OK
            losses += [number.value] if number.value else []
        return np.array(losses)
