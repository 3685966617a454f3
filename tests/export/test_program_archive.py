"""Archives of `torch.export` that would run something: refused before torch reads them."""

import io
import json
import zipfile

import pytest
import torch

from hf_recurrent.export.program_archive import checked_archive


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The files of a small program: path in the archive → content."""

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, inputs, state):
            return torch.nn.functional.gelu(self.linear(inputs), approximate="tanh"), state + inputs.sum()

    streams = torch.export.Dim("streams", min=1, max=9)
    shapes = {"inputs": {0: streams}, "state": {0: streams}}
    exported = torch.export.export(Step(), (torch.ones(2, 3), torch.ones(2, 3)), dynamic_shapes=shapes)
    exported.example_inputs = None
    for node in exported.graph.nodes:
        for name in ("stack_trace", "from_node", "source_fn_stack"):
            node.meta.pop(name, None)
    path = tmp_path_factory.mktemp("program") / "step.pt2"
    torch.export.save(exported, path)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_a_program_passes_and_runs(program, tmp_path):
    copy = checked_archive(write(tmp_path / "step.pt2", program))
    module = torch.export.load(copy).module(check_guards=False)
    outputs, state = module(torch.ones(4, 3), torch.zeros(4, 3))
    assert outputs.shape == (4, 3) and torch.equal(state, torch.full((4, 3), 12.0))


def model_json(change):
    """A change of the graph's JSON."""

    def apply(files):
        graph = json.loads(files["step/models/model.json"])
        change(graph, graph["graph_module"]["graph"]["nodes"][-1])
        return files | {"step/models/model.json": json.dumps(graph)}

    return apply


def expression(graph, node):
    text = json.dumps(graph).replace("Symbol('", "__import__('os').system('true') or Symbol('")
    graph.clear()
    graph.update(json.loads(text))


def weights(**changes):
    """Changes of the description of all weights."""

    def apply(files):
        name = "step/data/weights/model_weights_config.json"
        config = json.loads(files[name])
        for payload in config["config"].values():
            payload.update(changes)
        return files | {name: json.dumps(config)}

    return apply


ENUM = '[1, {"type": null, "context": {"__enum__": true, "fqn": "this:x", "name": "y"}, "children_spec": []}]'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (weights(use_pickle=True), "holds pickled tensors; it is not loaded"),
        (weights(use_pickle=1), "holds pickled tensors"),
        (weights(path_name="custom_obj_0"), "holds pickled tensors"),
        (
            lambda files: files | {"step/data/constants/model.pt": b"x"},
            "holds the file 'step/data/constants/model.pt'",
        ),
        (lambda files: files | {"step/data/aotinductor/model/x.so": b"x"}, "which may be a pickle or code"),
        (lambda files: files | {"step/data/sample_inputs/model.pt": b"x"}, "holds pickled sample inputs"),
        (lambda files: files | {"other/byteorder": b"little"}, "several folders"),
        (
            model_json(lambda graph, node: node.update(target="torch.load")),
            "calls 'torch.load', which is not an operation",
        ),
        (model_json(lambda graph, node: node.update(target="_operator.methodcaller")), "which is not an operation"),
        (
            model_json(lambda graph, node: node.update(target="torch.ops.aten.add_.Tensor")),
            "which is not an operation",
        ),
        (model_json(lambda graph, node: node.update(target="torch.ops.hf.x.default")), "which is not an operation"),
        (
            model_json(lambda graph, node: node["inputs"][0].update(arg={"as_string": "/etc/passwd"})),
            "passes the text",
        ),
        (model_json(lambda graph, node: node["metadata"].update(source_fn_stack="x,torch.load")), "'source_fn_stack'"),
        (model_json(lambda graph, node: node["inputs"][0].update(arg={"as_custom_obj": {}})), "'as_custom_obj'"),
        (model_json(expression), "which is more than a symbol"),
        (
            model_json(
                lambda graph, node: graph["graph_module"]["module_call_graph"][0]["signature"].update(in_spec=ENUM)
            ),
            "foreign kind",
        ),
        (lambda files: files | {"step/models/model.json": b"{"}, "is damaged: "),
        (lambda files: files | {"step/data/weights/model_weights_config.json": b"[]"}, "is damaged: "),
    ],
)
def test_what_torch_would_run_is_refused(program, tmp_path, change, message):
    path = write(tmp_path / "step.pt2", change(program))
    with pytest.raises(ValueError, match="step.pt2` .*" + message):
        checked_archive(path)


def test_files_that_are_no_archive(program, tmp_path):
    path = tmp_path / "step.pt2"
    for content in (b"", b"PK\x05\x06", b"no zip"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is damaged: "):
            checked_archive(path)
    twice = io.BytesIO()
    with zipfile.ZipFile(twice, "w") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("step/byteorder", b"little")
        archive.writestr("step/byteorder", b"big")
    path.write_bytes(twice.getvalue())
    with pytest.raises(ValueError, match="has files of one name"):
        checked_archive(path)
