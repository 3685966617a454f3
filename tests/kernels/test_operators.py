"""Every operator and element-wise function of the tables, in every back end, against torch in float64."""

import ctypes
import shutil
import subprocess

import pytest
import torch

from hf_recurrent.export.c_printer import CPrinter
from hf_recurrent.export.c_source import c_file
from hf_recurrent.kernels.bytecode import BLOCK_OPCODES
from hf_recurrent.kernels.functions import FUNCTIONS
from hf_recurrent.kernels.lowering import OPERATORS
from hf_recurrent.kernels.step_graph import UnsupportedOp
from hf_recurrent.kernels.step_trace import StepTrace
from hf_recurrent.modeling.contexts import ngram_embedding  # noqa: F401 (they define operators)
from hf_recurrent.modeling.scan import linear_scan  # noqa: F401

step_cpu = pytest.importorskip("hf_recurrent.kernels.step_cpu")
block_cpu = pytest.importorskip("hf_recurrent.kernels.block_cpu")

from hf_recurrent.kernels.block_trace import BlockTrace  # noqa: E402 (after the check for the kernel)

COMPILER = shutil.which("gcc") or shutil.which("cc")
ROWS, WIDTH, WEIGHTS = 3, 8, 11
STREAMS = 3
# Rounded to int8 without an error: the largest of every row is 127 / 64.
CONSTANT = (torch.arange(WIDTH * WEIGHTS, dtype=torch.float64).view(WEIGHTS, WIDTH) * 29 % 255 - 127) / 64
CONSTANT[:, 0] = 127 / 64
IDS = torch.tensor([2, 0, 2])


def complex_of(x, y):
    return torch.complex(x, y)


def parts(z):
    return torch.view_as_real(z)


def nll_backward(op, x, y, z, ids):
    return op(y[:, 0].contiguous(), x, ids, None, 0, -100, torch.tensor(0.0, dtype=x.dtype))


def layer_norm_backward(op, x, y, z, ids):
    weight = CONSTANT[0].to(x)
    _, mean, deviation = torch.ops.aten.native_layer_norm(x, [WIDTH], weight, weight, 1e-5)
    return torch.cat([part.flatten() for part in op(y, x, [WIDTH], mean, deviation, weight, weight, [True] * 3)])


def scan_backward(op, x, y, z, ids):
    a, h, grad = (part.unsqueeze(0).sigmoid() for part in (x, y, z))
    grads = op(a, h, h[:, 0].contiguous(), None, grad, grad[:, 1].contiguous(), "auto")
    return torch.cat([part.flatten() for part in grads])


def scan(op, x, y, z, ids):
    h, last = op(x.sigmoid().unsqueeze(0), y.unsqueeze(0), z[:1].contiguous(), None, "auto")
    return torch.cat([h.flatten(), last.flatten()])


def ngrams(op, x, y, z, ids):
    rows = op((x.abs() * 50).floor(), [7, 11, 13, 1000003, 17, 19, 2**31 - 2, 23], [2, 5, 8], 3)
    return torch.ops.aten.embedding.default(CONSTANT.to(x), rows)


