#!/usr/bin/env python
"""Memory that `hf-recurrent plan` counts, compared with the peak of a process that trains.

    python scripts/check_plan.py
    python scripts/check_plan.py --cases "--model memora-s1 --block_size 512" "--model lru-copy --method rtrl"

Each case is trained for three steps by the command's own trainer on random text, in a process of its own, on the CPU.
Measured is the peak of its resident memory above the memory of the same process after it has trained a tiny model by
the same method, so that code and libraries do not count.
Prints one line per case; the exit status is 1 if a plan is off by more than 10 %.
"""

import argparse
import gc
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
from benchmarking import markdown_table

CASES = (
    "--model memora-s0 --block_size 512",
    "--model memora-s2 --block_size 128",
    "--model memora-s2 --block_size 128 --gradient_accumulation_steps 2 --per_device_train_batch_size 4",
    "--model hawk-s1 --block_size 256 --gradient_checkpointing true",
    "--model llama-s1 --block_size 256 --regime iid",
    "--model memora-online --method rtrl --block_size 1 --per_device_train_batch_size 16",
    "--model memora-s2 --method rtrl --block_size 16 --stride 4 --per_device_train_batch_size 4",
    "--model memora-s0 --config_overrides recurrent_unit=gru state_size=128 --method snap1 --block_size 8 "
    "--per_device_train_batch_size 32",
    "--method smt --model smt-rnn-tiny --context_length 128 --future_length 16 --eval_windows 0",
    "--method dmt --model smt-rnn-tiny --config_overrides hidden_size=256 --context_length 32 --rollout_length 32 "
    "--eval_windows 0 --per_device_train_batch_size 32",
)
SMALL_SMT = "--model smt-rnn-tiny --config_overrides hidden_size=64 --context_length 16 --eval_windows 0"
SMALL = {
    "smt": f"--method smt {SMALL_SMT} --future_length 8",
    "dmt": f"--method dmt {SMALL_SMT} --rollout_length 8",
    "other": "--model memora-tiny --config_overrides hidden_size=16 state_size=16 num_hidden_layers=1 --block_size 8",
}  # by method
COMMON = "--recipe none --use_cpu true --report_to none --save_strategy no --max_steps 3 --sample_every 0 --threads 1"
ALLOWED = 0.1


def train(words: list[str], folder: str) -> None:
    """Three steps of the trainer that `pretrain` builds, without evaluation; DMT with a new teacher."""
    from hf_recurrent.cli import pretrain

    corpus = Path(folder, "text.txt")
    if not corpus.exists():
        corpus.write_bytes(np.random.default_rng(0).integers(32, 127, 1 << 20, dtype=np.uint8).tobytes())
    common = ["--corpus", str(corpus), "--output_dir", str(Path(folder, "run")), *COMMON.split()]
    build_teacher = pretrain.build_teacher
    with patch.object(pretrain, "build_teacher", lambda *given, is_new: build_teacher(*given, is_new=True)):
        trainer = pretrain.prepare([*words, *common]).trainer
    trainer.train()


def measure(words: list[str]) -> int:
    """Bytes of the peak above a run of a tiny model; in this process."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = folder  # before anything reads it
        method = words[words.index("--method") + 1] if "--method" in words else "other"
        train(shlex.split(SMALL.get(method, SMALL["other"])), folder)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = memory("VmRSS")
        train(words, folder)
        return memory("VmHWM") - before


def memory(name: str) -> int:
    """A value of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def child(*words: str) -> str:
    """The last line that a program prints."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return done.stdout.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="ARGUMENTS", help="arguments of pretrain")
    parser.add_argument("--measure", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(measure(options.measure))
        return
    lines, worst = [], 0.0
    for case in options.cases:
        words = shlex.split(case)
        measured = int(child(__file__, "--measure", *words))
        plan = ["-m", "hf_recurrent.cli.main", "plan", *words, *COMMON.split(), "--json"]
        planned = json.loads(child(*plan))["total"]
        worst = max(worst, abs(planned / measured - 1))
        numbers = f"{planned / 1e6:,.1f}", f"{measured / 1e6:,.1f}", f"{planned / measured - 1:+.1%}"
        lines.append([f"`{case}`", *numbers])
        print(*lines[-1], file=sys.stderr, flush=True)
    print(markdown_table(["arguments", "plan MB", "measured MB", "difference"], lines))
    raise SystemExit(worst > ALLOWED)


if __name__ == "__main__":
    main()
