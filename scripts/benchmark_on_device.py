"""The figures of docs/on_device.md: bits, bytes, times and instructions of learners in C, and how far Python is.

    python scripts/benchmark_on_device.py LOG             # a log of 1 MB, and all other figures
    python scripts/benchmark_on_device.py                 # without the log

Two programs are timed in turns, in CPU time of one thread, and the shortest round counts, so that other programs on
the machine disturb little. Bytes of flash are the weights and the code of a Cortex-M4 at -Os, without the C library.
"""

import ctypes
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from benchmark_c_learner import bits, compile_c, learn_in_c, memory, nats_by_counts
from benchmarking import CPU, build_model, option_parser, report, seconds_in_turns

from hf_recurrent import ByteTokenizer, OnlineLearner, VectorLearner, save_c_learner
from hf_recurrent.export.c_source import c_step
from hf_recurrent.export.programs import export_step
from hf_recurrent.export.step_module import StepModule

SMALL = {"hidden_size": 24, "state_size": 24, "num_hidden_layers": 1}
COUNTS = {"slots": 64, "text": 1024, "window": 8192, "rows": 0, "small": True}
WITH_COUNTS = {"hidden_size": 8, "num_hidden_layers": 1} | {f"count_memory_{name}": COUNTS[name] for name in COUNTS}
# Fields of memora-tiny, optimizer, learning rate, numbers.
LEARNERS = {
    "network": (SMALL, "rmsprop", 3e-3, "float32"),
    "network, int16": (SMALL, "rmsprop", 3e-3, "int16"),
    "network and counts": (WITH_COUNTS | {"state_size": 8}, "sgd", 0.1, "float32"),
    "network and counts, int16": (WITH_COUNTS | {"state_size": 12}, "rmsprop", 3e-3, "int16"),
}
LOOP = {
    "step": """#include "model.c"
static struct model_state state;
static float outputs[MODEL_OUTPUTS];
int run(const unsigned char *bytes, long size) {
    for (long k = 0; k < size; k++) if (model_step(&state, bytes[k], outputs)) return 1;
    return 0;
}
""",
    "learner": """#include "model.c"
static struct model_learner learner;
int start(const void *file, size_t size) { return model_init(&learner, file, size); }
int run(const unsigned char *bytes, long size, float *nats) {
    for (long k = 0; k < size; k++) if (model_learn(&learner, bytes[k], nats + k)) return 1;
    return 0;
}
""",
}


def learner_of(name: str, **settings) -> tuple[OnlineLearner, str]:
    """A new learner, and its numbers in C."""
    fields, optimizer, rate, numbers = LEARNERS[name]
    torch.manual_seed(0)
    model = build_model("memora-tiny", **fields)
    settings = {"optimizer": optimizer, "learning_rate": rate} | settings
    return OnlineLearner(model, ByteTokenizer(), **settings), numbers


def rows_of_log(data: bytes) -> list[list[str]]:
    """Bits per byte of each learner, and of counts of order 2 in as much memory."""
    rows = []
    for name in LEARNERS:
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent, "learner")
            learner, numbers = learner_of(name)
            save_c_learner(learner, folder, numbers=numbers)
            sizes = memory(folder)
            nats, seconds = learn_in_c(folder, data, "-O2", "-ffp-contract=off")
        total = sum(sizes.values())
        counts = bits(nats_by_counts(data, total))
        flash = sizes["weights"] + sizes["code"]
        rows.append([name, f"{sizes['RAM']:,}", f"{flash:,}", f"{total:,}", f"{bits(nats):.3f}"])
        rows[-1] += [f"{counts:.3f}", f"{1e6 * seconds / len(data):.1f}"]
    rows.append(["gzip -9, all at once", *[""] * 3, f"{8 * len(zlib.compress(data, 9)) / len(data):.3f}", "", ""])
    return rows


def library(folder: Path, kind: str, *flags: str) -> ctypes.CDLL:
    """A compiled loop over the step or learner in a folder."""
    (folder / "loop.c").write_text(LOOP[kind])
    compile_c(folder, *flags, "-shared", "-fPIC", "loop.c", "-o", "loop.so", "-lm")
    return ctypes.CDLL(folder / "loop.so")


def best(functions: dict[str, Callable[[], object]], rounds: int, size: int) -> dict[str, float]:
    """Microseconds of a byte: the shortest of several rounds in turns."""
    return {name: 1e6 * min(times) / size for name, times in seconds_in_turns(functions, rounds, CPU).items()}


def times_of_step(rounds: int, size: int) -> dict[str, float]:
    """Times of memora-s0 without learning, at -O2 and in Python."""
    models = {weights: build_model("memora-s0").eval() for weights in ("float32", "int8")}
    models["int8"].compile_step(weights="int8")
    tokens = torch.from_numpy(np.random.default_rng(0).integers(97, 123, (size, 1, 1)))

    def python(model) -> None:
        state = None
        with torch.no_grad():
            for token in tokens:
                state = model(token, state=state, use_cache=True).state

    with tempfile.TemporaryDirectory() as parent:
        program = export_step(models["float32"], own_operators=True)
        text = c_step(program, "model", StepModule(models["float32"]).state_names).text
        Path(parent, "model.c").write_text(text)
        run, data = library(Path(parent), "step", "-O2").run, bytes(tokens.flatten().tolist())
        functions = {"C": lambda: run(data, ctypes.c_long(size))}
        return best(
            functions | {name: lambda model=model: python(model) for name, model in models.items()}, rounds, size
        )


