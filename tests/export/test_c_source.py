"""Exported C, compiled for this machine with sanitizers and for a Cortex-M, beside its emulation in torch."""

import functools
import json
import shutil
import struct
import subprocess

import pytest
import torch
from breadth import some_of
from cortex_m import CORTEX, CORTEX_COMPILER, needs_cortex, run_on_cortex
from export_cases import BYTES, CASES
from export_cases import build as build_case
from torch import fx
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import hf_recurrent as hf
from hf_recurrent.export.c_helpers import HELPERS
from hf_recurrent.export.c_source import c_step
from hf_recurrent.export.exported_step import ExportedStep, save_exported_step
from hf_recurrent.export.programs import export_step
from hf_recurrent.export.step_module import StepModule
from hf_recurrent.kernels.weight_rows import largest_code, quantize_rows

aten = torch.ops.aten
STRICT = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"]
SANITIZERS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
COMPILER = shutil.which("gcc") or shutil.which("cc")
SIZES = {"hidden_size": 12, "state_size": 12, "num_hidden_layers": 2}

MODELS = {
    "mgrade": ("mgrade-tiny", SIZES),
    "mgrade digits": ("mgrade-smnist", {}),
    "mgrade learned": ("mgrade-scifar-learned", {"hidden_size": 8, "state_size": 8, "num_hidden_layers": 2}),
    "mgrade fine": ("mgrade-scifar", SIZES | {"conv_kernel": 40, "dilation": 1}),
    "tcn": ("tcn-smnist", {}),
    "mingru": ("mingru-smnist", {}),
    "memora": ("memora-tiny", SIZES),
    "hawk": ("hawk-tiny", SIZES),
    "lru": ("lru-tiny", SIZES),
}
OTHER_CASES = [case for case in CASES if case not in MODELS and not case.startswith("smt-rnn")]
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="gcc is not installed")


def build_model(preset: str, overrides: dict):
    config = hf.config_from_preset(preset, **overrides)
    reads_values = getattr(config, "input_size", None) is not None
    auto = AutoModelForSequenceClassification if reads_values else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are 0 and 1 at first
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@functools.cache
def build(name: str):
    """(model, exported step, inputs of some steps)."""
    if name in MODELS:
        model, count = build_model(*MODELS[name]), 60
    else:
        model, count = build_case(name), BYTES
    config = model.config
    reads_values = getattr(config, "input_size", None) is not None
    inputs = torch.rand(count, config.input_size) if reads_values else torch.randint(config.vocab_size, (count,))
    if reads_values:
        inputs[::3] = 0
        inputs[1::6] *= 1e-5  # subnormal in half precision
    return model, export_step(model, own_operators=True), inputs


@functools.cache
def source(name: str) -> str:
    model, program, _ = build(name)
    return c_step(program, "tiny", StepModule(model).state_names, f"{name}.").text


def rounded(x):
    """Activations as 16-bit integers with a scale for each row."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / largest_code(x.shape[-1])
    return (x / scale).round() * scale


class Emulation(fx.Interpreter):
    """The exported step with int8 weights, int16 activations of linear maps, and buffers in half precision."""

    def call_function(self, target, args, kwargs):
        if target is aten.linear.default:
            table, scale = quantize_rows(args[1])
            args = (rounded(args[0]), table * scale, *args[2:])
        elif target is aten.embedding.default:
            table, scale = quantize_rows(args[0])
            args = (table * scale, *args[1:])
        elif (
            target is aten.mul.Tensor and [getattr(x, "ndim", 0) for x in args] == [3, 2] and len(args[1]) > 1
        ):  # taps
            table, scale = quantize_rows(args[1].t())
            args = (args[0], (table * scale).t())
        return super().call_function(target, args, kwargs)


def emulate(name: str) -> torch.Tensor:
    """Outputs of every step, (T, outputs)."""
    model, program, inputs = build(name)
    module = StepModule(model)
    state = module.example_inputs(1, 1)[1:]
    outputs = []
    emulation = Emulation(program.module(check_guards=False))
    with torch.no_grad():
        for given in inputs:
            output, *state = emulation.run(given.unsqueeze(0), *state)
            state = [
                part.half().float() if name.endswith("convolution") else part
                for name, part in zip(module.state_names, state, strict=True)
            ]
            outputs.append(output[0])
    return torch.stack(outputs)


def program_text(name: str) -> str:
    """A program that prints the bits of all outputs of all steps."""
    inputs = build(name)[2]
    numbers = ", ".join(f"{float(x)!r}f" if inputs.is_floating_point() else str(int(x)) for x in inputs.flatten())
    kind, argument = ("float", "inputs + k * TINY_INPUTS") if inputs.is_floating_point() else ("int", "inputs[k]")
    return f"""#include <stdio.h>
