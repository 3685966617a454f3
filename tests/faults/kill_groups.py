"""Kill processes of distributed runs at random moments, and compare the result with one process.

    python tests/faults/kill_groups.py --kills 40 --seed 0

Each run is DDP or FSDP2 and goes from 2 processes to 1 to 3. `torchrun --max-restarts` brings a group back after
SIGKILL of a rank; now and then the whole group is killed and started again with another number of processes.
"""

import argparse
import contextlib
import json
import os
import random
import re
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
from kill_runs import _NOTES, _PRETRAIN, _TINY, write_data
from safetensors.torch import load_file

_STREAMS, _STEPS = 6, 16
_ARGUMENTS = [
    *_PRETRAIN, *_NOTES, "--block_size", "16", "--streams", str(_STREAMS), "--per_device_train_batch_size", "6",
    "--max_steps", str(_STEPS), "--learning_rate", "1e-3", *_TINY, "state_size=16",
]  # fmt: skip
_PROCESSES = (2, 1, 3)
_RESTARTS = 3
_PATIENCE, _LEAST_SECONDS = 120, 3  # a group with less CPU time in that many seconds waits forever
_SHOWN = 8000  # characters of an error: torchrun's own report of it is long
_TOLERANCE = 1e-5  # of losses, relative: the order of sums differs between numbers of processes


def start(processes: int, sharded: bool, output_dir: str) -> subprocess.Popen:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", port,
        "--max-restarts", str(_RESTARTS), "--monitor-interval", "0.1", "-m", "hf_recurrent.cli.main", "pretrain",
    ]  # fmt: skip
    environment = (
        os.environ
        | {"PYTHONFAULTHANDLER": "1", "LOGLEVEL": "INFO"}  # torchrun reports restarts
        | ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} if sharded else {})
    )
    return subprocess.Popen(
        [*command, *_ARGUMENTS, "--output_dir", output_dir], env=environment, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def workers(launcher: subprocess.Popen) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(launcher.pid).children()
    return []


def kill_all(launcher: subprocess.Popen) -> None:
    launcher.send_signal(signal.SIGSTOP)  # else it starts others in between, which live on without it
    for part in [*workers(launcher), psutil.Process(launcher.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            part.kill()


def results(directory: Path) -> tuple[dict[int, float], dict]:
    state = json.loads((directory / "trainer_state.json").read_text())
    losses = {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}
    return losses, load_file(directory / "model.safetensors")


def difference(one: tuple, other: tuple) -> str | None:
    if one[0].keys() != other[0].keys():
        return f"logs at {sorted(one[0])} and {sorted(other[0])}"
    apart = max(abs(other[0][step] / loss - 1) for step, loss in one[0].items())
    return f"losses differ by {apart:.1e}" if apart > _TOLERANCE else None


def end_of(launcher: subprocess.Popen) -> str | None:
    """Standard error of a group until its end; None if its processes wait for each other.

    Then their stacks are printed.
    """
    before = -_LEAST_SECONDS
    while True:
        try:
            return launcher.communicate(timeout=_PATIENCE)[1]
        except subprocess.TimeoutExpired:
            spent = seconds_of(workers(launcher))
        if before <= spent < before + _LEAST_SECONDS:  # else they work, or have been started again
            break
        before = spent
    launcher.send_signal(signal.SIGSTOP)  # else it starts them again
    for worker in workers(launcher):
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGABRT)  # faulthandler prints the stacks
    time.sleep(10)
    kill_all(launcher)
    print(launcher.communicate()[1][-_SHOWN:], flush=True)
    return None


def failures_of(err: str) -> int:
    """Number of failures of a group that torchrun saw."""
    return err.count("; will restart worker group") + err.count("elastic.multiprocessing.errors.ChildFailedError")


def explain(err: str, kills: int) -> str:
    """The cause of a failed group: kills that used up its restarts, or the errors of its processes."""
    failures = failures_of(err)
    if 0 < failures <= kills:
        return f"torchrun allows {_RESTARTS} restarts, and the group failed {failures} times by {kills} kills"
    errors = Counter(
        re.findall(r"^(?:\[rank\d+\]: *)?((?:[\w.]+Error|Fatal Python error|pretrain: error)\b.*)", err, re.M)
    )
    words = "; ".join(f"{number} x {line[:300]}" for line, number in errors.items()) or err[-_SHOWN:]
    return f"the group failed {failures} times by {kills} kills: {words}"


def seconds_of(processes: list[psutil.Process]) -> float:
    """CPU time of processes so far."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:2])
    return total


def interrupt(sharded: bool, draw: random.Random, seconds: float, count: Counter, folder: Path) -> str | None:
    """One run to its end, with interruptions; the fault, if there is one."""
    directory = folder / "run"
    shutil.rmtree(directory, ignore_errors=True)
    for processes in (*_PROCESSES, *_PROCESSES):
        launcher = start(processes, sharded, str(directory))
        is_last = processes == _PROCESSES[-1] and draw.random() < 0.7
        kills = 0
        for _ in range(_RESTARTS):
            end = time.monotonic() + draw.uniform(0.3, 1) * seconds
            while time.monotonic() < end and launcher.poll() is None:
                time.sleep(0.05)
            alive = workers(launcher)
            if launcher.poll() is not None or not alive:
                break
            with contextlib.suppress(psutil.NoSuchProcess):
                draw.choice(alive).kill()
            kills += 1
            count["kills of a rank"] += 1
            if not is_last and draw.random() < 0.5:
                kill_all(launcher)
                count["kills of all"] += 1
                break
        err = end_of(launcher)
        if err is None:
            return "a group waits forever"
        if failures_of(err) > kills:
            count["failures without a kill"] += 1
            print(explain(err, kills), flush=True)
        if launcher.returncode == 0:
            count["finished runs"] += 1
            return None
        if launcher.returncode > 0:
            if not 0 < failures_of(err) <= kills:
                return f"a group of {processes} ended with {launcher.returncode}: {explain(err, kills)}"
            count["groups without restarts left"] += 1
    launcher = start(2, sharded, str(directory))
    err = end_of(launcher)
    if err is None:
        return "a group waits forever"
    count["finished runs"] += 1
    return None if launcher.returncode == 0 else explain(err, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="+", choices=["DDP", "FSDP2"], default=["DDP", "FSDP2"])
    options = parser.parse_args()
    draw, count = random.Random(options.seed), Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        os.chdir(folder)
        os.environ |= {
            "HF_HOME": os.path.join(name, "home"),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        begin, launcher = time.monotonic(), start(1, False, "whole")
        err = launcher.communicate(timeout=400)[1]
        if launcher.returncode:
            sys.exit(f"the uninterrupted run: {err[-3000:]}")
        seconds, whole = time.monotonic() - begin, results(folder / "whole")
        while count["kills of a rank"] < options.kills:
            for way in options.ways:
                fault = interrupt(way == "FSDP2", draw, seconds, count, folder)
                fault = fault or difference(whole, results(folder / "run"))
                if fault:
                    count["faults"] += 1
                    print(f"{way}: {fault}", flush=True)
                print(", ".join(f"{number} {words}" for words, number in count.items()), flush=True)
        os.chdir("/")
    sys.exit(bool(count["faults"]))


if __name__ == "__main__":
    main()
