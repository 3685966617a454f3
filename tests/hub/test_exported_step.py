"""An exported step goes to the Hub as any folder, and runs from there; machine code only where it is trusted."""

import pytest
from hub_process import TOKEN, run_program
from loopback_hub import LoopbackHub


@pytest.mark.long
def test_an_exported_step_goes_to_the_hub_and_runs_from_there(tmp_path):
    with LoopbackHub(TOKEN) as hub:
        assert "done" in run_program("step_program.py", hub, tmp_path)
        assert {"step.pt2", "specification.json", "manifest.json", "README.md"} <= hub.files("tester/step").keys()
