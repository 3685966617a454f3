"""`hf-recurrent env`: versions and devices for bug reports."""

import argparse
import importlib
import importlib.metadata
import platform

from hf_recurrent.cli.parsing import CommandParser, command

PACKAGES = (
    "hf-recurrent", "torch", "transformers", "accelerate", "safetensors", "huggingface_hub", "numpy", "datasets",
    "peft", "triton",
)  # fmt: skip


def build_parser() -> CommandParser:
    """The arguments of the command: none but --help."""
    return CommandParser(prog="hf-recurrent env", description="Print versions, devices and the scan backends.")


def _print_environment(arguments: argparse.Namespace) -> None:
    import torch

    from hf_recurrent.modeling.scan.linear_scan import available_backends, how_to_install

    lines = {"python": platform.python_version(), "platform": platform.platform()}
    lines |= {package: _version(package) for package in PACKAGES}
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    lines |= {
        "CPU threads": str(torch.get_num_threads()),
        "GPUs": ", ".join(gpus) or "none",
        "scan backends": ", ".join(available_backends()),
        "CPU scan kernel": _kernel("linear_scan_cpu", f"to install it: {how_to_install('cpu')}"),
    }
    in_torch = ("step_cpu", "block_cpu", "sensitivities_cpu")
    lines |= {f"CPU {name.removesuffix('_cpu')} kernel": _kernel(name, "torch is used instead") for name in in_torch}
    lines["CPU count kernel"] = _kernel("count_memory_cpu", "counts are slower, and compress needs it")
    width = max(map(len, lines))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in lines.items()))


def _kernel(name: str, otherwise: str) -> str:
    """The instruction set of a compiled kernel if it says so, or why the kernel is missing."""
    try:
        module = importlib.import_module(f"hf_recurrent.kernels.{name}")
    except ImportError as error:
        return f"not available ({error}); {otherwise}"
    return module.instruction_set() if hasattr(module, "instruction_set") else "available"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


main = command(build_parser, _print_environment)
