"""The runtimes of exported programs: each writes a program to a file, and runs it.

Shape letters: B streams.
"""

import importlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram

from hf_recurrent.export.c_source import c_step
from hf_recurrent.export.program_archive import checked_archive
from hf_recurrent.export.programs import MAX_STREAMS

# Inputs, then the parts of the state → outputs, then the parts of the new state.
Run = Callable[[list[Tensor]], list[Tensor]]


class Runtime(NamedTuple):
    """One runtime.

    Args:
        file: name of the program's file.
        title: of the runtime, in a card.
        write: (program, its path, names of the parts of the state).
        load: path → the function.
        loading: Python code that loads the program without this package.
        max_streams: the largest B.
        is_native: the file holds machine code.
        writing: a module that writing needs, and the packages to install for it.
    """

    file: str
    title: str
    write: Callable[[ExportedProgram, Path, list[str]], None]
    load: Callable[[Path], Run]
    loading: str = ""
    max_streams: int = MAX_STREAMS
    is_native: bool = False
    writing: tuple[str, str] | None = None

    def check_writing(self, name: str) -> None:
        """Raise an ImportError if a package is missing that writing needs."""
        if self.writing is not None:
            _require(self.writing[0], name, self.writing[1])


_C_NAME, _C_NOTE = "model", "One step of a recurrent model."
C_WEIGHTS_FILE = f"{_C_NAME}.weights"
# ExecuTorch reserves memory for this many at loading.
_MAX_STREAMS_EXECUTORCH = 8


def _require(module: str, runtime: str, packages: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"The format {runtime!r} needs {packages}; try: pip install {packages} ({error})."
        raise ImportError(message) from error


def _write_torch(program: ExportedProgram, path: Path, names: list[str]) -> None:
    program.example_inputs = None  # they would be pickled
    archive = io.BytesIO()  # on a full disk, torch's own writer of files ends the process
    torch.export.save(program, archive)
    path.write_bytes(archive.getbuffer())


def _load_torch(path: Path) -> Run:
    # Without guards, which are code in the file; the inputs are checked against the specification.
    return _without_gradients(torch.export.load(checked_archive(path)).module(check_guards=False))


def _write_aoti(program: ExportedProgram, path: Path, names: list[str]) -> None:
    torch._inductor.aoti_compile_and_package(program, package_path=os.fspath(path))


def _load_aoti(path: Path) -> Run:
    return _without_gradients(torch._inductor.aoti_load_package(os.fspath(path)))


def _without_gradients(function: Callable) -> Run:
    def run(tensors: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(function(*tensors))

    return run


def _write_onnx(program: ExportedProgram, path: Path, names: list[str]) -> None:
    torch.onnx.export(
        program,
        input_names=["inputs", *names],
        output_names=["outputs", *(f"new.{name}" for name in names)],
        dynamo=True,
        verbose=False,
    ).save(os.fspath(path), include_initializers=True)


def _load_onnx(path: Path) -> Run:
    onnxruntime = _require("onnxruntime", "onnx", "onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(tensors: list[Tensor]) -> list[Tensor]:
        arrays = [tensor.numpy() for tensor in tensors]
        return [torch.from_numpy(array) for array in session.run(None, dict(zip(names, arrays, strict=True)))]

    return run


def _split_by_slices(value: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    ends = range(size, value.shape[dim] + size, size)
    return [value.narrow(dim, end - size, min(size, value.shape[dim] - end + size)) for end in ends]


def _gru_cell_by_slices(
    inputs: Tensor,
    state: Tensor,
    input_weight: Tensor,
    state_weight: Tensor,
    input_bias: Tensor | None = None,
    state_bias: Tensor | None = None,
) -> Tensor:
    """torch's `gru_cell`, whose own form has splits."""
    from_input = torch.nn.functional.linear(inputs, input_weight, input_bias)
    from_state = torch.nn.functional.linear(state, state_weight, state_bias)
    gates = (_split_by_slices(part, state.shape[-1], -1) for part in (from_input, from_state))
    (reset, update, new), (state_reset, state_update, state_new) = gates
    update = torch.sigmoid(update + state_update)
    new = torch.tanh(new + torch.sigmoid(reset + state_reset) * state_new)
    return new + update * (state - new)


# ExecuTorch's lowering gives the results of a split fixed sizes, the example's.
_WITHOUT_SPLITS = {
    torch.ops.aten.split.Tensor: _split_by_slices,
    torch.ops.aten.gru_cell.default: _gru_cell_by_slices,
}


def _write_executorch(program: ExportedProgram, path: Path, names: list[str]) -> None:
    exir = importlib.import_module("executorch.exir")
    xnnpack = importlib.import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    if any(node.target in _WITHOUT_SPLITS for node in program.graph.nodes):
        program = program.run_decompositions(_WITHOUT_SPLITS)
    edge = exir.to_edge_transform_and_lower(program, partitioner=[xnnpack.XnnpackPartitioner()])
    path.write_bytes(edge.to_executorch().buffer)


def _load_executorch(path: Path) -> Run:
    runtime = _require("executorch.runtime", "executorch", "executorch").Runtime.get()
    program = runtime.load_program(path)
    method = program.load_method("forward")

    def run(tensors: list[Tensor], program=program) -> list[Tensor]:  # the method needs its program alive
        return [tensor.clone() for tensor in method.execute([tensor.contiguous() for tensor in tensors])]

    return run


def _write_c(program: ExportedProgram, path: Path, names: list[str]) -> None:
    path.write_text(c_step(program, _C_NAME, names, _C_NOTE).text, encoding="utf-8")


def write_c_and_weights(program: ExportedProgram, path: Path, names: list[str]) -> None:
    """C with the weights in a file next to it, [`C_WEIGHTS_FILE`]."""
    step = c_step(program, _C_NAME, names, _C_NOTE, separate_weights=True)
    path.write_text(step.text, encoding="utf-8")
    path.with_name(C_WEIGHTS_FILE).write_bytes(step.weights)


def _load_c(path: Path) -> Run:
    raise ValueError(f"`{path}` is C, which is compiled and not loaded.")


RUNTIMES = {
    "torch": Runtime(
        "step.pt2", "`torch.export`", _write_torch, _load_torch, 'torch.export.load("step.pt2").module()',
    ),
    "aoti": Runtime(
        "step.aoti.pt2", "AOTInductor (torch, compiled for the machine that it was exported on)",
        _write_aoti, _load_aoti, 'torch._inductor.aoti_load_package("step.aoti.pt2")', is_native=True,
    ),
    "onnx": Runtime(
        "step.onnx", "ONNX", _write_onnx, _load_onnx, 'onnxruntime.InferenceSession("step.onnx")',
        writing=("onnxscript", "onnx onnxscript"),
    ),
    "executorch": Runtime(
        "step.pte", "ExecuTorch with XNNPACK", _write_executorch, _load_executorch,
        'executorch.runtime.Runtime.get().load_program("step.pte")', _MAX_STREAMS_EXECUTORCH,
        writing=("executorch.exir", "executorch"),
    ),
    "c": Runtime("step.c", "C99", _write_c, _load_c, max_streams=1),
}  # fmt: skip
