"""`hf-recurrent env`: versions and devices for bug reports."""

import argparse
import importlib
import importlib.metadata
import json
import platform

from hf_recurrent.cli.imports import without_collection
from hf_recurrent.cli.parsing import CommandParser, add_json_argument, command

PACKAGES = (
    "hf-recurrent", "torch", "transformers", "accelerate", "safetensors", "huggingface_hub", "numpy", "datasets",
    "peft", "triton",
)  # fmt: skip
KERNELS = {name: f"{name}_cpu" for name in ("step", "block", "sensitivities")}
KERNELS |= {"scan": "linear_scan_cpu", "count": "count_memory_cpu"}


def build_parser() -> CommandParser:
    parser = CommandParser(prog="hf-recurrent env", description="Print versions, devices and compiled kernels.")
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
    } | {f"CPU {name} kernel": _kernel(module) for name, module in KERNELS.items()}
    if arguments.json:
        print(json.dumps(lines))
        return
    width = max(map(len, lines))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in lines.items()))


def _kernel(name: str) -> str:
    """The instruction set of a compiled kernel if it says so, or why the kernel is missing."""
    try:
        module = importlib.import_module(f"hf_recurrent.kernels.{name}")
    except ImportError as error:
        return f"not available ({error}); installing hf-recurrent with a C compiler (GCC or Clang) builds it"
    return module.instruction_set() if hasattr(module, "instruction_set") else "available"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


main = command(build_parser, _print_environment)
