#!/usr/bin/env python
"""Everything about the speed on one GPU, unattended, in at most ten minutes: the benchmarks' tables.

    python scripts/gpu_report.py                             # into gpu_report/
    python scripts/gpu_report.py --parts scan training --minutes 4 --output scan_and_training
    python scripts/gpu_report.py --rehearse --minutes 2      # on a CPU, at tiny sizes

Each part is a command in a process of its own with a time limit, a share of what is left; what one part does not use,
the next ones get. `report.md` is written again after every part, with what the part printed, also if it failed or was
stopped at its limit.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
_ENVIRONMENT = "import torch, transformers; print(torch.__version__, transformers.__version__, torch.cuda.is_available() and torch.cuda.get_device_properties(0))"  # noqa: E501
_PEERS = "triton hgrn-recurrent hgrn-chunk accelerated-scan"
_TINY = "--rows selective-copying --streams 2 --rounds 1 --families memora"
_TINY_SCAN = "--shape 2x8x16 --repetitions 1 --backends torch torch-loop"
_TINY_TRAINING = f"{_TINY} --block_size 16 --matrix_size 64"
_TINY_GENERATION = f"{_TINY} --bytes 4 --bandwidth_bytes 65536"
_TINY_SIZES = "--layers 1 --hidden_size 32 --rounds 1"
_TINY_SMT = "--readout_layers 1 --context_length 8 --future_length 4 --memory_tokens 2 --sequences 2 --matrix_size 64"


class Part(NamedTuple):
    """A command of the report."""

    share: int  # of the time, next to the others'
    command: str  # words after `python`
    tiny: str = ""  # words that a rehearsal adds


_BF16 = "benchmark_training.py --bf16 --streams 32"
_OURS = "--families memora hawk llama"
_TESTS = "../tests/kernels ../tests/modeling/test_on_gpu.py ../tests/trainers ../tests/learning_rules"
PARTS = {
    "environment": Part(4, f"-c {shlex.quote(_ENVIRONMENT)}"),
    "scan": Part(10, f"benchmark_scan.py --backends {_PEERS}", _TINY_SCAN),
    "scan-bfloat16": Part(10, f"benchmark_scan.py --dtype bfloat16 --backends {_PEERS}", _TINY_SCAN),
    "training": Part(
        7, f"{_BF16} {_OURS} --captured memora hawk --rows s0 s4 --matrix_size 8192 --rounds 5", _TINY_TRAINING
    ),
    "training-float32": Part(
        6, f"benchmark_training.py {_OURS} --rows s0 s4 --streams 32 --matrix_size 8192", _TINY_TRAINING
    ),
    "tests": Part(12, f"-m pytest -v -n auto --dist loadfile -p no:cacheprovider {_TESTS}", "--collect-only -n 0"),
    "generation": Part(7, f"benchmark_generation.py {_OURS} --rows s0 s4", _TINY_GENERATION),
    "generation-64": Part(
        5, "benchmark_generation.py --rows s0 s4 --streams 64 --families memora hawk", _TINY_GENERATION
    ),
    "rtrl": Part(6, "benchmark_rtrl.py --streams 1 64 1024", f"{_TINY_SIZES} --state_size 8 --streams 1"),
    "smt": Part(6, "benchmark_smt.py --sequences 64 --bf16 --matrix_size 8192", f"{_TINY_SIZES} {_TINY_SMT}"),
    # Last, as their compilers and tuners take minutes.
    "training-compiled": Part(
        14, f"{_BF16} --matrix_size 8192 --families memora --compiled memora llama --rows s4", _TINY_TRAINING
    ),
    "training-mamba2": Part(14, f"{_BF16} --matrix_size 8192 --families memora mamba2 --rows s4", _TINY_TRAINING),
    "training-hgrn": Part(14, f"{_BF16} --matrix_size 8192 --families memora hgrn --rows s4", _TINY_TRAINING),
}


def run_part(name: str, words: Sequence[str], log: Path, seconds: float) -> str:
    """Run a command in a process group of its own, its output in `log`; returns a line about its outcome."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["TRITON_CACHE_AUTOTUNING"] = "1"  # tuned once, for all parts
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    begin = time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(
            words, cwd=HERE, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = child.wait(max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # its children too, such as compilers
            child.wait()
    outcome = "done" if status == 0 else "stopped at its time limit" if status is None else f"failed ({status})"
    if status is not None and status < 0:
        outcome = f"killed by {signal.Signals(-status).name}"
    return f"{name}: {outcome}, {time.monotonic() - begin:.0f} s"


def part_words(name: str, arguments: argparse.Namespace) -> list[str]:
    part = PARTS[name]
    words = shlex.split(part.command)
    if words[0].startswith("benchmark"):
        words += ["--device", "cpu" if arguments.rehearse else arguments.device]
    return [sys.executable, *words, *shlex.split(part.tiny if arguments.rehearse else "")]


def report(arguments: argparse.Namespace) -> None:
    """Run the parts, and write report.md after each."""
    folder, end = arguments.output, time.monotonic() + 60 * arguments.minutes
    folder.mkdir(parents=True, exist_ok=True)
    sections = ["# A GPU in ten minutes"]
    if arguments.rehearse:
        sections.append("**A rehearsal at tiny sizes on a CPU. The numbers say nothing about speed.**")
    for number, name in enumerate(arguments.parts):
        left, log = end - time.monotonic(), folder / f"{name}.log"
        seconds = left * PARTS[name].share / sum(PARTS[other].share for other in arguments.parts[number:])
        outcome = run_part(name, part_words(name, arguments), log, seconds)
        print(outcome, flush=True)
        printed = log.read_text(encoding="utf-8", errors="replace").strip()
        if "\n| " not in printed or ": done" not in outcome:
            printed = f"```text\n{printed[-2000:]}\n```"
        sections += [f"## {outcome}", printed]
        (folder / "report.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu_report"), help="folder (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=9.5, help="of all parts together (default %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--device", default="cuda", help="torch device (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    arguments = parser.parse_args(argv)
    if arguments.minutes <= 0:
        parser.error(f"--minutes is {arguments.minutes}; it must be more than 0.")
    return arguments


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    report(parse_arguments())
