"""Memory and arithmetic of exported C before it is compiled, compared with compilers and with counted operations."""

import ctypes
import shutil
import subprocess

import pytest
from breadth import some_of
from c_learner_cases import compile_c, write
from cortex_m import CORTEX, CORTEX_COMPILER, needs_cortex_compiler
from test_c_learner import CASES, exported
from test_c_source import MODELS, build, needs_compiler

from hf_recurrent.export.c_footprint import Footprint
from hf_recurrent.export.c_source import c_step
from hf_recurrent.export.step_module import StepModule

CPLUSPLUS = shutil.which("g++")
needs_cplusplus = pytest.mark.skipif(CPLUSPLUS is None, reason="g++ is not installed")

# C as C++ whose floats and integers of products count their operations.
COUNTED = """#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
static long operations;
template <class T> struct Counted {
    T x;
    Counted() = default;
    template <class U> Counted(U value) : x(static_cast<T>(value)) {}
    template <class U> Counted(Counted<U> value) : x(static_cast<T>(value.x)) {}
    explicit operator double() const { return x; }
    explicit operator int() const { return static_cast<int>(x); }
    explicit operator uint64_t() const { return static_cast<uint64_t>(x); }
    Counted operator-() const { operations++; return -x; }
#define BINARY(OP) friend Counted operator OP(Counted a, Counted b) { operations++; return a.x OP b.x; } \\
    friend Counted &operator OP##=(Counted &a, Counted b) { return a = a OP b; }
    BINARY(+) BINARY(-) BINARY(*) BINARY(/)
#define COMPARED(OP) friend bool operator OP(Counted a, Counted b) { operations++; return a.x OP b.x; }
    COMPARED(<) COMPARED(>) COMPARED(<=) COMPARED(>=) COMPARED(==) COMPARED(!=)
};
typedef Counted<float> Float;
typedef Counted<long> Integer;
static double &operator+=(double &a, Float b) { operations++; return a += b.x; }
#define UNARY(F) static Float F(Float a) { operations++; return ::F(a.x); }
UNARY(expf) UNARY(expm1f) UNARY(logf) UNARY(log1pf) UNARY(sqrtf) UNARY(fabsf) UNARY(tanhf) UNARY(sinf) UNARY(cosf)
UNARY(erff)
static Float fmaxf(Float a, Float b) { operations++; return a.x > b.x ? a : b; }
static Float fminf(Float a, Float b) { operations++; return a.x < b.x ? a : b; }
static Float powf(Float a, Float b) { operations++; return ::powf(a.x, b.x); }
static Float ldexpf(Float a, int b) { return ::ldexpf(a.x, b); }
static Float frexpf(Float a, int *b) { return ::frexpf(a.x, b); }
#define restrict
#define float Float
#define int16_t Integer
#define int64_t Integer
"""
LEARNER = """#define int32_t Integer
#include "tiny.c"
#undef float
static tiny_learner learner;
extern "C" long count(const void *file, size_t size) {
    Float nats;
    if (tiny_init(&learner, file, size) != TINY_OK || tiny_learn(&learner, 'a', &nats) != TINY_OK) return -1;
    operations = 0;
    return tiny_learn(&learner, 'b', &nats) == TINY_OK ? operations : -2;
}
"""
STEP = """#define int32_t Integer
#include "tiny.c"
#undef float
static tiny_state state;
static Float inputs[TINY_INPUTS], outputs[TINY_OUTPUTS];
extern "C" long count(const void *file, size_t size) {
    tiny_reset(&state);
    operations = 0;
    return tiny_step(&state, ARGUMENT, outputs) == 0 ? operations : -1;
}
"""


