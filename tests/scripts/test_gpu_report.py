"""The report about a GPU, rehearsed; a part that fails, hangs or is killed leaves the others alone."""

import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PROGRAMS = {
    "fails": "print('one'); raise RuntimeError('the kernel is broken')",
    "hangs": "import time; print('two', flush=True); time.sleep(60)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "works": "print('a table\\n\\n| a |\\n|---|\\n| 1 |')",
}


@pytest.fixture
def gpu_report(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import gpu_report

    return gpu_report


@pytest.mark.long
def test_parts_that_fail_hang_or_are_killed_leave_the_others(gpu_report, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_report, "PARTS", {name: gpu_report.Part(1, "") for name in PROGRAMS})
    monkeypatch.setattr(gpu_report, "part_words", lambda name, _: [sys.executable, "-c", PROGRAMS[name]])
    arguments = gpu_report.parse_arguments(["--output", str(tmp_path), "--minutes", "0.2"])
    begin = time.monotonic()
    gpu_report.report(arguments)
    assert time.monotonic() - begin < 40
    outcomes = [line.partition(": ")[2].partition(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert outcomes == ["failed (1)", "stopped at its time limit", "killed by SIGKILL", "done"]
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "the kernel is broken" in page and "\n\na table\n\n| a |\n|---|\n| 1 |\n" in page


@pytest.mark.long
def test_a_part_runs_as_a_program(gpu_report, tmp_path, capsys):
    gpu_report.report(gpu_report.parse_arguments(["--output", str(tmp_path), "--rehearse", "--parts", "training"]))
    assert "training: done" in capsys.readouterr().out, (tmp_path / "training.log").read_text()
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "A rehearsal" in page and "| memora-selective-copying |" in page


def test_every_part_is_a_command_with_known_options(gpu_report, tmp_path):
    for rehearse in ([], ["--rehearse"]):
        arguments = gpu_report.parse_arguments(["--output", str(tmp_path), *rehearse])
        for name in arguments.parts:
            words = gpu_report.part_words(name, arguments)[1:]
            if words[0].startswith("benchmark"):
                source = (SCRIPTS / words[0]).read_text() + (SCRIPTS / "benchmarking.py").read_text()
                for word in words[1:]:
                    assert (
                        not word.startswith("--")
                        or f'"{word.lstrip("-")}' in source
                        or f"{word[2:]}=" in source
                        or f'"{word}"' in source
                    ), (name, word)
