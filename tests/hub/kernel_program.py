"""Load the build variant in a folder as the library `kernels` does, and compare it with the recurrence in float64.

    python kernel_program.py FOLDER BACKEND

Prints the largest error of results and gradients, and whether hf_recurrent was imported.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch


def load(folder: Path):
    """The module of a build variant."""
    name = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs(dtype: torch.dtype, shape=(2, 9, 5)) -> list[torch.Tensor]:
    """a, b (B,T,S), the state (B,S), and a weight for each result."""
    generator = torch.Generator().manual_seed(1)
    shapes = [shape, shape, (shape[0], shape[2])]
    values = [torch.randn(size, generator=generator, dtype=torch.float64) for size in (*shapes, shape, shapes[2])]
    values[0] = values[0].sigmoid()
    return [value.to(dtype).requires_grad_(place < 3) for place, value in enumerate(values)]


def results(scan, tensors: list[torch.Tensor], **options) -> list[torch.Tensor]:
    """h, the final state, and the gradients of a, b and the state."""
    *arguments, weight, weight_of_state = tensors
    h, final = scan(*arguments, **options)
    ((h * weight).sum() + (final * weight_of_state).sum()).backward()
    return [h.detach(), final.detach(), *(tensor.grad for tensor in arguments)]


def in_float64(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same by a plain loop."""

    def scan(a, b, state):
        states = [state := a[:, t] * state + b[:, t] for t in range(a.shape[1])]
        return torch.stack(states, dim=1), state

    return results(scan, [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in tensors])


def largest_error(scan, dtype: torch.dtype = torch.float32, **options) -> float:
    """The largest difference from float64 of any result or gradient."""
    tensors = inputs(dtype)
    pairs = zip(results(scan, tensors, **options), in_float64(tensors), strict=True)
    return max((found - expected).abs().max().item() for found, expected in pairs)


if __name__ == "__main__":
    kernel = load(Path(sys.argv[1]))
    error = largest_error(kernel.linear_scan, backend=sys.argv[2])
    print(json.dumps({"error": error, "imported": "hf_recurrent" in sys.modules}))
