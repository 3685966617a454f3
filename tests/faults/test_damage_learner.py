"""The short form of damage_learner.py; CONTRIBUTING.md has the long one."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def test_damaged_learners_and_corpora_are_noticed():
    # Without its own threads: they would not exist in its forked children.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.fspath(FOLDER.parents[1])}
    command = [sys.executable, "damage_learner.py", "--cases", "60", "--seed", "1"]
    result = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "60  cases" in result.stdout and "the same result" in result.stdout
