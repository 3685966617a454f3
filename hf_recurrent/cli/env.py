"""`hf-recurrent env`: what a bug report needs to say about the machine."""

import argparse
import importlib
import importlib.metadata
import platform
from collections.abc import Sequence

PACKAGES = (
    "hf-recurrent",
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "huggingface_hub",
    "numpy",
    "datasets",
    "peft",
    "triton",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Print versions, devices and the backends of the linear scan."""
    argparse.ArgumentParser(prog="hf-recurrent env", description=main.__doc__).parse_args(argv)
    import torch

    from hf_recurrent.modeling.linear_scan import available_backends

    lines = {"python": platform.python_version(), "platform": platform.platform()}
    lines |= {package: _version(package) for package in PACKAGES}
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    lines |= {
        "CPU threads": str(torch.get_num_threads()),
        "GPUs": ", ".join(gpus) or "none",
        "scan backends": ", ".join(available_backends()),
        "CPU scan kernel": _cpu_kernel(),
        "CPU step kernel": _other_kernel("step_cpu"),
        "CPU sensitivities kernel": _other_kernel("sensitivities_cpu"),
    }
    width = max(map(len, lines))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in lines.items()))


def _cpu_kernel() -> str:
    """The instructions that the compiled CPU kernel uses, or why it is not there and how to get it."""
    from hf_recurrent.modeling.linear_scan import how_to_install

    try:
        from hf_recurrent.kernels.linear_scan_cpu import instruction_set
    except ImportError as error:
        return f"not there ({error}); to get it: {how_to_install('cpu')}"
    return instruction_set()


def _other_kernel(name: str) -> str:
    """Whether a compiled kernel is there: of single bytes (`step_cpu`) or of online learning (`sensitivities_cpu`)."""
    try:
        importlib.import_module(f"hf_recurrent.kernels.{name}")
    except ImportError as error:
        return f"not there ({error}); plain torch serves"
    return "there"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
