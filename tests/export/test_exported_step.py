"""Exported programs against the model, byte by byte; folders that are damaged, foreign or of another version."""

import json
import shutil
import sys
import zipfile

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_recurrent import ByteTokenizer, ExportedStep, config_from_preset, export_block, export_step, save_exported_step
from hf_recurrent.checkpoint_manifest import write_manifest
from hf_recurrent.export.scan_decomposition import scan_by_doubling
from hf_recurrent.export.step_module import StepModule
from hf_recurrent.modeling import single_step
from hf_recurrent.modeling.linear_scan import linear_scan_reference
from hf_recurrent.modeling.recurrent_units import RECURRENT_UNITS

FAMILIES = ("memora", "hawk", "mgrade", "lru", "smt-rnn")
BYTES = 400


def tiny_model(family, unit=None):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1}
    if family == "smt-rnn":
        sizes |= {"num_memory_tokens": 2, "num_attention_heads": 2, "num_readout_layers": 1}
    else:
        sizes |= {"state_size": 16} | ({"recurrent_unit": unit} if unit else {})
    return AutoModelForCausalLM.from_config(config_from_preset(f"{family}-tiny", **sizes)).eval()


@torch.no_grad()
def check(step, model, tolerance=2e-5, count=BYTES):
    """`step`, as a function of ids and state, gives the logits and states of the model."""
    for streams in (1, 3):
        state = expected_state = model.init_state(streams)
        for ids in torch.randint(1, 256, (count // streams, streams)):
            logits, state = step(ids, state)
            expected = model(ids.unsqueeze(1), state=expected_state)
            expected_state = expected.state
            torch.testing.assert_close(logits, expected.logits[:, 0], atol=tolerance, rtol=tolerance)
        assert list(state) == list(expected_state)
        for name in state:
            torch.testing.assert_close(state[name], expected_state[name], atol=tolerance, rtol=tolerance)


def as_step(program, model):
    module, names = program.module(), list(model.init_state(1))

    def step(ids, state):
        logits, *parts = module(ids, *(state[name] for name in names))
        return logits, dict(zip(names, parts, strict=True))

    return step


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[] if family in ("lru", "memora") else [pytest.mark.slow]) for family in FAMILIES],
)
def test_a_step_is_that_of_the_model(family):
    model = tiny_model(family)
    check(as_step(export_step(model), model), model)


