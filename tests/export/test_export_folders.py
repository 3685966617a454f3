"""Folders with an exported step: what they hold, and those that are damaged, foreign or of another version."""

import json
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from export_cases import build, check_step, run_card
from safetensors.torch import load_file, save_file

from hf_recurrent import ByteTokenizer, ExportedStep, save_exported_step
from hf_recurrent.checkpoints.manifest import write_manifest
from hf_recurrent.export.runtimes import RUNTIMES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder, and its model."""
    model, folder = build("lru"), tmp_path_factory.mktemp("export") / "step"
    save_exported_step(model, folder, tokenizer=ByteTokenizer(), weights="int8")
    return folder, model


def test_a_folder_has_all_that_a_program_needs(exported):
    folder, model = exported
    step = ExportedStep(folder)
    assert {"README.md", "manifest.json", "specification.json", "step.pt2", "tokenizer_config.json"} <= {
        path.name for path in folder.iterdir()
    }
    check_step(step, model, tolerance=0.2, count=6)


def test_a_folder_of_a_classifier_has_its_pooling_and_state(tmp_path):
    model = build("mingru-smnist")
    specification = save_exported_step(model, tmp_path / "step")
    assert specification.pooling == model.config.pooling and specification.input_size == model.config.input_size
    check_step(ExportedStep(tmp_path / "step"), model, count=6)


def test_int8_weights_are_stored_as_such(exported):
    folder, model = exported
    weights = sum(p.numel() for p in model.parameters())
    with zipfile.ZipFile(folder / "step.pt2") as archive:
        stored = sum(i.file_size for i in archive.infolist() if "/weights/weight" in i.filename)
    assert weights <= stored < 2 * weights  # one byte each, and scales and vectors


@pytest.mark.parametrize("name", ["step.pt2", "specification.json", "tokenizer_config.json", "manifest.json"])
def test_damage_is_noticed_before_the_program_is_loaded(exported, tmp_path, name, monkeypatch):
    folder = shutil.copytree(exported[0], tmp_path / "copy")
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    monkeypatch.setattr(torch.export, "load", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="damaged"):
        ExportedStep(folder)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=r"damaged|not an export"):
        ExportedStep(folder)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", "hf_recurrent.export.9", "has the format 'hf_recurrent.export.9'; this version"),
        ("runtime", "aoti", "the program has no checksum"),
        ("runtime", "other", "unknown runtime"),
    ],
)
def test_other_folders_are_refused(exported, tmp_path, field, value, message):
    folder = shutil.copytree(exported[0], tmp_path / "copy")
    specification = json.loads((folder / "specification.json").read_text())
    (folder / "specification.json").write_text(json.dumps(specification | {field: value}))
    write_manifest(folder, kind="exported_step")
    with pytest.raises(ValueError, match=message):
        ExportedStep(folder)
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        ExportedStep(tmp_path / "missing")


def test_the_program_of_another_model_is_refused(exported, tmp_path):
    folder = shutil.copytree(exported[0], tmp_path / "copy")
    other = torch.export.export(torch.nn.Linear(3, 3), (torch.ones(2, 3),))
    for node in other.graph.nodes:
        node.meta.pop("from_node", None)
    RUNTIMES["torch"].write(other, folder / "step.pt2", [])
    with pytest.raises(ValueError, match=r"is damaged: `step\.pt2` has .* bytes instead of"):
        ExportedStep(folder)


@pytest.mark.parametrize("runtime", ["onnx", "executorch", "aoti"])
def test_a_program_that_its_runtime_cannot_read_is_named(exported, tmp_path, runtime):
    if runtime != "aoti":
        pytest.importorskip({"onnx": "onnxruntime"}.get(runtime, runtime))
    folder, file = shutil.copytree(exported[0], tmp_path / "copy"), RUNTIMES[runtime].file
    (folder / "step.pt2").rename(folder / file)
    specification = json.loads((folder / "specification.json").read_text()) | {"runtime": runtime, "program": file}
    (folder / "specification.json").write_text(json.dumps(specification))
    write_manifest(folder, kind="exported_step")
    with pytest.raises(ValueError, match=f"{file}` cannot be loaded: "):
        ExportedStep(folder)


def test_the_examples_of_the_card_run(exported, monkeypatch):
    assert run_card(exported[0], monkeypatch) == 1


def test_a_card_may_be_edited(exported, tmp_path):
    folder = shutil.copytree(exported[0], tmp_path / "copy")
    (folder / "README.md").write_text("Ours.")
    ExportedStep(folder)


def test_no_file_names_a_place_of_this_machine(exported):
    for path in exported[0].iterdir():
        content = path.read_bytes()
        assert not [name for name in (b"step_module.py", str(ROOT).encode()) if name in content], path.name


def test_wrong_inputs_are_refused(exported):
    step = ExportedStep(exported[0])
    state = step.init_state(1)
    with pytest.raises(ValueError, match="`inputs` holds 256, but the vocabulary has 256"):
        step(torch.tensor([256]), state)
    with pytest.raises(ValueError, match=r"`inputs` has shape \(1, 1\); it must be \(B\)"):
        step(torch.tensor([[1]]), state)
    with pytest.raises(ValueError, match="has shape"):
        step(torch.tensor([1, 2]), state)
    with pytest.raises(ValueError, match="`inputs` has 65537 streams; this program reads at most 65536"):
        step(torch.zeros(65537, dtype=torch.long), state)
    with pytest.raises(ValueError, match=r"has type torch\.float64"):
        step(torch.tensor([1]), {name: tensor.double() for name, tensor in state.items()})


def test_states_belong_to_their_weights(exported, tmp_path):
    step = ExportedStep(exported[0])
    _, state = step(torch.tensor([65]), step.init_state(1))
    step.save_state(state, tmp_path / "state.safetensors")
    loaded = step.load_state(tmp_path / "state.safetensors")
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    save_file(load_file(tmp_path / "state.safetensors"), tmp_path / "other", {"weights_hash": "0" * 64})
    with pytest.raises(ValueError, match="was saved with other weights"):
        step.load_state(tmp_path / "other")
    (tmp_path / "other").write_bytes((tmp_path / "state.safetensors").read_bytes()[:-3])
    with pytest.raises(ValueError, match="is damaged or not a saved state: "):
        step.load_state(tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="no saved state"):
        step.load_state(tmp_path / "missing")


def test_a_folder_with_files_is_left_alone(exported):
    with pytest.raises(FileExistsError, match="must be a new or empty folder"):
        save_exported_step(exported[1], exported[0])


def test_a_missing_runtime_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match="The format 'onnx' needs onnx onnxscript; try: pip install onnx onnxscript"):
        save_exported_step(build("memora"), tmp_path / "step", runtime="onnx")
    assert not any(tmp_path.iterdir())