def attention(op, x, y, z, ids):
    return op(*(part.view(1, 2, ROWS, WIDTH // 2) for part in (x, y, z)), 0.0, True)[0]


# Arguments of operators with others than (x), (x, y) or (x, scalar), where x, y, z are (ROWS, WIDTH).
CALLS = {
    "aten.sqrt.default": lambda op, x, y, z, ids: op(x.abs() + 0.1),
    "aten.rsqrt.default": lambda op, x, y, z, ids: op(x.abs() + 0.1),
    "aten.reciprocal.default": lambda op, x, y, z, ids: op(x.abs() + 0.3),
    "aten.log.default": lambda op, x, y, z, ids: op(x.abs() + 0.1),
    "aten.log1p.default": lambda op, x, y, z, ids: op(x.abs() - 0.5),
    "aten.add.Tensor": lambda op, x, y, z, ids: op(x, y, alpha=3),
    "aten.sub.Tensor": lambda op, x, y, z, ids: op(x, y[:1], alpha=3),
    "aten.rsub.Scalar": lambda op, x, y, z, ids: op(x, 0.7, 2),
    "aten.mul.Tensor": lambda op, x, y, z, ids: parts(op(complex_of(x, y), complex_of(z, x))),
    "aten.div.Tensor": lambda op, x, y, z, ids: parts(op(complex_of(x, y), complex_of(z.abs() + 1, x))),
    "aten.addcmul.default": lambda op, x, y, z, ids: op(x, y, z[:, :1]),
    "aten.addcdiv.default": lambda op, x, y, z, ids: op(x, y, z.abs() + 1, value=2),
    "aten.lerp.Tensor": lambda op, x, y, z, ids: op(x, y, z),
    "aten.lerp.Scalar": lambda op, x, y, z, ids: op(x, y, 0.3),
    "aten.pow.Tensor_Scalar": lambda op, x, y, z, ids: op(op(x.abs() + 0.2, 1.7), 3),
    "aten.clamp_min.default": lambda op, x, y, z, ids: op(x, -0.5),
    "aten.clamp_max.default": lambda op, x, y, z, ids: op(x, 0.7),
    "aten.clamp.default": lambda op, x, y, z, ids: op(x, -0.5, 0.7),
    "aten.hardtanh.default": lambda op, x, y, z, ids: op(x, -0.5, 0.7),
    "aten.softplus.default": lambda op, x, y, z, ids: op(x, 2),
    "aten.log_sigmoid_forward.default": lambda op, x, y, z, ids: op(x)[0],
    "aten.elu.default": lambda op, x, y, z, ids: op(x, 0.7, 1.1),
    "aten.where.self": lambda op, x, y, z, ids: op(x > 0, y, z),
    "aten.masked_fill.Scalar": lambda op, x, y, z, ids: op(x, y > 0, -7.0),
    "aten.masked_fill.Tensor": lambda op, x, y, z, ids: op(x, y > 0, torch.tensor(-7.0, dtype=x.dtype)),
    "aten.logical_not.default": lambda op, x, y, z, ids: torch.where(op(x > 0), y, z),
    "aten.bitwise_not.default": lambda op, x, y, z, ids: torch.where(op(x > 0), y, z),
    "aten.logical_and.default": lambda op, x, y, z, ids: torch.where(op(x > 0, y > 0), y, z),
    "aten.bitwise_and.Tensor": lambda op, x, y, z, ids: torch.where(op(x > 0, y > 0), y, z),
    "aten.sum.dim_IntList": lambda op, x, y, z, ids: op(x, [0], True),
    "aten.mean.dim": lambda op, x, y, z, ids: op(x, [1]),
    "aten.amax.default": lambda op, x, y, z, ids: op(x, [1]),
    "aten.amin.default": lambda op, x, y, z, ids: op(x, [0]),
    "aten.native_layer_norm.default": lambda op, x, y, z, ids: op(
        x, [WIDTH], CONSTANT[0].to(x), CONSTANT[1].to(x), 1e-5
    )[0],
    "aten.native_layer_norm_backward.default": layer_norm_backward,
    "aten.mm.default": lambda op, x, y, z, ids: op(x, CONSTANT.to(x).t()),
    "aten.addmm.default": lambda op, x, y, z, ids: op(CONSTANT[:, 1].to(x), x, CONSTANT.to(x).t()),
    "aten.bmm.default": lambda op, x, y, z, ids: op(x.unsqueeze(0), y.t().contiguous().unsqueeze(0)),
    "aten.cumsum.default": lambda op, x, y, z, ids: op(x[:1], 1),
    "aten.embedding.default": lambda op, x, y, z, ids: op(CONSTANT.to(x), ids[:1]) * x,
    "aten._softmax.default": lambda op, x, y, z, ids: op(x, 1, False),
    "aten._log_softmax.default": lambda op, x, y, z, ids: op(x, 1, False),
    "aten._log_softmax_backward_data.default": lambda op, x, y, z, ids: op(x, y.log_softmax(1), 1, x.dtype),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": attention,
    "aten.complex.default": lambda op, x, y, z, ids: parts(op(x, y)),
    "aten.view_as_real.default": lambda op, x, y, z, ids: op(complex_of(x, y)),
    "aten.view_as_complex.default": lambda op, x, y, z, ids: parts(op(x.view(ROWS, -1, 2)) * 1.0),
    "aten._conj.default": lambda op, x, y, z, ids: parts(op(complex_of(x, y)) * complex_of(y, z)),
    "aten._conj_physical.default": lambda op, x, y, z, ids: parts(op(complex_of(x, y))),
    "aten.constant_pad_nd.default": lambda op, x, y, z, ids: op(x, [1, 2], 0.5),
    "hf_recurrent.linear_scan.default": scan,
    "hf_recurrent.ngram_rows.default": ngrams,
    "hf_recurrent.linear_scan_backward.default": scan_backward,
    "aten.softplus_backward.default": lambda op, x, y, z, ids: op(x, y, 2, 20),
    "aten.threshold_backward.default": lambda op, x, y, z, ids: op(x, y, 0),
    "aten.nll_loss_forward.default": lambda op, x, y, z, ids: op(x, ids, None, 2, -100)[0],
    "aten.nll_loss_backward.default": nll_backward,
    "aten.embedding_dense_backward.default": lambda op, x, y, z, ids: op(x, ids, WIDTH, -1, False),
    "aten.select_backward.default": lambda op, x, y, z, ids: op(x, [4, ROWS, WIDTH], 0, 2) + 1,
    "aten.slice_backward.default": lambda op, x, y, z, ids: op(x, [7, WIDTH], 0, 1, 7, 2) + 1,
}


def overload(name):
    namespace, packet, kind = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), kind)


def call(name, values, ids):
    """The result of an operator, or of an element-wise function, flat; `values` are (1, 3 · ROWS · WIDTH)."""
    x, y, z = values.view(3, ROWS, WIDTH)
    if name in FUNCTIONS:
        low, high = FUNCTIONS[name].domain
        operands = [low + (high - low) * part.sigmoid() for part in (x, y, z)[: FUNCTIONS[name].operands]]
        return FUNCTIONS[name].reference(*operands, 0.7).double().expand(1, ROWS, WIDTH).reshape(1, -1)
    op = overload(name)
    if name in CALLS:
        result = CALLS[name](op, x, y, z, ids)
    elif name.endswith(".Scalar"):
        result = op(x, 0.7)
    else:
        result = op(x) if len([a for a in op._schema.arguments if a.type.str() == "Tensor"]) == 1 else op(x, y)
    result = result if result.dtype != torch.bool else torch.where(result, y, z)
    return result.reshape(1, -1)


@torch.no_grad()
def lower(name, dtype, trace_class):
    """The graph of a case, the value of its result, and the trace."""
    seen = set()

    class Recording(trace_class):
        def _translate(self, function, arguments, options):
            seen.add(str(function))
            return super()._translate(function, arguments, options)

    inputs = {
        "values": VALUES[:1].to(dtype),
        "ids": IDS[:1] if trace_class is StepTrace and "embedding." in name else IDS,
    }
    trace = Recording(dtype, inputs, {}) if trace_class is BlockTrace else Recording(dtype, inputs)
    if name not in FUNCTIONS:
        with trace:
            output = call(name, *inputs.values())
        assert name in seen, f"the call of {name} runs {seen}"
        return trace, trace.value(output)
    # As a node, because torch has no operator for some: "splat", "set".
    function, lowering = FUNCTIONS[name], trace.lowering
    low, high = function.domain
    with trace:
        x, y, z = (low + (high - low) * part.sigmoid() for part in inputs["values"].view(3, ROWS, WIDTH))
    operands = [trace.value(part) for part in (x, y, z)[: function.operands]]
    return trace, lowering.map(name, (1, ROWS * WIDTH), *operands, scalar=0.7)


def run_step(name, dtype):
    trace, value = lower(name, dtype, StepTrace)
    program = step_cpu.StepProgram(trace.graph, {"output": value}, trace.guards)
    tensors = {"values": VALUES.to(dtype), "ids": IDS[:1].repeat(STREAMS)}
    return program.run(tensors, STREAMS)["output"]


def run_block(name, dtype):
    trace, value = lower(name, dtype, BlockTrace)
    program = block_cpu.BlockProgram(trace.graph, {"output": value}, trace.guards, trace.effects)
    rows = []
    for values in VALUES.to(dtype).split(1):
        output = torch.empty(1, value.shape.numel(), dtype=dtype)
        assert program.run({"values": values, "ids": IDS.to(dtype)}, {"output": output})
        rows.append(output)
    return torch.cat(rows)


def c_name(name):
    return f"case_{[*FUNCTIONS, *OPERATORS].index(name)}"


@pytest.fixture(scope="module")
def c_library(tmp_path_factory):
    """All cases that C can run, in one file."""
    folder, texts = tmp_path_factory.mktemp("operators"), []
    for name in (*FUNCTIONS, *OPERATORS):
        try:
            trace, value = lower(name, torch.float32, StepTrace)
            printer = CPrinter(trace.graph, {})
            printer.write(trace.graph.index(value).reshape(-1), [])
        except UnsupportedOp:
            continue
        text = c_file(printer, c_name(name)).text
        texts.append(text.replace("_state {\n\n};", "_state { int unused; };"))
    (folder / "cases.c").write_text("\n".join(texts))
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-shared", "-fPIC"]
    done = subprocess.run(
        [COMPILER, *flags, "cases.c", "-o", "cases.so", "-lm"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(folder / "cases.so")


def run_c(name, library):
    step = getattr(library, f"{c_name(name)}_step", None)
    if step is None:
        raise UnsupportedOp(name)
    _, value = lower(name, torch.float32, StepTrace)
    rows = []
    for values in VALUES.float().split(1):
        output = torch.empty(1, value.shape.numel())
        step(None, *map(ctypes.c_void_p, (values.contiguous().data_ptr(), output.data_ptr())))
        rows.append(output)
    return torch.cat(rows)


BACK_ENDS = {
    "step float32": lambda name: run_step(name, torch.float32),
    "step float64": lambda name: run_step(name, torch.float64),
    "block float32": lambda name: run_block(name, torch.float32),
    "block float64": lambda name: run_block(name, torch.float64),
}
VALUES = torch.randn(STREAMS, 3 * ROWS * WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def check(name, back_end, run):
    trace_class = BlockTrace if back_end[0] == "b" else StepTrace
    kinds = {node.kind for node in lower(name, torch.float32, trace_class)[0].graph.nodes}
    reads_ids = back_end == "C" and name == "aten.embedding.default"
    if (back_end[0] != "b" and kinds & {*BLOCK_OPCODES}) or reads_ids:
        with pytest.raises(UnsupportedOp):
            run(name)
        return
    expected = torch.cat([call(name, values, IDS) for values in VALUES.split(1)])
    if name == "splat":
        expected = expected[:, :1].expand(expected.shape)
    tolerance = 1e-10 if "float64" in back_end else 3e-5
    if back_end == "C" and "linear" in kinds:
        tolerance = 3e-4  # activations are 16-bit integers
    torch.testing.assert_close(run(name).double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("name", [*FUNCTIONS, *OPERATORS])
def test_every_back_end_of_the_kernel_computes_what_torch_computes(name, back_end):
    check(name, back_end, BACK_ENDS[back_end])


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
@pytest.mark.parametrize("name", [*FUNCTIONS, *OPERATORS])
def test_c_computes_what_torch_computes(name, c_library):
    check(name, "C", lambda name: run_c(name, c_library))


def test_opcodes_are_those_of_the_kernel():
    from pathlib import Path

    from hf_recurrent.kernels import bytecode

    header = Path(bytecode.__file__).with_name("bytecode.h").read_text()
    for kind, prefix, names in (
        ("opcode", "", bytecode._OPCODES),
        ("function", "F_", FUNCTIONS),
        ("reduction", "", bytecode._REDUCTIONS),
    ):
        members = header.split(f"enum {kind} {{")[1].split("}")[0].replace("\n", " ").split(",")
        assert [member.strip() for member in members] == [prefix + name.upper() for name in names]
