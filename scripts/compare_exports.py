#!/usr/bin/env python
"""Bits per byte of a model's exported steps and of its compiled step on one file, next to `forward`.

Every format reads the file byte by byte, from a zero state. Formats whose packages are missing are named. The system's
compiler compiles C.

    python scripts/compare_exports.py runs/hawk README.md
    python scripts/compare_exports.py runs/hawk README.md --weights float32 int8 --formats onnx executorch
"""

import argparse
import itertools
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from benchmarking import markdown_table
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_recurrent import ExportedStep, save_exported_step
from hf_recurrent.export.formats import FORMATS
from hf_recurrent.export.weight_types import round_weights

MAIN = r"""
#include <stdio.h>
#include "step.c"

static struct model_state state;
static float outputs[MODEL_OUTPUTS];

int main(void) {
    double nats = 0;
    model_reset(&state);
    for (int byte = getchar(), next; (next = getchar()) != EOF; byte = next) {
        double sum = 0, largest;
        model_step(&state, byte, outputs);
        largest = outputs[0];
        for (int i = 1; i < MODEL_OUTPUTS; i++) largest = fmax(largest, outputs[i]);
        for (int i = 0; i < MODEL_OUTPUTS; i++) sum += exp(outputs[i] - largest);
        nats += log(sum) + largest - outputs[next];
    }
    printf("%.9f\n", nats);
    return 0;
}
"""


@torch.no_grad()
def block_nats(model: PreTrainedModel, text: bytes) -> float:
    """Nats of all bytes but the first, read as one block."""
    ids = torch.tensor([list(text)])
    logits = model(ids[:, :-1]).logits[0]
    return float(torch.nn.functional.cross_entropy(logits.double(), ids[0, 1:], reduction="sum"))


@torch.no_grad()
def step_nats(step, state, text: bytes) -> float:
    """The same by `step`: ids and state → logits and state."""
    nats, ids = 0.0, torch.tensor(list(text))
    for byte, following in itertools.pairwise(ids):
        logits, state = step(byte.view(1), state)
        nats -= float(logits.double().log_softmax(-1)[0, following])
    return nats


def c_nats(folder: Path, text: bytes) -> float:
    """The same by the C file of an export."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        raise ImportError("no C compiler was found")
    (folder / "main.c").write_text(MAIN)
    subprocess.run([compiler, "-std=c99", "-O2", "main.c", "-o", "main", "-lm"], cwd=folder, check=True)
    return float(subprocess.run([folder / "main"], input=text, capture_output=True, check=True).stdout)


def nats_of(form: str, model: PreTrainedModel, weights: str | None, text: bytes) -> float:
    """Nats of the text by one form of the model.

    Raises:
        ImportError: a package of the format is missing.
        ValueError: the format does not take the model or these weights.
    """
    if form == "forward":
        return block_nats(model, text)
    if form == "compiled step":
        model.compile_step(weights)

        def step(ids, state):
            output = model(ids.unsqueeze(1), state=state)
            return output.logits[:, 0], output.state

        nats = step_nats(step, model.init_state(1), text)
        model.compile_step(None)
        return nats
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "step")
        save_exported_step(model, place, runtime=form, weights=weights)
        if form == "c":
            return c_nats(place, text)
        exported = ExportedStep(place)
        return step_nats(exported, exported.init_state(1), text)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of a checkpoint, or owner/name on the Hub")
    parser.add_argument("file", type=Path, help="text that is read")
    parser.add_argument("--bytes", type=int, default=20_000, help="of the file (default 20000)")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--weights", nargs="+", choices=["float32", "bfloat16", "int8"], default=["float32", "int8"])
    options = parser.parse_args()
    text = options.file.read_bytes()[: options.bytes]
    lines, own = [], None
    for name in options.weights:
        weights = None if name == "float32" else name
        for form in ("forward", "compiled step", *options.formats):
            if form == "c" and weights != "int8":  # in C they are always int8
                continue
            model = AutoModelForCausalLM.from_pretrained(options.model).float().eval()
            if form == "forward" and weights is not None:
                round_weights(model, weights)
            try:
                bits = nats_of(form, model, weights, text) / math.log(2) / (len(text) - 1)
            except (ImportError, ValueError) as error:
                lines.append([form, name, f"not measured: {error}", ""])
                continue
            own = bits if own is None else own
            lines.append([form, name, f"{bits:.5f}", f"{bits - own:+.5f}"])
            print(*lines[-1], file=sys.stderr, flush=True)
    columns = ["form", "weights", "bits per byte", "difference"]
    print(f"{len(text):,} bytes of {options.file.name}\n\n{markdown_table(columns, lines)}")


if __name__ == "__main__":
    main()
