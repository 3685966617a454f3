"""The card of an exported step."""

from typing import Any

from huggingface_hub import ModelCardData

from hf_recurrent.export.specification import ExportSpecification

_RUNTIMES = {
    "torch": "`torch.export`",
    "aoti": "AOTInductor (torch, compiled for the machine that it was exported on)",
    "onnx": "ONNX",
    "executorch": "ExecuTorch with XNNPACK",
    "c": "C99",
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
# Without this package.
_PLAIN_EXAMPLES = {
    "torch": """
```python
import json
import torch

program = torch.export.load("step.pt2").module()
parts = json.load(open("specification.json"))["state"]
state = [torch.zeros(1, *part["shape"], dtype=getattr(torch, part["dtype"])) for part in parts]
for inputs in {inputs}:
    outputs, *state = program(inputs, *state)
```
""",
    "onnx": """
```python
import json
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("step.onnx")
parts = json.load(open("specification.json"))["state"]
state = {{part["name"]: np.zeros((1, *part["shape"]), part["dtype"]) for part in parts}}
for inputs in {inputs}:
    outputs, *new = session.run(None, {{"inputs": inputs, **state}})
    state = dict(zip(state, new))
```
""",
    "executorch": """
```python
import json
import torch
from executorch.runtime import Runtime

program = Runtime.get().load_program("step.pte")  # keep it as long as its method
method = program.load_method("forward")
parts = json.load(open("specification.json"))["state"]
state = [torch.zeros(1, *part["shape"], dtype=getattr(torch, part["dtype"])) for part in parts]
for inputs in {inputs}:
    outputs, *state = [tensor.clone() for tensor in method.execute([inputs, *state])]
```
""",
}
_C_EXAMPLE = """```c
#include "step.c"  /* or compile it by itself; link with -lm */

static struct model_state state;  /* buffers of past inputs are stored in half precision */
static float outputs[MODEL_OUTPUTS];

model_reset(&state);
model_step(&state, 'd', outputs);  /* a token id; for real values, a pointer to MODEL_INPUTS floats */
```
"""


def export_card(specification: ExportSpecification, data: dict[str, Any]) -> str:
    """The text of README.md; `data` are fields of its metadata."""
    tags = [*dict.fromkeys([*data.get("tags", ()), specification.model_type, "recurrent", specification.runtime])]
    metadata = ModelCardData(**{"library_name": "hf_recurrent"} | data | {"tags": tags})
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

`{specification.program}` is a program for {_RUNTIMES[specification.runtime]}{stored}.
Inputs: {inputs}, then the parts of the state. Outputs: {outputs} (B, {specification.num_outputs}), then
the parts of the new state, in the same order. {streams} The state is zero where {sequence} begins.{pooled}

| part of the state | shape | type |
|---|---|---|
{rows}

{_example(specification)}
A state works only with these weights, whose SHA-256 is
`{specification.weights_hash}`.
The checksums in `manifest.json` notice damage, not malice; load programs only from sources that you trust.
"""


def _example(specification: ExportSpecification) -> str:
    """Code that runs the program, with this package and without it."""
    if specification.runtime == "c":
        return _C_EXAMPLE
    size = specification.input_size
    inputs, arrays = 'torch.tensor(list(b"def main():")).split(1)', 'np.array(list(b"def main():")).reshape(-1, 1)'
    if size is not None:
        inputs, arrays = f"torch.rand(10, 1, {size})", f'np.ones((10, 1, {size}), "float32")'
    text = _EXAMPLE.format(inputs=inputs)
    if specification.runtime in _PLAIN_EXAMPLES:
        given = arrays if specification.runtime == "onnx" else inputs
        text += f"\nWithout this package:\n{_PLAIN_EXAMPLES[specification.runtime].format(inputs=given)}"
    return text
