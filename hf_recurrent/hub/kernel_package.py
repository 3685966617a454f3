"""The linear scan as a package for the `kernels` library, for models that are not ours.

A build variant is a folder of Python files next to each other, gathered from the sources of this package: plain torch
for every CPU, Triton for CUDA, and the compiled kernel of the platform for which this package was built. That kernel
uses no symbols of Python and torch, so one build works with all later versions, like a stable ABI.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from hf_recurrent.hub.packager import gathered_files, in_import_order, read_source
from hf_recurrent.modeling.scan.linear_scan import available_backends

NAME = "linear-scan"
_VERSION = 1  # of the arguments and results
_OLDEST_LIBRARY = "0.17.2"  # of the library `kernels`: tested
_KERNELS = "hf_recurrent.kernels"
_OPERATORS = "OPERATORS_OF_VARIANT"  # written for the name of a variant, which several of a process must not share
_INIT = '''"""The linear recurrence h_t = a_t * h_{t-1} + b_t, forward and backward, with a state in and out."""

from . import layers
from .layers import available_backends, linear_scan, linear_scan_reference, selective_scan

__all__ = ["available_backends", "layers", "linear_scan", "linear_scan_reference", "selective_scan"]
'''
# In each variant, the backends that it lacks are reported as not installed.
_BACKENDS = """_BACKEND_MODULES = {
    "cpu": (f"{__package__}.linear_scan_cpu", "load the build variant of this platform, if the package has one"),
    "triton": (f"{__package__}.linear_scan_triton", "load the variant for CUDA, and pip install triton"),
}
"""
_REPLACED = {
    "hf_recurrent::": f"{_OPERATORS}::",
    "torch.ops.hf_recurrent": f"torch.ops.{_OPERATORS}",
    ": with this file a checkpoint loads without the package.": ".",
}
_CARD = """---
library_name: kernels
license: apache-2.0
tags:
- kernels
---

# Linear scan

The recurrence h_t = a_t ∘ h_(t-1) + b_t, element by element, forward and backward, from a given state to the final
state: real and complex, bfloat16 to float64, with sums in float32 or wider, and resets inside a sequence.

```python
import torch
from kernels import get_kernel

scan = get_kernel("OWNER/linear-scan", version=1, trust_remote_code=True)
a, b, state = torch.rand(4, 100, 64), torch.randn(4, 100, 64), torch.zeros(4, 64)
h, state = scan.linear_scan(a, b, state)
print(scan.available_backends())
```

Layers for `kernelize`: `LinearScan(a, b, initial_state)`, and `SelectiveScan`, which replaces `selective_scan_fn` in
Mamba, FalconMamba and Jamba of transformers. Both work with `torch.compile` and have a backward pass.

| build variant | backend |
|---|---|
{variants}

Written by `scripts/build_kernel_package.py` of hf_recurrent {version}.
"""


def write_kernel_package(directory: Path) -> dict[str, str]:
    """Write the package to `directory`, which is new or empty, and return its build variants, each with its backend.

    The variant with the compiled kernel is missing where hf_recurrent was installed without a C compiler.
    """
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty; give a new directory")
    variants = {}
    for variant, backend, description, files in _variants():
        folder = directory / "build" / variant
        folder.mkdir(parents=True)
        digest = hashlib.sha256()
        for name, content in sorted(files.items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        identifier = f"_{NAME.replace('-', '_')}_{backend}_{digest.hexdigest()[:7]}"
        for name, content in files.items():
            (folder / name).write_bytes(content.replace(_OPERATORS.encode(), identifier.encode()))
        metadata = {
            "name": NAME, "id": identifier, "version": _VERSION, "kernels-minver": _OLDEST_LIBRARY,
            "license": "Apache-2.0", "python-depends": [], "backend": {"type": backend},
        }  # fmt: skip
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        variants[variant] = description
    rows = "\n".join(f"| `{variant}` | {description} |" for variant, description in variants.items())
    card = _CARD.format(variants=rows, version=importlib.metadata.version("hf-recurrent"))
    (directory / "README.md").write_text(card, encoding="utf-8")
    return variants


def _variants() -> Iterator[tuple[str, str, str, dict[str, bytes]]]:
    """Name, backend, description and files of each build variant."""
    scan = _scan_files()
    yield "torch-cpu", "cpu", "plain torch, on every platform", scan
    triton = _kernel_files("linear_scan_triton")
    yield "torch-cuda", "cuda", "Triton, and plain torch for tensors on the CPU", scan | triton
    if "cpu" in available_backends():
        major, minor = torch.__version__.split(".")[:2]
        machine = {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
        variant = f"torch-stable-abi{major}{minor}-cpu-{machine}-{platform.system().lower()}"
        compiled = _kernel_files("linear_scan_cpu")
        yield variant, "cpu", "C, with the vector instructions that the CPU has", scan | compiled


def _scan_files() -> dict[str, bytes]:
    """The scan and its layers, with backends of the same folder and operators of their own."""
    files = {"__init__.py": _INIT}
    for name, text in gathered_files("hf_recurrent.modeling.scan.layers").items():
        text = re.sub(r"_BACKEND_MODULES = \{\n.*?\n\}\n", lambda _: _BACKENDS, text, flags=re.DOTALL)
        for written, replacement in _REPLACED.items():
            text = text.replace(written, replacement)
        files[name] = text
    return {name: text.encode() for name, text in files.items()}


def _kernel_files(module: str) -> dict[str, bytes]:
    """A module of the kernels, those that it imports, and the libraries that they load."""
    files = {}
    for name in in_import_order(f"{_KERNELS}.{module}"):
        text = "".join(read_source(name).lines)
        files[f"{name.rpartition('.')[2]}.py"] = text.encode()
        for library in re.findall(r'load_library\("(\w+)"', text):
            origin = Path(importlib.util.find_spec(f"{_KERNELS}.{library}").origin)
            files[origin.name] = origin.read_bytes()
    return files
