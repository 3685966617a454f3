"""A learner in C on a file, from new weights: memory, bits per byte, and speed beside the learner in Python.

    python scripts/benchmark_c_learner.py FILE                             # 151 kB
    python scripts/benchmark_c_learner.py FILE --hidden_size 12 --state_size 16 --numbers float32
    python scripts/benchmark_c_learner.py FILE --preset lru-copy --bytes 200000

Every byte is predicted before it is learned. Beside it: gzip -9, and counts of order 2 (interpolated as Witten and
Bell do) in as much memory as the learner has, six bytes a count. The size of the code is that for a Cortex-M4, if
`arm-none-eabi-gcc` is installed, otherwise for this machine, without the C library's functions. Speeds are in CPU
time, of one thread; those in Python are of the first bytes only, and the best of several rounds counts.
"""

import math
import re
import shutil
import subprocess
import tempfile
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarking import CPU, best_seconds, build_model, markdown_table, option_parser

from hf_recurrent import ByteTokenizer, OnlineLearner, save_c_learner

_ARM = ["arm-none-eabi-gcc", "-mcpu=cortex-m4", "-mthumb", "-mfpu=fpv4-sp-d16", "-mfloat-abi=hard"]
_MAIN = """#include <stdio.h>
#include <time.h>
#include "model.h"
static struct model_learner learner;
static unsigned char weights[MODEL_WEIGHTS_FILE_SIZE];
int main(int count, char **arguments) {
    FILE *file = count == 2 ? fopen(arguments[1], "rb") : 0;
    if (!file || model_init(&learner, weights, fread(weights, 1, sizeof weights, file))) return 1;
    const clock_t begin = clock();
    float nats;
    for (int byte; (byte = getchar()) != EOF;) {
        if (model_learn(&learner, byte, &nats)) return 2;
        printf("%.6g\\n", nats);
    }
    fprintf(stderr, "%.6f\\n", (double)(clock() - begin) / CLOCKS_PER_SEC);
    return 0;
}
"""
_FLAGS = ["-std=c99", "-fno-math-errno"]


def compile_c(folder: Path, *arguments: str, compiler: Sequence[str] = ("gcc",)) -> None:
    subprocess.run([*compiler, *_FLAGS, *arguments], cwd=folder, check=True)


def learn_in_c(folder: Path, data: bytes, *flags: str) -> tuple[list[float], float]:
    """Nats of every byte, and seconds."""
    (folder / "main.c").write_text(_MAIN)
    compile_c(folder, *flags, "main.c", "model.c", "-o", "main", "-lm")
    done = subprocess.run([folder / "main", folder / "model.weights"], input=data, capture_output=True, check=True)
    return [float(line) for line in done.stdout.split()], float(done.stderr)


def memory(folder: Path) -> dict[str, int]:
    """Bytes of RAM, weights and code."""
    macros = dict(re.findall(r"#define MODEL_(\w+) (\d+)", (folder / "model.h").read_text()))
    compiler = _ARM if shutil.which(_ARM[0]) else ["gcc"]
    compile_c(folder, "-Os", "-c", "model.c", "-o", "small.o", compiler=compiler)
    measure = [compiler[0].replace("gcc", "size"), "small.o"]
    sizes = subprocess.run(measure, cwd=folder, capture_output=True, text=True, check=True).stdout
    ram, weights = (int(macros[name]) for name in ("LEARNER_BYTES", "WEIGHTS_FILE_SIZE"))
    return {"RAM": ram, "weights": weights, "code": int(sizes.splitlines()[1].split()[0])}


def nats_by_counts(data: bytes, size: int) -> list[float]:
    """Nats of every byte by counts of orders 0 to 2, of which `size` bytes of memory hold one in six bytes."""
    counts, totals, kinds = Counter(), Counter(), Counter()
    nats = []
    for at, byte in enumerate(data):
        probability, contexts = 1 / 256, [data[at - order : at] for order in range(min(at, 2) + 1)]
        for context in contexts:
            if total := totals[context]:
                kind = kinds[context]
                probability = (counts.get((context, byte), 0) + kind * probability) / (total + kind)
        nats.append(-math.log(probability))
        for context in contexts:
            key = context, byte
            if key not in counts:
                if 6 * len(counts) >= size:
                    continue
                kinds[context] += 1
            counts[key] += 1
            totals[context] += 1
    return nats


def bits(nats: list[float]) -> float:
    return sum(nats) / math.log(2) / len(nats)


def main() -> None:
    defaults = {"preset": "memora-tiny", "hidden_size": 16, "state_size": 24, "layers": 1, "rounds": 3}
    parser = option_parser(__doc__, **defaults)
    parser.add_argument("file", type=Path)
    parser.add_argument("--bytes", type=int, default=1_000_000, help="the first ones are read")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "rmsprop", "sgd"])
    parser.add_argument("--numbers", default="bfloat16", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    data = options.file.read_bytes()[: options.bytes]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fields = {"hidden_size": options.hidden_size, "state_size": options.state_size, "vocab_size": 256}
    model = build_model(options.preset, **fields, num_hidden_layers=options.layers)
    settings = {"learning_rate": options.learning_rate, "optimizer": options.optimizer, "binary": True}
    learner = OnlineLearner(model, ByteTokenizer(), **settings)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "learner"
        save_c_learner(learner, folder, numbers=options.numbers)
        sizes = memory(folder)
        nats, seconds = learn_in_c(folder, data, "-O2")
        short = data[: len(data) // 10]
        _, fast = learn_in_c(folder, short, "-O3", "-march=native")
    total, tenth = sum(sizes.values()), len(data) // 10
    by_counts = nats_by_counts(data, total)
    gzip = 8 * len(zlib.compress(data, 9)) / len(data)
    rows = [
        ["learner in C", f"{total:,}", f"{bits(nats):.3f}", f"{bits(nats[-tenth:]):.3f}"],
        ["counts of order 2", f"{total:,}", f"{bits(by_counts):.3f}", f"{bits(by_counts[-tenth:]):.3f}"],
        ["gzip -9", "", f"{gzip:.3f}", ""],
    ]
    print(", ".join(f"{name} {size:,} bytes" for name, size in sizes.items()))
    print(markdown_table(["", "bytes", f"bits per byte of {len(data):,}", "of the last tenth"], rows))
    python = best_seconds(lambda: learner.read(data[:2000]), options.rounds, CPU) / 2000
    in_c = {"C, -O2": seconds / len(data), "C, -O3 -march=native": fast / len(short)}
    rows = [[name, f"{1e6 * one:.1f}", f"{python / one:.1f}"] for name, one in ({"Python": python} | in_c).items()]
    print(markdown_table(["", "µs per byte", "times Python's speed"], rows))


if __name__ == "__main__":
    main()