def times_of_learner(rounds: int, size: int) -> dict[str, float]:
    """Times of the network of width 24 that learns, at -O2 and in Python."""
    data = np.random.default_rng(0).integers(97, 123, size, dtype=np.uint8).tobytes()
    learner, numbers = learner_of("network")
    with tempfile.TemporaryDirectory() as parent:
        run = started(learner, Path(parent, "learner"), numbers)
        nats = (ctypes.c_float * size)()
        functions = {"C": lambda: run(data, ctypes.c_long(size), nats), "Python": lambda: learner.read(data)}
        return best(functions, rounds, size)


def started(learner: OnlineLearner, folder: Path, numbers: str) -> Callable[..., int]:
    """The loop of a compiled learner with its first weights."""
    save_c_learner(learner, folder, numbers=numbers)
    loaded, weights = library(folder, "learner", "-O2"), (folder / "model.weights").read_bytes()
    assert loaded.start(weights, ctypes.c_size_t(len(weights))) == 0
    return loaded.run


def largest_difference(size: int) -> float:
    """Relative difference of losses of C and Python, the largest of many steps at a learning rate of 3e-5."""
    learner, numbers = learner_of("network", learning_rate=3e-5, optimizer="sgd")
    data, losses = (b"the quick brown fox jumps over the lazy dog; " * size)[:size], []
    read = learner.step.read

    def reading(*arguments):
        nats, state = read(*arguments)
        losses.append(nats.item())
        return nats, state

    with tempfile.TemporaryDirectory() as parent:
        run, nats = started(learner, Path(parent, "learner"), numbers), (ctypes.c_float * size)()
        assert run(data, ctypes.c_long(size), nats) == 0
    learner.step.read = reading
    learner.read(data)
    expected = np.array(losses)
    return float(np.abs(np.array(nats[1:]) / expected - 1).max())


CORTEX_MAIN = """#include <stdio.h>
#include <stdint.h>
#include "model.c"
#include "data.h"
static struct model_learner learner;
static volatile uint32_t *const systick = (volatile uint32_t *)0xE000E010u;
int main(void) {
    float number;
    uint32_t ticks = 0, before;
    if (model_init(&learner, weights, sizeof weights)) return 1;
    systick[1] = 0xffffff;
    systick[2] = 0;
    systick[0] = 5;
    for (unsigned k = 0; k < 100; k++) {
        before = systick[2];
        if (model_learn(&learner, ITEM, &number)) return 2;
        ticks += (before - systick[2]) & 0xffffffu;
    }
    printf("%lu\\n", (unsigned long)ticks);
    return 0;
}
"""


def cortex_instructions(learner: OnlineLearner | VectorLearner, numbers: str, part: str) -> float:
    """Instructions of one byte or vector in QEMU, the mean of 100."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "export"))
    from cortex_m import INSTRUCTIONS_PER_TICK, run_on_cortex

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "learner")
        save_c_learner(learner, folder, numbers=numbers)
        content = (folder / "model.weights").read_bytes()
        (folder / "data.h").write_text(f"static const unsigned char weights[] = {{{','.join(map(str, content))}}};\n")
        item = "(float[]){(float)(k % 7)}" if isinstance(learner, VectorLearner) else "97 + k * k % 11"
        (folder / "main.c").write_text(CORTEX_MAIN.replace("ITEM", item))
        ticks = int(run_on_cortex(folder, part, ["-O2", "-fno-math-errno", "main.c"]))
    return ticks * INSTRUCTIONS_PER_TICK / 100


def cortex_rows() -> Iterator[list[str]]:
    """Instructions of every learner on every part, where the compiler and QEMU are installed."""
    for part in ("cortex-m7", "cortex-m4"):
        try:
            yield [part, "one sensor, a vector", f"{cortex_instructions(VectorLearner.new(1), 'float32', part):,.0f}"]
            for name in LEARNERS:
                yield [part, f"{name}, a byte", f"{cortex_instructions(*learner_of(name), part):,.0f}"]
        except (OSError, TypeError) as error:
            yield [part, "left out", type(error).__name__]


def main() -> None:
    parser = option_parser(__doc__, rounds=12)
    parser.add_argument("log", nargs="?", type=Path, help="its first 1,000,000 bytes are learned")
    parser.add_argument("--steps", type=int, default=500, help="bytes of a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    learner = times_of_learner(options.rounds, options.steps)
    with tempfile.TemporaryDirectory() as parent:
        save_c_learner(VectorLearner.new(1), Path(parent, "learner"))
        size = sum(memory(Path(parent, "learner")).values())
    rows = [
        ["learner of width 24, µs a byte: C at -O2", f"{learner['C']:.1f}"],
        ["… in Python, stride 1", f"{learner['Python']:.1f}"],
        ["largest relative difference of 10,000 losses, SGD at 3e-5", f"{largest_difference(10_000):.1e}"],
        ["learner of one sensor, bytes of RAM and flash", f"{size:,}"],
    ]
    report("Learners", ["", ""], rows)
    step = times_of_step(options.rounds, options.steps)
    report("Step of memora-s0", ["", "µs"], [[name, f"{time:.0f}"] for name, time in step.items()])
    report("Instructions", ["part", "learner", "instructions"], list(cortex_rows()))
    if options.log:
        columns = ["learner", "RAM", "flash", "together", "bits per byte", "order-2 counts, as large", "µs a byte"]
        rows = rows_of_log(options.log.read_bytes()[: 10**6])
        report(f"The first 1,000,000 bytes of {options.log.name}", columns, rows)


if __name__ == "__main__":
    main()