#include <string.h>
#include "step.c"

static const {kind} inputs[{inputs.numel()}] = {{{numbers}}};
static struct tiny_state state;
static float outputs[TINY_OUTPUTS];

int main(void) {{
    memset(&state, 255, sizeof state);
    tiny_reset(&state);
    for (int k = 0; k < {len(inputs)}; k++) {{
        tiny_step(&state, {argument}, outputs);
        for (int i = 0; i < TINY_OUTPUTS; i++) {{
            uint32_t bits;
            memcpy(&bits, &outputs[i], sizeof bits);
            printf("%08lx\\n", (unsigned long)bits);
        }}
    }}
    return 0;
}}
"""


def parse(text: str, name: str) -> torch.Tensor:
    values = [struct.unpack(">f", bytes.fromhex(line))[0] for line in text.split()]
    return torch.tensor(values).view(len(build(name)[2]), -1)


def write(name: str, folder) -> None:
    (folder / "step.c").write_text(source(name))
    (folder / "main.c").write_text(program_text(name))


def run(command: list[str], folder, **options) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@needs_compiler
@pytest.mark.parametrize(
    "name",
    [
        *some_of(MODELS, ("memora", "hawk")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_CASES),
    ],
)
def test_c_equals_the_emulation(name, tmp_path):
    write(name, tmp_path)
    run([COMPILER, *STRICT, *SANITIZERS, "main.c", "-o", "main", "-lm"], tmp_path)
    found, expected = parse(run(["./main"], tmp_path), name), emulate(name)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
    # An activation between two integers may be rounded to either, and a dense recurrence keeps the difference.
    assert torch.isclose(found, expected, atol=2e-4, rtol=2e-4).float().mean() > 0.98
    assert expected.std(0).min() > 0


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("smt-rnn")])
def test_attention_and_cells_in_c(case, tmp_path):
    write(case, tmp_path)
    run([COMPILER, *STRICT, *SANITIZERS, "main.c", "-o", "main", "-lm"], tmp_path)
    found, expected = parse(run(["./main"], tmp_path), case), emulate(case)
    # Tables of constants are int8 too, which the emulation leaves out, and differences grow from step to step.
    assert (found[:5] - expected[:5]).abs().max() < 0.05 * expected.abs().max()


def test_the_emulation_is_near_the_model():
    for name in ("mgrade digits", "memora"):
        model, _, inputs = build(name)
        module = StepModule(model)
        outputs, state = [], module.example_inputs(1, 1)[1:]
        with torch.no_grad():
            for given in inputs:
                output, *state = module(given.unsqueeze(0), *state)
                outputs.append(output[0])
        expected = torch.stack(outputs)
        assert float((emulate(name) - expected).std() / expected.std()) < 0.05


@pytest.mark.skipif(COMPILER is None or "gcc" not in COMPILER, reason="gcc is not installed")
def test_products_are_vectorized(tmp_path):
    text = "#include <stdint.h>\n" + HELPERS["linear"].replace("static ", "").replace("NAME_", "")
    (tmp_path / "linear.c").write_text(text)
    command = [COMPILER, *STRICT, "-O3", "-fopt-info-vec-optimized", "-c", "linear.c"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    vectorized = {text.splitlines()[int(line.split(":")[1]) - 1] for line in done.stderr.splitlines()}
    assert any("row[j] * part[j]" in line for line in vectorized)


def test_the_same_model_gives_the_same_file():
    model, program, _ = build("mgrade digits")
    assert c_step(program, "tiny", StepModule(model).state_names, "mgrade digits.").text == source("mgrade digits")
    assert "malloc" not in source("mgrade digits") and "#include <stdlib.h>" not in source("mgrade digits")


@needs_compiler
def test_halves_are_those_of_torch(tmp_path):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4000, generator=generator) * 10.0 ** torch.randint(-9, 5, (4000,), generator=generator)
    values = torch.cat(
        [values, torch.tensor([0.0, 65504, 6.1e-5, 6.2e-5, 2.0**-14, 2.0**-25, 3 * 2.0**-25, 1e6, -1e6])]
    )
    helpers = "\n".join(HELPERS[name] for name in ("wide", "narrow")).replace("NAME_", "")
    body = f"""#include <math.h>
