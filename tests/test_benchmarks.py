"""The benchmarks of whole models run at the smallest sizes and make their tables and plots."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def run(monkeypatch, capsys):
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(SCRIPTS)

    def run_script(name: str, *arguments: str) -> list[list[str]]:
        """The cells of the table that the script prints."""
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]

    yield run_script
    torch.set_num_threads(threads)


def test_generation(run, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = [
        "--rows",
        "selective-copying",
        "--families",
        "memora",
        "hawk",
        "llama",
        "--bytes",
        "6",
        "--rounds",
        "1",
    ]
    arguments += ["--position", "100", "--bandwidth_bytes", "65536", "--output", str(tmp_path / "made" / "generation")]
    memora, hawk, llama = run("benchmark_generation", *arguments)
    assert memora[0] == "memora-selective-copying" and memora[6] == "1.00"
    # Two layers: a state of 256 numbers; the same and three taps; keys and values of 105 positions × 192 numbers.
    assert [float(line[-1]) for line in (memora, hawk, llama)] == [2.0, 8.0, 315.0]
    saved = (tmp_path / "made" / "generation.md").read_text(encoding="utf-8")
    assert "| llama-selective-copying |" in saved and (tmp_path / "made" / "generation.png").stat().st_size > 5000


def test_training(run, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ["--rows", "selective-copying", "--families", "memora", "llama", "--rounds", "1", "--streams", "2"]
    arguments += ["--block_size", "16", "--matrix_size", "64", "--output", str(tmp_path / "training")]
    memora, llama = run("benchmark_training", *arguments)
    assert (memora[2], memora[6], llama[0]) == ("2", "1.00", "llama-selective-copying")
    assert float(memora[-1]) > 0 and (tmp_path / "training.png").is_file() and (tmp_path / "training.md").is_file()


def test_threads(run):
    arguments = ["--rows", "selective-copying", "--callers", "3", "--bytes", "4", "--rounds", "1"]
    alone, together = run("benchmark_threads", *arguments, "--bandwidth_bytes", "65536")
    assert alone[:2] == ["memora-selective-copying", "1"] and together[1] == "3" and alone[3] == "1.00"


def test_memory_growth(run, capsys):
    sizes = ["--bytes", "3000", "--model", "memora-selective-copying"]
    run("benchmark_memory_growth", "generate", *sizes)
    run("benchmark_memory_growth", "learn", *sizes, "--stride", "64")


def test_scan(run, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ["--shape", "2x8x16", "--backends", "torch", "torch-loop", "--repetitions", "1"]
    ours, peer = run("benchmark_scan", *arguments, "--output", str(tmp_path / "made" / "scan"))
    assert ours[:3] == ["1", "2x8x16", "torch"] and peer[2] == "torch-loop" and peer[-1] == "-"
    assert float(ours[-1]) > 0 and all(float(cell) > 0 for cell in peer[3:5])
    saved = (tmp_path / "made" / "scan.md").read_text(encoding="utf-8")
    assert "| torch-loop |" in saved and (tmp_path / "made" / "scan.png").stat().st_size > 5000


def test_scan_peers_that_cannot_run_or_are_wrong(run, capsys, monkeypatch, tmp_path):
    import scan_peers

    arguments = ["--shape", "2x8x16", "--backends", "broken", "torch-loop", "torch", "--repetitions", "1"]
    arguments += ["--dtype", "bfloat16", "--peers_folder", str(tmp_path)]
    missing = scan_peers.Peer(lambda: __import__("a_module_that_is_not_there"))
    monkeypatch.setitem(scan_peers.PEERS, "broken", missing)
    assert [line[2] for line in run("benchmark_scan", *arguments)] == ["torch-loop", "torch"]
    short = missing._replace(load=lambda: lambda a, b, state: a, takes=lambda shape: shape[1] > 8)
    monkeypatch.setitem(scan_peers.PEERS, "broken", short)
    with pytest.raises(ValueError, match="broken is off by"):
        run("benchmark_scan", *arguments)
    capsys.readouterr()  # the head of the table
    monkeypatch.setattr(scan_peers, "check", lambda *arguments: None)
    assert [line[2] for line in run("benchmark_scan", *arguments)] == ["torch-loop", "torch"]


def test_bytes_kept_for_the_backward_pass(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from benchmarking import kept_bytes

    x, first, second = torch.randn(3, 4), torch.nn.Parameter(torch.randn(5, 4)), torch.nn.Parameter(torch.randn(2, 5))
    # The inputs (3, 4), and once the values (3, 5) that both relu and the second product need; no parameters.
    assert kept_bytes(lambda: ((x @ first.T).relu() @ second.T).sum()) == 4 * (3 * 4 + 3 * 5)


def test_too_few_bytes(run, capsys):
    with pytest.raises(SystemExit):
        run("benchmark_generation", "--bytes", "2")
    assert "--bytes is 2; it must be at least 4." in capsys.readouterr().err


def test_steps_beside_each_other(run, tmp_path):
    arguments = ["--models", "memora-selective-copying", "--rounds", "1", "--bandwidth_bytes", "65536"]
    arguments += ["--exports", str(tmp_path / "exports"), "--runtimes", "torch"]
    lines = run("benchmark_generation", "--only", "runtimes", "--weights", "float32", *arguments)
    assert [line[1] for line in lines] == [
        "compiled step", "compiled step, without `model()`", "forward", "torch.export"
    ]  # fmt: skip
    assert lines[0][-1] == "1.00" and all(float(line[-1]) > 0 for line in lines)
    assert [path.name for path in (tmp_path / "exports").iterdir()] == ["memora-selective-copying-torch-float32"]
    weights = run("benchmark_generation", "--only", "weights", *arguments)
    assert [line[2] for line in weights] == ["float32", "bfloat16", "int8"]
    first = run("benchmark_generation", "--only", "first", *arguments)
    assert len(first[0]) == 5


def test_a_peer_that_is_not_installed_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    arguments = ["--models", "memora-selective-copying", "--rounds", "1", "--bandwidth_bytes", "65536"]
    arguments += ["--runtimes", "onnx", "--weights", "float32", "--exports", str(tmp_path)]
    lines = run("benchmark_generation", "--only", "runtimes", *arguments)
    assert lines[-1][1] == "onnxruntime" and lines[-1][3].startswith("not measured: The format 'onnx' needs onnx")
