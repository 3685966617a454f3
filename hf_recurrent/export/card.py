"""The card of an exported step."""

from huggingface_hub import ModelCardData

from hf_recurrent.export.specification import ExportSpecification

# Name, and how to load the program without this package.
_RUNTIMES = {
    "torch": ("`torch.export`", '`torch.export.load("step.pt2").module()`'),
    "aoti": (
        "AOTInductor (torch, compiled for the machine that it was exported on)",
        '`torch._inductor.aoti_load_package("step.aoti.pt2")`',
    ),
    "onnx": ("ONNX", '`onnxruntime.InferenceSession("step.onnx")`'),
    "executorch": ("ExecuTorch with XNNPACK", '`executorch.runtime.Runtime.get().load_program("step.pte")`'),
    "c": ("C99", ""),
}
_EXAMPLE = """```python
import torch
from hf_recurrent import ExportedStep

step = ExportedStep(".")  # this folder, or owner/name of this repository on the Hub
state = step.init_state(1)
for inputs in {inputs}:
    outputs, state = step(inputs, state)
```
"""
_C_EXAMPLE = """```c
#include "step.c"  /* or compile it by itself; link with -lm */

static struct model_state state;  /* buffers of past inputs are stored in half precision */
static float outputs[MODEL_OUTPUTS];
{weights}
model_reset(&state);
model_step(&state, {argument}'d', outputs);  /* a token id; for real values, a pointer to MODEL_INPUTS floats */
```

`model_step` returns 0, or 1 for a token id that is not in the vocabulary.
"""
_C_WEIGHTS = """
/* file: the MODEL_WEIGHTS_FILE_SIZE bytes of model.weights, aligned to 4 bytes, which stay in memory or flash */
const struct model_weights *weights = model_load(file, MODEL_WEIGHTS_FILE_SIZE);  /* null if they are damaged */
"""


def export_card(specification: ExportSpecification, weights_file: bool = False) -> str:
    """The text of README.md; `weights_file` as in [`save_exported_step`]."""
    tags = [specification.model_type, "recurrent", specification.runtime]
    metadata = ModelCardData(library_name="hf_recurrent", tags=tags)
    inputs = "token ids (B,), int64"
    if specification.input_size is not None:
        inputs = f"real values (B, {specification.input_size})"
    rows = "\n".join(
        f"| `{part.name}` | (B, {', '.join(map(str, part.shape))}) | {part.dtype} |" for part in specification.state
    )
    stored = f"; large weights are {specification.weights}" if specification.weights else ""
    sequence = "a text" if specification.input_size is None else "a sequence"
    outputs, pooled = specification.outputs.replace("_", " "), ""
    if specification.pooling is not None:
        which = {"mean": "the mean of", "last": "the last of"}[specification.pooling]
        pooled = f" The logits of a sequence are {which} its steps' logits."
    streams = f"B is at most {specification.max_streams:,}, the number of streams."
    if specification.max_streams == 1:
        streams = "B is 1."
    return f"""---
{metadata.to_yaml()}
---

# One step of a {specification.model_type} model, exported for {specification.runtime}

`{specification.program}` is a program for {_RUNTIMES[specification.runtime][0]}{stored}.
Inputs: {inputs}, then the parts of the state. Outputs: {outputs} (B, {specification.num_outputs}), then
the parts of the new state, in the same order. {streams} The state is zero where {sequence} begins.{pooled}

| part of the state | shape | type |
|---|---|---|
{rows}

{_example(specification, weights_file)}
A state works only with these weights, whose SHA-256 is
`{specification.weights_hash}`.
The checksums in `manifest.json` notice damage, not malice; load programs only from sources that you trust.
"""


def _example(specification: ExportSpecification, weights_file: bool) -> str:
    if specification.runtime == "c":
        return _C_EXAMPLE.format(
            weights=_C_WEIGHTS if weights_file else "", argument="weights, " if weights_file else ""
        )
    size = specification.input_size
    inputs = 'torch.tensor(list(b"def main():")).split(1)' if size is None else f"torch.rand(10, 1, {size})"
    load = _RUNTIMES[specification.runtime][1]
    return _EXAMPLE.format(inputs=inputs) + f"\nWithout this package, {load} loads the program.\n"
