"""Exported learners on a Cortex-M4F and a Cortex-M7 in QEMU, by several compilers and under sanitizers."""

import shutil
import subprocess

import numpy as np
import pytest
from breadth import some_of
from c_learner_cases import COMPILER, SANITIZERS, STRICT, write
from cortex_m import CORTEX, CORTEX_COMPILER, INSTRUCTIONS_PER_TICK, needs_cortex, run_on_cortex
from test_c_learner import CASES, COUNTED, exported, stream

CLANG = shutil.which("clang")
needs_clang = pytest.mark.skipif(CLANG is None, reason="clang is not installed")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="gcc is not installed")
TEXT = stream(120)

# Prints the bits of all losses, then the instructions of a byte.
PROGRAM = """#include <stdio.h>
#include <string.h>
#include "tiny.h"
#include "data.h"

static struct tiny_learner learner;
#ifdef __arm__
static volatile uint32_t *const systick = (volatile uint32_t *)0xE000E010u;
#endif

int main(void) {
    if (tiny_init(&learner, weights, sizeof weights) != TINY_OK) return 1;
#ifdef __arm__
    systick[1] = 0xffffff;
    systick[2] = 0;
    systick[0] = 5;
    uint32_t ticks = 0;
#endif
    for (size_t k = 0; k < sizeof text; k++) {
        float nats;
        uint32_t bits;
#ifdef __arm__
        const uint32_t before = systick[2];
#endif
        if (tiny_learn(&learner, text[k], &nats) != TINY_OK) return 2;
#ifdef __arm__
        ticks += (before - systick[2]) & 0xffffffu;
#endif
        memcpy(&bits, &nats, sizeof bits);
        printf("%08lx\\n", (unsigned long)bits);
    }
#ifdef __arm__
    printf("ticks %lu\\n", (unsigned long)ticks);
#endif
    return 0;
}
"""


def write_program(name, folder):
    learner = exported(name)
    write(learner, folder)
    arrays = {"weights": learner.weights, "text": TEXT}
    lines = [
        f"static const unsigned char {array}[] = {{{', '.join(map(str, data))}}};" for array, data in arrays.items()
    ]
    (folder / "data.h").write_text("\n".join(lines) + "\n")
    (folder / "main.c").write_text(PROGRAM)


def parse(text) -> np.ndarray:
    """Losses in nats."""
    bits = [int(line, 16) for line in text.split("ticks")[0].split()]
    return np.array(bits, dtype="<u4").view("<f4")


def losses(folder, compiler, *arguments) -> np.ndarray:
    """Of the program, compiled for this machine."""
    command = [compiler, *STRICT, *arguments, "main.c", "tiny.c", "-o", "main", "-lm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    done = subprocess.run([folder / "main"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return parse(done.stdout)


@pytest.mark.long
@needs_compiler
@needs_cortex
@pytest.mark.parametrize("part", CORTEX)
@pytest.mark.parametrize("name", CASES | COUNTED)
def test_it_learns_on_a_cortex_m_as_on_this_machine(name, part, tmp_path, record_property):
    write_program(name, tmp_path)
    strict = [CORTEX_COMPILER, *STRICT, *CORTEX[part], "-O2", "-fno-math-errno", "-ffreestanding", "-c", "tiny.c"]
    subprocess.run(strict, cwd=tmp_path, check=True)
    text = run_on_cortex(tmp_path, part, ["-O2", "-fno-math-errno", "main.c", "tiny.o"])
    expected = losses(tmp_path, COMPILER, "-O2")
    np.testing.assert_allclose(parse(text), expected, rtol=1e-5)
    assert np.count_nonzero(expected) > 0.9 * len(TEXT)
    instructions = int(text.split("ticks")[1]) * INSTRUCTIONS_PER_TICK / np.count_nonzero(expected)
    record_property("instructions", float(instructions))
    # A multiplication with an addition is one instruction and two operations, and operands are loaded and stored.
    # Operations of counts are not planned.
    assert name in COUNTED or 0.5 < instructions / exported(name).footprint.operations < 6


@needs_compiler
@needs_clang
@pytest.mark.parametrize("name", some_of(CASES, ("rmsprop",)))
def test_compilers_agree(name, tmp_path):
    write_program(name, tmp_path)
    expected = losses(tmp_path, COMPILER, "-O2", "-fno-math-errno")
    found = losses(tmp_path, CLANG, "-O2", "-fno-math-errno")
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(losses(tmp_path, CLANG, *SANITIZERS), expected, rtol=1e-5)