#include <stdint.h>
#include <stdio.h>
{helpers}
int main(void) {{
    float x;
    while (fread(&x, 4, 1, stdin) == 1) {{
        x = wide(narrow(x));
        fwrite(&x, 4, 1, stdout);
    }}
    return 0;
}}
"""
    (tmp_path / "halves.c").write_text(body)
    run([COMPILER, *STRICT, *SANITIZERS, "halves.c", "-o", "halves", "-lm"], tmp_path)
    done = subprocess.run([tmp_path / "halves"], input=values.numpy().tobytes(), capture_output=True, check=True)
    found = torch.frombuffer(bytearray(done.stdout), dtype=torch.float32)
    assert torch.equal(found, values.half().float().clamp(-65504, 65504))


IDS = """#include <limits.h>
#include <stdio.h>
#include <string.h>
#include "step.c"

int main(void) {
    static struct tiny_state state, before;
    static float outputs[TINY_OUTPUTS];
    const int ids[] = {-1, TINY_VOCAB_SIZE, 1 << 20, INT_MAX, INT_MIN};
    tiny_reset(&state);
    if (tiny_step(&state, TINY_VOCAB_SIZE - 1, outputs) != 0) return 2;
    before = state;
    for (int k = 0; k < 5; k++)
        if (tiny_step(&state, ids[k], outputs) != 1 || memcmp(&before, &state, sizeof state) != 0) return 3;
    return 0;
}
"""


@needs_compiler
def test_ids_outside_of_the_vocabulary_are_refused(tmp_path):
    (tmp_path / "step.c").write_text(source("memora"))
    (tmp_path / "main.c").write_text(IDS)
    run([COMPILER, *STRICT, *SANITIZERS, "main.c", "-o", "main", "-lm"], tmp_path)
    run(["./main"], tmp_path)


LOADING = """#include <stdio.h>
#include "step.c"

static struct tiny_state state;
static float outputs[TINY_OUTPUTS];

