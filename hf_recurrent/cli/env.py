"""`hf-recurrent env`: versions and devices for bug reports."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Callable

from hf_recurrent.cli.imports import without_collection
from hf_recurrent.cli.parsing import CommandParser, add_json_argument, command

PACKAGES = (
    "hf-recurrent", "torch", "transformers", "accelerate", "safetensors", "huggingface_hub", "numpy", "datasets",
    "peft", "triton",
)  # fmt: skip


def build_parser() -> CommandParser:
    """The arguments of the command."""
    parser = CommandParser(prog="hf-recurrent env", description="Print versions, devices and the scan backends.")
    add_json_argument(parser)
    return parser


def _print_environment(arguments: argparse.Namespace) -> None:
    with without_collection():
        import torch

    lines = {"python": platform.python_version(), "platform": platform.platform()}
    lines |= {package: _version(package) for package in PACKAGES}
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    lines |= {
        "CPU threads": str(torch.get_num_threads()),
        "GPUs": ", ".join(gpus) or "none",
        "scan backends": ", ".join(scan_backends()),
        "CPU scan kernel": _kernel("linear_scan_cpu", _how_to_install),
    }
    in_torch = ("step_cpu", "block_cpu", "sensitivities_cpu")
    lines |= {
        f"CPU {name.removesuffix('_cpu')} kernel": _kernel(name, lambda: "torch is used instead") for name in in_torch
    }
    lines["CPU count kernel"] = _kernel("count_memory_cpu", lambda: "counts are slower, and compress needs it")
    if arguments.json:
        print(json.dumps(lines))
        return
    width = max(map(len, lines))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in lines.items()))


def scan_backends() -> list[str]:
    """As `available_backends` of the scan, whose package imports transformers, which takes seconds."""
    import torch

    is_there = {"reference": True, "torch": True}
    try:
        importlib.import_module("hf_recurrent.kernels.linear_scan_cpu")
        is_there["cpu"] = True
    except ImportError:
        is_there["cpu"] = False
    has_device = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
    is_there["triton"] = has_device and importlib.util.find_spec("triton") is not None
    return [name for name, found in is_there.items() if found]


def _how_to_install() -> str:
    from hf_recurrent.modeling.scan.linear_scan import how_to_install

    return f"to install it: {how_to_install('cpu')}"


def _kernel(name: str, otherwise: Callable[[], str]) -> str:
    """The instruction set of a compiled kernel if it says so, or why the kernel is missing."""
    try:
        module = importlib.import_module(f"hf_recurrent.kernels.{name}")
    except ImportError as error:
        return f"not available ({error}); {otherwise()}"
    return module.instruction_set() if hasattr(module, "instruction_set") else "available"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


main = command(build_parser, _print_environment)
