"""Kill training and learning at random moments, resume, and compare the result with the uninterrupted run.

    python tests/faults/kill_runs.py --kills 100 --seed 0

Every fourth interruption is SIGTERM, after which the run saves and ends by itself; the others are SIGKILL.
"""

import argparse
import contextlib
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import torch
from forked import Outcome, run_forked
from safetensors import safe_open
from tqdm import tqdm

_TINY = ["--config_overrides", "hidden_size=16", "num_hidden_layers=1"]
_MEMORA = [*_TINY, "state_size=16"]
_SMT = [
    "--block_size", "16", "--context_length", "8", "--future_length", "4", "--eval_windows", "2",
    *_TINY, "num_attention_heads=2", "num_memory_tokens=2",
]  # fmt: skip
_PRETRAIN = [
    "--use_cpu", "--max_steps", "40", "--save_steps", "3", "--disable_tqdm", "true", "--report_to", "none",
    "--sample_every", "0", "--sample_bytes", "4", "--per_device_eval_batch_size", "2", "--eval_strategy", "steps",
    "--eval_steps", "7", "--logging_steps", "4", "--resume_from_checkpoint", "true",
]  # fmt: skip
_NOTES = ["--corpus", "notes", "--validation_fraction", "0.2", "--per_device_train_batch_size", "4"]
PRETRAIN = {
    "bptt": [*_NOTES, "--block_size", "16", *_MEMORA],
    "iid": [*_NOTES, "--block_size", "16", "--regime", "iid", *_MEMORA],
    "accumulation": [*_NOTES, "--block_size", "16", "--gradient_accumulation_steps", "2", *_MEMORA],
    "dropout": [*_NOTES, "--model", "llama-s0", "--block_size", "16", "--config_overrides", "hidden_size=16",
                "num_hidden_layers=1", "num_attention_heads=2", "num_key_value_heads=2", "intermediate_size=16",
                "attention_dropout=0.3"],
    "rtrl": [*_NOTES, "--method", "rtrl", "--block_size", "4", *_MEMORA],
    "rtrl in strides": [*_NOTES, "--method", "rtrl", "--block_size", "8", "--stride", "2", *_MEMORA],
    "truncated": [*_NOTES, "--method", "truncated", "--block_size", "1", *_MEMORA],
    "spatial": [*_NOTES, "--method", "spatial", "--block_size", "4", "--optim", "rmsprop", *_MEMORA],
    "task": ["--corpus", "task:flip_flop", "--per_device_train_batch_size", "4", "--max_eval_bytes", "200", *_MEMORA],
    "smt": [*_NOTES, "--method", "smt", "--dmt_steps", "0", *_SMT],
    "smt and dmt": [*_NOTES, "--method", "smt", "--dmt_steps", "20", "--dmt_rollout_length", "4", *_SMT],
}  # fmt: skip
TWO_PROCESSES = "two processes"
_LEARN = [
    "learn", "memora-tiny", "--learning_rate", "3e-3", "--save_every", "400", "--report_every", "100",
    "--window", "100", "--quiet", "--resume",
]  # fmt: skip
LEARN = {
    "learn": ["--source", "log.txt", "--stride", "8"],
    "learn from gzip": ["--source", "log.txt.gz", "--stride", "8"],
    "learn truncated": ["--source", "log.txt", "--rule", "truncated", "--stride", "16", "--block_size", "32"],
    "learn binary": ["--source", "log.bin", "--binary", "--stride", "8", "--optimizer", "rmsprop"],
    "learn a followed log": ["--source", "log.txt", "--follow", "--timeout", "1", "--stride", "16"],
}
# Exit statuses of complete runs that are not 0: a followed log has no end, only a timeout.
FINISHED = {"learn a followed log": 1}
STOPPED = "stopped at byte"  # `learn` after a signal: its status is 0, as at the end of its source
KINDS = [*PRETRAIN, TWO_PROCESSES, *LEARN]
# Exit statuses of a run that a signal ended: killed, or ended by itself after saving.
_INTERRUPTED = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)


def write_data(folder: Path) -> None:
    """Documents to train on, and logs to learn from, in `folder`."""
    (folder / "notes").mkdir()
    for number in range(6):
        text = "".join(f"{number * line * 7919 % 1000} bottles on the wall\n" for line in range(1, 40))
        (folder / "notes" / f"{number}.txt").write_text(text)
    log = b"".join(b"line %d of the log\n" % (number * 37 % 101) for number in range(200))
    (folder / "log.txt").write_bytes(log)
    (folder / "log.txt.gz").write_bytes(gzip.compress(log))
    (folder / "log.bin").write_bytes(log.replace(b"line", b"\0\0\0\0"))


def start(kind: str, output_dir: str, interruption: tuple[int, float] | None = None) -> Outcome:
    """Start or resume a run of some kind, and interrupt it after some time."""
    if kind == TWO_PROCESSES:
        return _start_two(output_dir, interruption)
    from hf_recurrent.cli.main import main

    arguments = ["pretrain", *_PRETRAIN, *PRETRAIN[kind]] if kind in PRETRAIN else [*_LEARN, *LEARN[kind]]
    return run_forked(lambda: main([*arguments, "--output_dir", output_dir]), seconds=300, interruption=interruption)