def counted_operations(folder, program: str, content: bytes = b"") -> int:
    """Operations that `count` of a program counts."""
    (folder / "counted.cpp").write_text(COUNTED + program)
    command = [CPLUSPLUS, "-std=c++17", "-fpermissive", "-w", "-shared", "-fPIC", "counted.cpp", "-o", "counted.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    count = ctypes.CDLL(folder / "counted.so").count
    count.restype = ctypes.c_long
    return count(content, ctypes.c_size_t(len(content)))


@needs_cplusplus
@pytest.mark.parametrize("name", some_of(CASES, ("memora",)))
def test_operations_of_a_learner_are_those_that_run(name, tmp_path):
    learner = exported(name)
    write(learner, tmp_path)
    found = counted_operations(tmp_path, LEARNER, learner.weights)
    assert learner.footprint.operations == pytest.approx(found, rel=0.02)


def step_footprint(name) -> tuple[str, Footprint]:
    model, program, _ = build(name)
    step = c_step(program, "tiny", StepModule(model).state_names)
    return step.text, step.footprint


@needs_cplusplus
@pytest.mark.parametrize("name", some_of(MODELS, ("memora",)))
def test_operations_of_a_step_are_those_that_run(name, tmp_path):
    text, footprint = step_footprint(name)
    (tmp_path / "tiny.c").write_text(text)
    argument = "inputs" if "const float *values" in text else "'a'"
    found = counted_operations(tmp_path, STEP.replace("ARGUMENT", argument))
    assert footprint.operations == pytest.approx(found, rel=0.15)


def compiled_sizes(folder, file) -> tuple[int, int]:
    """(bytes of flash, bytes of stack) of a file compiled for a Cortex-M4."""
    subprocess.run(
        [CORTEX_COMPILER, "-std=c99", *CORTEX["cortex-m4"], "-Os", "-fstack-usage", "-c", file, "-o", "file.o"],
        cwd=folder,
        check=True,
    )
    done = subprocess.run(["arm-none-eabi-size", "file.o"], cwd=folder, capture_output=True, text=True, check=True)
    text, data, zeroed = map(int, done.stdout.splitlines()[1].split()[:3])
    assert data == zeroed == 0
    stack = max(int(line.split("\t")[1]) for line in (folder / "file.su").read_text().splitlines())
    return text, stack


@needs_cortex_compiler
@pytest.mark.parametrize("name", some_of(MODELS, ("memora", "mgrade digits")))
def test_sizes_of_a_step_are_those_of_a_compiler(name, tmp_path):
    text, footprint = step_footprint(name)
    (tmp_path / "step.c").write_text(text)
    flash, stack = compiled_sizes(tmp_path, "step.c")
    assert footprint.code == pytest.approx(flash - footprint.constants, rel=0.4)
    assert footprint.stack <= stack <= footprint.stack + 256
    assert f"{footprint.constants:,} bytes of weights" in text and f"RAM: {footprint.ram:,} bytes and" in text


@needs_compiler
def test_state_of_a_step_has_the_size_of_its_struct(tmp_path):
    for name in ("memora", "mgrade digits"):
        text, footprint = step_footprint(name)
        (tmp_path / "step.c").write_text(text)
        (tmp_path / "size.c").write_text(
            '#include "step.c"\nint main(void) { return sizeof(struct tiny_state) != SIZE; }\n'
        )
        compile_c(tmp_path, f"-DSIZE={footprint.ram}", "size.c", "-o", "size")
        assert subprocess.run([tmp_path / "size"]).returncode == 0


@needs_cortex_compiler
@pytest.mark.parametrize("name", some_of(CASES, ("memora",)))
def test_sizes_of_a_learner_are_those_of_a_compiler(name, tmp_path):
    learner = exported(name)
    write(learner, tmp_path)
    flash, stack = compiled_sizes(tmp_path, "tiny.c")
    footprint = learner.footprint
    assert footprint.code == pytest.approx(flash - (footprint.constants - len(learner.weights)), rel=0.2)
    assert footprint.stack == 0 and stack <= 1024
    assert f"RAM: {footprint.ram:,} bytes." in learner.header
