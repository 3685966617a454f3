"""The report about a GPU, rehearsed at tiny sizes; a part that fails, hangs or is killed leaves the others alone."""

import itertools
import json
import sys
import time
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts"
WRITE = "import json, sys; open(sys.argv[1], 'a').write(json.dumps({'what': 'one', 'value': 1.5}) + '\\n')"
PROGRAMS = {
    "environment": WRITE,
    "scan": f"{WRITE}; raise RuntimeError('the kernel is broken')",
    "training": f"{WRITE}; import time; time.sleep(60)",
    "tests": f"{WRITE}; import os; os.kill(os.getpid(), 9)",
    "generation": f"{WRITE}; open(sys.argv[1], 'a').write('{{\"what\": \"cut')",
}


@pytest.fixture
def scripts(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(SCRIPTS)
    yield
    torch.set_num_threads(threads)


def test_parts_that_fail_hang_or_are_killed_leave_the_others(scripts, tmp_path, monkeypatch):
    import gpu_report

    monkeypatch.setattr(gpu_report, "PARTS", dict.fromkeys(PROGRAMS, 1))
    monkeypatch.setattr(gpu_report, "_LEAST_SECONDS", 0)
    arguments = gpu_report.parse_arguments(["--output", str(tmp_path), "--minutes", "0.2", "--parts", *PROGRAMS])
    begin = time.monotonic()
    gpu_report.report(arguments, lambda name, rows, *_: [sys.executable, "-c", PROGRAMS[name], str(rows)])
    assert time.monotonic() - begin < 40
    results = {result["part"]: result for result in json.loads((tmp_path / "report.json").read_text())}
    outcomes = [results[name]["outcome"] for name in PROGRAMS]
    assert outcomes == ["done", "failed (1)", "stopped at its time limit", "killed by SIGKILL", "done"]
    assert all(result["rows"] == [{"what": "one", "value": 1.5}] for result in results.values())
    assert results["scan"]["error"] == "RuntimeError: the kernel is broken"
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "the kernel is broken" in page and page.count("| one | 1.5 |") == 5


def test_a_part_runs_as_a_program(scripts, tmp_path):
    import gpu_report

    arguments = gpu_report.parse_arguments(["--output", str(tmp_path), "--rehearse", "--parts", "rtrl"])
    (result,) = gpu_report.report(arguments)
    assert result["outcome"] == "done", result
    assert [row["streams"] for row in result["rows"]] == [1, 2] and all(row["RTRL ms"] > 0 for row in result["rows"])
    assert "A rehearsal" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_rows_of_the_parts(scripts):
    import gpu_report
    from gpu_report_parts import PARTS, Sizes

    assert set(PARTS) == set(gpu_report.PARTS)

    def rows(part, most=None):
        return list(itertools.islice(PARTS[part](torch.device("cpu"), Sizes(True), time.monotonic() + 60), most))

    known = {row["what"]: row["value"] for row in rows("environment")}
    assert known["torch"] == torch.__version__ and known["copy, read and written, GB/s"] > 0
    assert [row["step"] for row in rows("smt")] == ["SMT", "yardstick", "BPTT"]
    assert rows("profile")[0]["ms"] > 0
    scans = {row["backend"]: row for row in rows("scan", 6)}
    assert scans["torch"]["forward + backward ms"] > 0 and "forward ms" not in scans["hgrn-chunk"]
    memora, hawk, llama = rows("generation", 3)
    assert [row["model"] for row in (memora, hawk, llama)] == ["memora", "hawk", "llama"] and llama["bytes/s"] > 0
    assert rows("training", 1)[0]["bytes/s"] > 0
    assert all(row["planned GB"] > 0 for row in rows("memory"))


def test_page_and_plots(scripts, tmp_path):
    pytest.importorskip("matplotlib")
    import gpu_report_pages

    rows = [
        {
            "size": "s0",
            "precision": "float32",
            "model and way": "memora",
            "bytes/s": 12_345.6,
            "limit bytes/s": 2e4,
        },
        {"size": "s0", "precision": "float32", "model and way": "hawk", "error": "OutOfMemoryError: 3 | 4"},
    ]
    gpu_report_pages.write(tmp_path, [{"part": "training", "outcome": "done", "seconds": 3.0, "rows": rows}], False)
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| s0 | float32 | memora | 12,346 | 20,000 |  |" in page and "3 / 4" in page
    assert "![training](training.png)" in page and (tmp_path / "training.png").stat().st_size > 5000