def _start_two(output_dir: str, interruption: tuple[int, float] | None) -> Outcome:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    command += ["-m", "hf_recurrent.cli.main", "pretrain", *_PRETRAIN, *PRETRAIN["bptt"]]
    process = subprocess.Popen(
        [*command, "--output_dir", output_dir],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        err = process.communicate(timeout=300 if interruption is None else 10 + interruption[1])[1]
    except subprocess.TimeoutExpired:
        if interruption[0] == signal.SIGKILL:
            launcher = psutil.Process(process.pid)
            for part in (*launcher.children(recursive=True), launcher):  # each has a session of its own
                with contextlib.suppress(psutil.NoSuchProcess):
                    part.kill()
        else:
            process.send_signal(interruption[0])  # the launcher passes it on
        err = process.communicate(timeout=300)[1]
        return Outcome(-interruption[0], "", err)
    return Outcome(process.returncode, "", err)


def result(directory: str) -> dict[str, str]:
    """Weights, losses and scores of a finished run."""
    found = {}
    for path in sorted(Path(directory).rglob("*.safetensors")):
        if "checkpoint-" not in str(path):
            found[str(path.relative_to(directory))] = _digest(path)
    for path in (Path(directory, "trainer_state.json"), Path(directory, "eval_results.json")):
        if path.is_file():
            content = json.loads(path.read_text())
            entries = content.get("log_history", [content])
            losses = [
                {name: entry[name] for name in ("step", "loss", "grad_norm") if name in entry} for entry in entries
            ]
            found[path.name] = json.dumps(
                [entry for entry in losses if "loss" in entry or path.name != "trainer_state.json"]
            )
    return found


def _digest(path: Path) -> str:
    """Hash of tensors and metadata; the file has its metadata in any order."""
    content = hashlib.sha256()
    with safe_open(path, framework="np") as file:
        content.update(json.dumps(file.metadata(), sort_keys=True).encode())
        for name in sorted(file.keys()):
            content.update(name.encode() + file.get_tensor(name).tobytes())
    return content.hexdigest()


def run(kills: int, seed: int, folder: Path, kinds: list[str]) -> Counter:
    """Interrupt runs of all kinds in turn; the counter has the interruptions, and each fault under its own words."""
    draw, count, whole = random.Random(seed), Counter(), {}
    os.chdir(folder)
    write_data(folder)
    for kind in tqdm(kinds, desc="uninterrupted runs"):
        begin = time.monotonic()
        outcome = start(kind, "whole")
        if outcome.status != FINISHED.get(kind, 0):
            raise RuntimeError(f"{kind}: {outcome.err}")
        whole[kind] = result("whole"), time.monotonic() - begin
        shutil.rmtree("whole")
    bar = tqdm(total=kills, unit="interruption")
    while count["interruptions"] < kills:
        for kind in kinds:
            faults = _interrupt(kind, *whole[kind], draw, count)
            for words, err in faults:
                count[f"faults: {words}"] += 1
                print(f"{kind}: {words}\n{err[-2000:]}")
            shutil.rmtree("run", ignore_errors=True)
            bar.update(count["interruptions"] - bar.n)
            if count["interruptions"] >= kills:
                break
    return count


def is_finished(kind: str, outcome: Outcome) -> bool:
    """True if a run came to its end, False if it was interrupted or failed."""
    return outcome.status == FINISHED.get(kind, 0) and STOPPED not in outcome.out


def _interrupt(
    kind: str, expected: dict, seconds: float, draw: random.Random, count: Counter
) -> list[tuple[str, str]]:
    """One run with up to three interruptions; its faults, each with what it printed."""
    for _ in range(3):
        number = signal.SIGTERM if draw.random() < 0.25 else signal.SIGKILL
        outcome = start(kind, "run", (number, draw.uniform(0, seconds)))
        if is_finished(kind, outcome):
            break
        stopped = STOPPED in outcome.out or outcome.status in _INTERRUPTED
        if not stopped or (outcome.has_traceback and kind != TWO_PROCESSES):
            return [(f"ended with status {outcome.status}", outcome.err)]
        count["interruptions"] += 1
        count[f"by {number.name}"] += 1
    else:
        outcome = start(kind, "run")
    if not is_finished(kind, outcome):
        return [(f"resuming ended with status {outcome.status}", outcome.err)]
    found = result("run")
    count["runs"] += 1
    if found != expected:
        names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        return [(f"differs in {', '.join(names)}", "")]
    if left := [path.name for path in Path("run").iterdir() if path.name.startswith(("_staging", "_replaced"))]:
        return [(f"left {left[0]}", "")]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"HF_HOME": os.path.join(folder, "home"), "OMP_NUM_THREADS": "1"}
        count = run(options.kills, options.seed, Path(folder), options.kinds)
        os.chdir("/")
    for name, value in count.items():
        print(f"{value:6,}  {name}")
    sys.exit(any(name.startswith("faults") for name in count))


if __name__ == "__main__":
    main()
