"""Exported steps in every runtime: outputs and states of the model, also with narrow weights."""

import shutil
import subprocess

import pytest
import torch
from export_cases import CASES, build, check_step, run_card

from hf_recurrent import ExportedStep, save_exported_step
from hf_recurrent.export.weight_types import round_weights

PACKAGES = {
    "torch": [],
    "aoti": [],
    "onnx": ["onnx", "onnxscript", "onnxruntime"],
    "executorch": ["executorch"],
}
COMPILER = shutil.which("gcc") or shutil.which("cc")


def export(model, folder, runtime, weights=None):
    for package in PACKAGES[runtime]:
        pytest.importorskip(package)
    save_exported_step(model, folder, runtime=runtime, weights=weights)
    return ExportedStep(folder)


@pytest.mark.parametrize(
    ("runtime", "case"),
    [
        pytest.param(runtime, case, marks=[] if (runtime, case) == ("onnx", "memora+indrnn") else [pytest.mark.slow])
        for runtime in PACKAGES
        for case in CASES
        if runtime != "torch"  # test_programs.py
    ],
)
def test_every_runtime_gives_the_step_of_the_model(runtime, case, tmp_path, monkeypatch):
    model = build(case)
    check_step(export(model, tmp_path / "step", runtime), model)
    run_card(tmp_path / "step", monkeypatch)
    assert not [path.name for path in tmp_path.rglob("*") if path.is_file() and b"step_module.py" in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "bfloat16"])
@pytest.mark.parametrize("case", ["memora", "lru", "mgrade", "smt-rnn"])
@pytest.mark.parametrize("runtime", PACKAGES)
def test_narrow_weights_are_those_of_a_rounded_model(runtime, case, weights, tmp_path):
    model = build(case)
    step = export(model, tmp_path / "step", runtime, weights)
    round_weights(model, weights)
    check_step(step, model, tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="gcc is not installed")
@pytest.mark.parametrize("case", CASES)
def test_c_compiles_or_the_operation_is_named(case, tmp_path):
    """`test_c_source.py` compares the numbers."""
    model = build(case)
    try:
        save_exported_step(model, tmp_path / "c", runtime="c")
    except ValueError as error:
        assert case.startswith("smt-rnn") and str(error).startswith("The step has no form in C: it needs ")
    else:
        flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-c", "step.c", "-o", "step.o"]
        done = subprocess.run([COMPILER, *flags], cwd=tmp_path / "c", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]


def test_a_model_of_one_stream(tmp_path):
    specification = save_exported_step(build("lru"), tmp_path / "c", runtime="c")
    assert specification.max_streams == 1
    with pytest.raises(ValueError, match="`inputs` has 2 streams; this program reads at most 1"):
        specification.check(torch.zeros(2, dtype=torch.long), specification.init_state(2))
