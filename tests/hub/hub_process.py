"""Runs a program in a process whose Hub is the loopback one, with an empty cache."""

import os
import subprocess
import sys
from pathlib import Path

from loopback_hub import LoopbackHub

TOKEN = "hf_LoopbackTokenThatNobodyElseHas"


def run_program(program: str, hub: LoopbackHub, work: Path, *arguments: str, token: bool = True) -> str:
    """The output of `program`, a file of this folder, run with `work` as first argument and current folder."""
    words = [str(Path(__file__).with_name(program)), str(work), *arguments]
    return run_words(words, hub, work, home=f"home-{Path(program).stem}", token=token)


def run_words(words: list[str], hub: LoopbackHub, work: Path, *, home: str = "home", token: bool = True) -> str:
    """The output of Python with `words` in the folder `work`; `home` is the folder of its cache there."""
    hidden = ("HF_", "HUGGING", "TRANSFORMERS_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": str(work / home),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "HF_HUB_VERBOSITY": "debug",
        "TRANSFORMERS_VERBOSITY": "debug",
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "127.0.0.1",
    }
    if token:
        environment["HF_TOKEN"] = TOKEN
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=300)
    output = done.stdout + done.stderr
    assert TOKEN not in output, "the token was printed"
    assert done.returncode == 0, output[-6000:]
    assert not hub.unexpected, hub.unexpected
    return output
