"""The short forms of damage_checkpoints.py and kill_runs.py; CONTRIBUTING.md has the long ones."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def run(*arguments):
    """Run a program of this folder, without its own threads: they would not exist in its forked children."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.fspath(FOLDER.parents[1])}
    result = subprocess.run(
        [sys.executable, *arguments], cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def test_damaged_checkpoints_are_refused():
    out = run("damage_checkpoints.py", "--cases", "32", "--kinds", "bptt", "--seed", "1")
    assert "32  cases" in out and "refused" in out


def test_killed_runs_are_the_uninterrupted_ones():
    out = run("kill_runs.py", "--kills", "4", "--kinds", "bptt", "learn", "--seed", "1")
    assert "interruptions" in out and "differs" not in out