int main(void) {
#ifdef TINY_WEIGHTS_FILE_SIZE
    static union { float alignment; unsigned char bytes[TINY_WEIGHTS_FILE_SIZE + 4]; } file;
    const size_t size = fread(file.bytes, 1, sizeof file.bytes, stdin);
    const struct tiny_weights *weights = tiny_load(file.bytes, size);
    if (!weights || tiny_load(0, size) || tiny_load(file.bytes + 1, size)) return 1;
    tiny_reset(&state);
    if (tiny_step(&state, 0, 5, outputs) == 0) return 2;
#endif
    tiny_reset(&state);
    for (int k = 0; k < 8; k++) {
#ifdef TINY_WEIGHTS_FILE_SIZE
        if (tiny_step(&state, weights, 7 * k, outputs) != 0) return 3;
#else
        if (tiny_step(&state, 7 * k, outputs) != 0) return 3;
#endif
        fwrite(outputs, sizeof *outputs, TINY_OUTPUTS, stdout);
    }
    return 0;
}
"""


@needs_compiler
def test_weights_in_a_file_are_checked_and_give_the_same_bits(tmp_path):
    model, program, _ = build("memora")
    text, weights, _ = c_step(program, "tiny", StepModule(model).state_names, separate_weights=True)
    assert len(text) < len(source("memora")) / 2
    (tmp_path / "main.c").write_text(LOADING)
    for name, step in (("loaded", text), ("plain", source("memora"))):
        (tmp_path / "step.c").write_text(step)
        run([COMPILER, *STRICT, *SANITIZERS, "main.c", "-o", name, "-lm"], tmp_path)
    loaded = subprocess.run([tmp_path / "loaded"], input=weights, capture_output=True)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout == subprocess.run([tmp_path / "plain"], capture_output=True, check=True).stdout
    damaged = [weights[:-1], weights + b"\0", b"", weights[:40]]
    for place in (0, 4, 8, 12, 16, len(weights) // 2, len(weights) - 1):
        damaged.append(weights[:place] + bytes([weights[place] ^ 16]) + weights[place + 1 :])
    for content in damaged:
        assert subprocess.run([tmp_path / "loaded"], input=content, capture_output=True).returncode == 1


@needs_compiler
@pytest.mark.parametrize("name", ["mgrade learned", "mgrade digits"])
def test_real_values_and_weights_in_a_file(name, tmp_path):
    model, program, _ = build(name)
    text = c_step(program, "tiny", StepModule(model).state_names, separate_weights=True).text
    assert "const struct tiny_weights *weights, const float *values, float *outputs)" in text
    (tmp_path / "step.c").write_text(text)
    run([COMPILER, *STRICT, "-c", "step.c"], tmp_path)


@pytest.mark.long
def test_weights_of_another_model_are_not_those_of_the_code():
    (_, program, _), (_, other, _) = build("memora"), build("lru")
    names = [StepModule(build(name)[0]).state_names for name in ("memora", "lru")]
    files = [
        c_step(one, "tiny", own, separate_weights=True).weights
        for one, own in zip((program, other), names, strict=True)
    ]
    assert files[0][12:16] != files[1][12:16]


@needs_cortex
def test_digits_on_a_cortex_m(tmp_path, record_property):
    name = "mgrade digits"
    write(name, tmp_path)
    run([CORTEX_COMPILER, *STRICT, *CORTEX["cortex-m4"], "-Os", "-fstack-usage", "-c", "step.c"], tmp_path)
    sizes = run(["arm-none-eabi-size", "step.o"], tmp_path).splitlines()[1].split()[:3]
    code, data, zeroed = map(int, sizes)
    stack = max(int(line.split("\t")[1]) for line in (tmp_path / "step.su").read_text().splitlines())
    fields = {"uint16_t": 2, "float": 4}
    struct_text = source(name).split("struct tiny_state {")[1].split("}")[0]
    lines = [line.strip(" ];").split() for line in struct_text.splitlines() if line.strip()]
    state = sum(fields[kind] * int(field.split("[")[1]) for kind, field in lines)
    record_property("bytes", {"code and weights": code, "state": state, "stack": stack})
    print(f"Cortex-M4: {code} bytes of code and weights, {state} of state, {stack} of stack")
    assert data == zeroed == 0 and code <= 32 * 1024 and state + stack <= 8 * 1024
    text = run_on_cortex(tmp_path, "cortex-m4", ["-Os", "main.c"])
    torch.testing.assert_close(parse(text, name), emulate(name), atol=2e-4, rtol=2e-4)


@pytest.mark.long
def test_a_folder_holds_the_file_and_its_card(tmp_path):
    model = build("memora")[0]
    specification = save_exported_step(model, tmp_path / "c", runtime="c", tokenizer=hf.ByteTokenizer())
    assert specification.weights == "int8"
    assert "int model_step(struct model_state *state, int id, float *outputs);" in (tmp_path / "c/step.c").read_text()
    assert "model_reset(&state);" in (tmp_path / "c/README.md").read_text()
    save_exported_step(model, tmp_path / "two", runtime="c", weights_file=True)
    assert "model_step(&state, weights, 'd', outputs);" in (tmp_path / "two/README.md").read_text()
    assert (tmp_path / "two/model.weights").read_bytes()[:4] == b"HFCW"
    assert "model.weights" in json.loads((tmp_path / "two/manifest.json").read_text())["files"]
    with pytest.raises(ValueError, match="`weights_file` is True, but `runtime` is 'torch'; only 'c' has such a file"):
        save_exported_step(model, tmp_path / "other", weights_file=True)
    with pytest.raises(ValueError, match="is C, which is compiled and not loaded"):
        ExportedStep(tmp_path / "c")
    with pytest.raises(ValueError, match="`weights` is 'bfloat16'; in C they are always 'int8'"):
        save_exported_step(model, tmp_path / "other", runtime="c", weights="bfloat16")


def test_an_unsupported_operator_is_named():
    class Sorts(torch.nn.Module):
        def forward(self, inputs, *state):
            return inputs.sort(-1).values, *state

    program = torch.export.export(Sorts(), (torch.zeros(1, 3), torch.zeros(1, 2))).run_decompositions({})
    with pytest.raises(ValueError, match=r"The step cannot be exported to C: unsupported operator: aten\.sort"):
        c_step(program, "tiny", ["memory"])
