"""The benchmarks of whole models run at the smallest sizes and make their tables and plots."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from hf_recurrent.cli import pretrain

SCRIPTS = Path(__file__).parents[2] / "scripts"


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


@pytest.fixture(scope="module")
def counted_run(tmp_path_factory):
    """A model with a count memory, trained for a few steps, and the folder of its corpus."""
    folder, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("run") / "run"
    for number in range(12):
        body = "".join(f"def f{number}_{each}(x):\n    return x + {each}\n\n\n" for each in range(5))
        (folder / f"{number}.py").write_text(body)
    options = ["--use_cpu", "--max_steps", "6", "--disable_tqdm", "true", "--sample_every", "0", "--sample_bytes", "8"]
    sizes = ["hidden_size=16", "state_size=16", "num_hidden_layers=1", "count_memory_slots=256"]
    sizes += ["count_memory_text=4096", "count_memory_window=256"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HOME", str(folder.parent / "home"))
        corpus = ["--corpus", str(folder), "--accounts", "false", "--block_size", "16"]
        pretrain.main([*corpus, *options, "--output_dir", str(output), "--config_overrides", *sizes])
        yield str(output), ["--corpus", str(folder)]


def test_contexts(run, counted_run, tmp_path):
    model, corpus = counted_run
    rows = run("benchmark_contexts", model, *corpus, "--output", str(tmp_path / "kinds.json"))
    assert rows[0][:2] == ["all bytes", "100.0%"] and len(rows) == 8
    counts, network, both = map(float, rows[0][2:])
    assert both < network and counts < network
    assert (tmp_path / "kinds.svg").read_text().count("<path") > 20


def test_samples(run, counted_run):
    model, corpus = counted_run
    rows = run("benchmark_samples", model, *corpus, "--samples", "3", "--length", "24")
    assert [row[0] for row in rows] == ["held-out text itself", model, f"{model}, frozen", f"{model}, network alone"]
    assert rows[0][1:3] == ["3", "100.0%"] and rows[3][2] == "0.0%"


@pytest.mark.long
def test_counts(run, tmp_path):
    for number in range(12):
        (tmp_path / f"{number}.py").write_text("\n".join(f"value_{number}_{each} = {each}" for each in range(400)))
    rows = run("benchmark_counts", "--corpus", str(tmp_path), "--models", "memora-tiny", "--rounds", "1")
    assert [row[:2] for row in rows] == [["memora-tiny", "blocks"], ["memora-tiny", "single steps"]]
    assert all(float(network) > 0 and float(both) > 0 for _, _, network, both, _ in rows)


def test_generation(run):
    arguments = ["--rows", "selective-copying", "--families", "memora", "hawk", "llama", "--bytes", "6"]
    arguments += ["--position", "100", "--bandwidth_bytes", "65536", "--rounds", "1"]
    memora, hawk, llama = run("benchmark_generation", *arguments)
    assert memora[0] == "memora-selective-copying" and memora[6] == "1.00"
    # Two layers: a state of 256 numbers; the same and three taps; keys and values of 105 positions × 192 numbers.
    assert [float(line[-1]) for line in (memora, hawk, llama)] == [2.0, 8.0, 315.0]


def test_training(run):
    arguments = ["--rows", "selective-copying", "--families", "memora", "llama", "--rounds", "1", "--streams", "2"]
    memora, llama = run("benchmark_training", *arguments, "--block_size", "16", "--matrix_size", "64")
    assert (memora[2], memora[6], llama[0]) == ("2", "1.00", "llama-selective-copying") and float(memora[-1]) > 0


def test_memory_growth(run, capsys):
    sizes = ["--bytes", "3000", "--model", "memora-selective-copying"]
    run("benchmark_memory_growth", "generate", *sizes)
    run("benchmark_memory_growth", "learn", *sizes, "--stride", "64")


@pytest.mark.long
def test_scan(run, monkeypatch):
    arguments = ["--shape", "2x8x16", "--backends", "torch", "torch-loop", "--repetitions", "1"]
    ours, peer = run("benchmark_scan", *arguments)
    assert ours[:3] == ["1", "2x8x16", "torch"] and peer[2] == "torch-loop" and peer[-2:] == ["-", "-"]
    assert float(ours[-2]) > 0 and all(float(cell) > 0 for cell in peer[3:5])


def test_smt(run, capsys):
    sizes = "--hidden_size 32 --layers 2 --readout_layers 2 --memory_tokens 3 --context_length 8 --future_length 4"
    lines = run("benchmark_smt", *sizes.split(), "--sequences", "2", "--rounds", "1", "--matrix_size", "64")
    assert [line[0] for line in lines[:2]] == ["SMT", "BPTT"]
    rows = [[float(cell) for cell in line] for line in lines if line[0].isdigit()]
    assert [row[:2] for row in rows] == [[2, 3], [4, 3], [8, 3], [8, 6]]
    per_token = [row[3] for row in rows]
    assert max(per_token) < 3 * min(per_token)
    assert rows[3][4] > 1.5 * rows[2][4]  # BPTT keeps every memory token of every step


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


@pytest.mark.long
def test_steps_beside_each_other(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    arguments = ["--models", "memora-selective-copying", "--rounds", "1", "--bandwidth_bytes", "65536"]
    lines = run("benchmark_steps", *arguments, "--weights", "float32", "int8", "--runtimes", "torch", "onnx")
    assert [line[1] for line in lines[:6]] == [
        "compiled step, called directly", "compiled step, `model()` as in `generate()`", "compiled step, `model()`",
        "forward", "torch.export", "onnxruntime",
    ]  # fmt: skip
    assert [line[2] for line in lines] == ["float32"] * 6 + ["int8"] * 5
    assert lines[0][-1] == "1.00" and all(float(line[-1]) > 0 for line in lines[:5])
    assert lines[5][3].startswith("not measured: The format 'onnx' needs onnx")
