"""Versions and hardware of this process."""

import importlib.metadata
import platform
from datetime import UTC, datetime

import torch

_PACKAGES = ("hf-recurrent", "torch", "transformers", "accelerate", "peft")


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that training uses."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe_hardware(num_processes: int = 1, device_type: str | None = None) -> str:
    """Describe this machine: "2 x NVIDIA A100", or "x86_64 processor, 1 process with 2 threads".

    Args:
        device_type: "cpu", "cuda", …; by default a GPU if there is one.
    """
    if torch.cuda.is_available() and device_type in (None, "cuda"):
        name = torch.cuda.get_device_name()
        return f"{num_processes} x {name}" if num_processes > 1 else name
    processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
    threads = torch.get_num_threads()
    return f"{platform.machine()} processor, {processes} with {threads} thread{'s' if threads > 1 else ''}"


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
