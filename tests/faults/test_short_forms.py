"""The short forms of the programs in this folder; CONTRIBUTING.md has the long ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PROGRAMS = {  # and what their output has to contain
    "compress_inputs.py --cases 20 --seed 1": ["20 cases", "0 faults"],
    "damage_checkpoints.py --cases 16 --kinds bptt --seed 1": ["16  cases", "refused"],
    "damage_learner.py --cases 30 --seed 1": ["30  cases", "the same result"],
    "fuzz_commands.py --cases 15 --seed 2": ["15  cases", "status 0", "status 2"],
    "fuzz_forward.py --cases 300 --seed 1": ["300 cases, 0 failures"],
    "hostile_server.py --sessions 60 --requests 90 --compared 20": [" 0 faults"],
    "load_server.py --seconds 3 --clients 6": [" 0 faults"],
    "kill_runs.py --kills 2 --kinds bptt --seed 1": ["interruptions"],
}
SLOW_PROGRAMS = {"kill_groups.py --kills 2 --ways FSDP2 --seed 1": ["kills of a rank", "finished runs"]}


@pytest.mark.long
@pytest.mark.parametrize(
    "program", [*PROGRAMS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_PROGRAMS)]
)
def test_program_finds_no_fault(program):
    # Without threads of its own: they would not exist in its forked children.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.fspath(FOLDER.parents[1])}
    command = [sys.executable, *program.split()]
    result = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert all(text in result.stdout for text in (PROGRAMS | SLOW_PROGRAMS)[program]), result.stdout[-3000:]