@pytest.mark.slow
@pytest.mark.parametrize("unit", sorted(set(RECURRENT_UNITS) - {"glru", "rg_lru"}))
def test_a_step_of_every_unit(unit):
    model = tiny_model("memora", unit)
    program = export_step(model)
    assert not any(
        v.meta["val"].is_complex() for v in program.graph.nodes if isinstance(v.meta.get("val"), torch.Tensor)
    )
    check(as_step(program, model), model)


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["glru", "complex_lru"])
def test_a_block_is_that_of_the_model(unit):
    model = tiny_model("memora", unit)
    module = export_block(model).module()
    for streams, steps in ((1, 2), (3, 50)):
        ids = torch.randint(1, 256, (streams, steps))
        state = model(torch.randint(1, 256, (streams, 7))).state
        with torch.no_grad():
            logits, *parts = module(ids, *state.values())
            expected = model(ids, state=state)
        torch.testing.assert_close(logits, expected.logits, atol=2e-5, rtol=2e-5)
        for part, name in zip(parts, state, strict=True):
            torch.testing.assert_close(part, expected.state[name], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("steps", [1, 2, 33])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_scan_by_doubling(steps, dtype):
    a, b = torch.randn(2, 2, steps, 5, dtype=dtype)
    a[:, ::3, 0] = 0
    state, resets = torch.randn(2, 5, dtype=dtype), torch.rand(2, steps) < 0.2
    for mask in (None, resets):
        for found, expected in zip(
            scan_by_doubling(a, b, state, mask), linear_scan_reference(a, b, state, mask), strict=True
        ):
            torch.testing.assert_close(found, expected)


def test_a_classifier_gives_the_logits_of_each_step():
    config = config_from_preset("mgrade-smnist", hidden_size=8, num_hidden_layers=1, num_labels=3)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    program, values = export_step(model).module(), torch.randn(2, 30, config.input_size)
    state, logits = list(model.model.init_state(2).values()), []
    with torch.no_grad():
        for value in values.unbind(1):
            step, *state = program(value, *state)
            logits.append(step)
        pooled = torch.stack(logits).mean(0) if config.pooling == "mean" else logits[-1]
        torch.testing.assert_close(pooled, model(input_values=values).logits, atol=1e-5, rtol=1e-5)


def test_models_that_cannot_be_exported_are_named():
    with pytest.raises(ValueError, match="a block cannot be exported: the steps of its GRU are sequential"):
        export_block(tiny_model("memora", "gru"))
    with pytest.raises(ValueError, match="a block cannot be exported: the steps of its memory are sequential"):
        export_block(tiny_model("smt-rnn"))
    with pytest.raises(TypeError, match="`model` is a Linear; it must be a recurrent model"):
        export_step(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="`weights` is 'int3'; it must be one of 'bfloat16', 'int8', or None"):
        export_step(tiny_model("memora"), weights="int3")


def test_an_operation_that_cannot_be_exported_is_named(monkeypatch):
    model = tiny_model("memora")
    mlp = type(model.model.layers[0].mlp)
    monkeypatch.setattr(mlp, "forward", lambda self, hidden: hidden if float(hidden.sum()) > 0 else -hidden)
    with pytest.raises(ValueError, match="`model` is a MemoraModel, of which a step cannot be exported: "):
        export_step(model)


# ---- Folders


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder, and its model."""
    model, folder = tiny_model("lru"), tmp_path_factory.mktemp("export") / "step"
    save_exported_step(model, folder, tokenizer=ByteTokenizer(), weights="int8")
    return folder, model


def test_a_folder_has_all_that_a_program_needs(exported):
    folder, model = exported
    step = ExportedStep(folder)
    assert {"README.md", "manifest.json", "specification.json", "step.pt2", "tokenizer_config.json"} <= {
        path.name for path in folder.iterdir()
    }
    check(step, model, tolerance=0.2, count=6)


def test_int8_weights_are_stored_as_such(exported):
    folder, model = exported
    weights = sum(p.numel() for p in model.parameters())
    with zipfile.ZipFile(folder / "step.pt2") as archive:
        stored = sum(i.file_size for i in archive.infolist() if "/weights/weight" in i.filename)
    assert weights <= stored < 2 * weights  # one byte each, and scales and vectors


@pytest.mark.parametrize("name", ["step.pt2", "specification.json", "README.md", "manifest.json"])
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
        ("runtime", "aoti", "the program is not `step.aoti.pt2`"),
        ("runtime", "other", "unknown runtime"),
        ("program", "../step.pt2", "the program is not `step.pt2`"),
        ("state", [{"name": "x"}], "damaged"),
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


def test_a_program_with_a_pickle_is_refused(exported, tmp_path):
    folder = shutil.copytree(exported[0], tmp_path / "copy")
    with zipfile.ZipFile(folder / "step.pt2", "a") as archive:
        archive.writestr("step/data/weights/other_config.json", '{"config": {"x": {"use_pickle": true}}}')
    write_manifest(folder, kind="exported_step")
    with pytest.raises(ValueError, match="holds pickled tensors"):
        ExportedStep(folder)


def test_wrong_inputs_are_refused(exported):
    step = ExportedStep(exported[0])
    state = step.init_state(1)
    with pytest.raises(ValueError, match="`inputs` holds 256, but the vocabulary has 256"):
        step(torch.tensor([256]), state)
    with pytest.raises(ValueError, match=r"`inputs` has shape \(1, 1\); it must be \(B\)"):
        step(torch.tensor([[1]]), state)
    with pytest.raises(ValueError, match="has shape"):
        step(torch.tensor([1, 2]), state)
    with pytest.raises(ValueError, match=r"has type torch\.float64"):
        step(torch.tensor([1]), {name: tensor.double() for name, tensor in state.items()})


def test_states_belong_to_their_weights(exported, tmp_path):
    step = ExportedStep(exported[0])
    _, state = step(torch.tensor([65]), step.init_state(1))
    step.save_state(state, tmp_path / "state.safetensors")
    loaded = step.load_state(tmp_path / "state.safetensors")
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    step.specification.__dict__["weights_hash"] = "0" * 64
    with pytest.raises(ValueError, match="was saved with other weights"):
        step.load_state(tmp_path / "state.safetensors")


def test_a_folder_with_files_is_left_alone(exported):
    with pytest.raises(FileExistsError, match="must be a new or empty folder"):
        save_exported_step(exported[1], exported[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runtime", "packages"),
    [("aoti", []), ("onnx", ["onnxscript", "onnxruntime"]), ("executorch", ["executorch"])],
)
@pytest.mark.parametrize("family", ["memora", "lru"])
def test_other_runtimes(runtime, packages, family, tmp_path):
    for package in packages:
        pytest.importorskip(package)
    model = tiny_model(family)
    save_exported_step(model, tmp_path / "step", runtime=runtime)
    check(ExportedStep(tmp_path / "step"), model)


def test_a_missing_runtime_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match="The format 'onnx' needs onnx onnxscript; try: pip install onnx onnxscript"):
        save_exported_step(tiny_model("memora"), tmp_path / "step", runtime="onnx")
    assert not any(tmp_path.iterdir())


def test_the_recorded_graph_and_the_exported_one_compute_the_same():
    model = tiny_model("hawk")
    module = StepModule(model)
    ids, state = torch.tensor([[65], [66]]), model.init_state(2)
    with torch.no_grad():
        compiled = single_step.find_single_step(model, ids)
        if compiled is None:
            pytest.skip("the kernel was not built")
        logits, new_state = compiled.run(model, ids, state)
        expected, *parts = export_step(model).module()(ids[:, 0], *state.values())
    torch.testing.assert_close(logits[:, 0], expected, atol=1e-5, rtol=1e-5)
    for name, part in zip(module.state_names, parts, strict=True):
        torch.testing.assert_close(new_state[name], part, atol=1e-5, rtol=1e-5)
