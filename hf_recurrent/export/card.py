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

step = ExportedStep("path/to/this/folder")
state = step.init_state(1)
for byte in b"def main():":
    outputs, state = step(torch.tensor([byte]), state)
```
"""
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
    outputs, pooled = specification.outputs.replace("_", " "), ""
    if specification.pooling is not None:
        which = {"mean": "the mean of", "last": "the last of"}[specification.pooling]
        pooled = f" The logits of a sequence are {which} its steps' logits."
    example = _C_EXAMPLE if specification.runtime == "c" else _EXAMPLE
    return f"""---
{metadata.to_yaml()}
---

# One step of a {specification.model_type} model, exported for {specification.runtime}

`{specification.program}` is a program for {_RUNTIMES[specification.runtime]}{stored}.
Inputs: {inputs}, then the parts of the state. Outputs: {outputs} (B, {specification.num_outputs}), then
the parts of the new state, in the same order. B is any number of streams. The state is zero where a text
begins.{pooled}

| part of the state | shape | type |
|---|---|---|
{rows}

{example}
A state works only with these weights, whose SHA-256 is
`{specification.weights_hash}`.
The checksums in `manifest.json` notice damage, not malice; load programs only from sources that you trust.
"""
