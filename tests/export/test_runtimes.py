"""Exported steps in every runtime: outputs and states of the model, also with narrow weights."""

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


def export(model, folder, runtime, weights=None):
    for package in PACKAGES[runtime]:
        pytest.importorskip(package)
    save_exported_step(model, folder, runtime=runtime, weights=weights)
    return ExportedStep(folder)


@pytest.mark.long
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
@pytest.mark.parametrize(
    ("runtime", "case", "weights"),
    [
        *(("torch", case, "int8") for case in CASES),
        # The same graph elsewhere: one model with a tied embedding, complex numbers, convolutions, attention each.
        *(
            (runtime, case, weights)
            for runtime in PACKAGES
            for case in ("memora", "lru", "mgrade", "smt-rnn")
            for weights in ("int8", "bfloat16")
            if (runtime, weights) != ("torch", "int8")
        ),
    ],
)
def test_narrow_weights_are_those_of_a_rounded_model(runtime, case, weights, tmp_path):
    model = build(case)
    step = export(model, tmp_path / "step", runtime, weights)
    round_weights(model, weights)
    check_step(step, model, tolerance=1e-4)


def test_a_model_of_one_stream(tmp_path):
    specification = save_exported_step(build("lru"), tmp_path / "c", runtime="c")
    assert specification.max_streams == 1
    with pytest.raises(ValueError, match="`inputs` has 2 streams; this program reads at most 1"):
        specification.check(torch.zeros(2, dtype=torch.long), specification.init_state(2))
