"""Facts of the machine and its software on which the last bits of a computation depend."""

import platform
from importlib.metadata import version
from pathlib import Path

import torch

import hf_recurrent

_BUILD = ("BLAS_INFO", "MKL", "oneDNN", "MKL-DNN", "OpenBLAS", "LAPACK")
_KERNELS = ("linear_scan", "step", "sensitivities")
_PROCESSOR = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")


def machine_facts() -> dict[str, str]:
    """Everything that has to be the same for the same bits."""
    package = Path(hf_recurrent.__file__).parent
    compiled = {path.name for folder in (package, package / "kernels") for path in folder.glob("*.so")}
    return {
        **{name: version(name) for name in ("torch", "transformers", "accelerate", "numpy")},
        "architecture": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "processor": _processor(),
        "torch instructions": torch.backends.cpu.get_cpu_capability(),
        "torch libraries": _libraries(),
        "kernels": ", ".join(kernel for kernel in _KERNELS if any(kernel in name for name in compiled)) or "none",
        "accelerator": str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "none",
    }


def _libraries() -> str:
    lines = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    named = [line for line in lines if line.startswith(("Intel(R)", "OpenBLAS", "BLAS"))]
    settings = [part.strip() for line in lines if "BLAS_INFO" in line for part in line.split(",")]
    return "; ".join([*named, *(part for part in settings if part.startswith(_BUILD))])


def _processor() -> str:
    """Maker and model: libraries choose their loops by it."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return platform.processor()
    pairs = (line.partition(":") for line in path.read_text().split("\n\n")[0].splitlines())
    found = {name.strip(): value.strip() for name, _, value in pairs}
    return ", ".join(f"{name} {found[name]}" for name in _PROCESSOR if name in found)
