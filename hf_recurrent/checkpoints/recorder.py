"""`PhaseRecorder`: writes a phase of training into a `Provenance` while it happens, with the energy that it takes."""

import importlib.metadata
import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from hf_recurrent.checkpoints.records import Phase, Provenance, Rate, Segment
from hf_recurrent.kernels.thread_count import num_threads

_POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Joules of all processor packages since the meter was made, other programs' included.

    Linux has counters of Intel and AMD processors, in microjoules, in `/sys/class/powercap`. As a rule, only root may
    read them, and virtual machines have none. They wrap around, so `joules` must be called every few minutes.
    """

    def __init__(self, folder: Path = _POWERCAP):
        # Of whole packages; the zones of their parts are `intel-rapl:N:M`.
        zones = sorted(zone for zone in folder.glob("intel-rapl:*") if zone.name.count(":") == 1)
        found = ((zone, _read(zone / "energy_uj"), _read(zone / "max_energy_range_uj")) for zone in zones)
        self._ranges = {zone: most + 1 for zone, count, most in found if count is not None and most}
        self._last = {zone: _read(zone / "energy_uj") for zone in self._ranges}
        self._total = 0

    def joules(self) -> float | None:
        """The energy so far; None without counters."""
        for zone, most in self._ranges.items():
            if (count := _read(zone / "energy_uj")) is not None:
                self._total += (count - self._last[zone]) % most
                self._last[zone] = count
        return self._total / 1e6 if self._ranges else None


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


_PACKAGES = ("hf-recurrent", "torch", "transformers", "accelerate", "peft")
# Hyperparameters of torch's optimizers that are recorded where a group has them.
_HYPERPARAMETERS = ("optimizer", "weight_decay", "betas", "eps", "alpha", "momentum", "nesterov", "amsgrad")


class PhaseRecorder:
    """Records the steps of one optimizer as a segment of a phase.

    The segment is joined with the one before if nothing but the steps differs. `phase` is new, or the last one of
    `provenance`, which is extended. A phase without steps is not added. `step` have finished before.
    """

    def __init__(
        self, provenance: Provenance, phase: Phase, optimizer: Any, step: int, num_processes: int, device_type: str
    ):
        self.provenance, self.phase, self._begin = provenance, phase, time.monotonic()
        self._cpu_begin, self._energy = time.process_time(), EnergyMeter()
        self.optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        self._hook = self.optimizer.register_step_pre_hook(self.read_rates)
        self._rates: list[list[float]] = []  # of each group: first, last, lowest, highest
        self._earlier = list(phase.segments)
        self._segment = Segment(
            first_step=step,
            last_step=step,
            read=0,
            processes=num_processes,
            settings={},
            rates=[],
            versions=_versions(),
            hardware=_describe_hardware(num_processes, device_type),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        weights = (weight for group in self.optimizer.param_groups for weight in group["params"])
        phase.trained_parameters = sum(weight.numel() for weight in weights if weight.requires_grad)

    @property
    def optimizer_name(self) -> str:
        """Class of the optimizer, or classes of those that it consists of."""
        return getattr(self.optimizer, "description", type(self.optimizer).__name__)

    def read_rates(self, *_: Any) -> None:
        """Note the present learning rates; called by the optimizer's `step`, and where steps bypass it."""
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        if len(self._rates) != len(rates):
            self._rates = [[rate] * 4 for rate in rates]
        for seen, rate in zip(self._rates, rates, strict=True):
            seen[1], seen[2], seen[3] = rate, min(seen[2], rate), max(seen[3], rate)

    def update(self, step: int, read: int, settings: dict[str, Any]) -> None:
        """Record the steps up to `step`, the tokens read since the recorder was made, and the settings in effect."""
        new = self._segment
        if step <= new.first_step:
            return
        new.last_step, new.read, new.settings, new.rates = step, read, settings, self._joined_rates()
        new.seconds = round(time.monotonic() - self._begin, 3)
        new.cpu_seconds = round(time.process_time() - self._cpu_begin, 3)
        new.joules = self._energy.joules()
        if self._earlier and _conditions(self._earlier[-1]) == _conditions(new):
            self.phase.segments = [*self._earlier[:-1], _joined(self._earlier[-1], new)]
        else:
            self.phase.segments = [*self._earlier, new]
        if not any(phase is self.phase for phase in self.provenance.phases):
            self.provenance.phases.append(self.phase)

    def close(self) -> None:
        """Stop reading rates."""
        self._hook.remove()

    def _joined_rates(self) -> list[Rate]:
        """Rates that were read so far, groups with the same values joined; empty before the first step."""
        joined: dict[str, Rate] = {}
        for group, seen in zip(self.optimizer.param_groups, self._rates, strict=False):
            settings = {name: _plain(group[name]) for name in _HYPERPARAMETERS if group.get(name) is not None}
            rate = joined.setdefault(f"{seen} {settings}", Rate(0, *seen, settings=settings))
            rate.parameters += sum(parameter.numel() for parameter in group["params"])
        return sorted((rate for rate in joined.values() if rate.parameters), key=lambda rate: -rate.parameters)


def _conditions(segment: Segment) -> tuple:
    groups = [(rate.parameters, rate.settings) for rate in segment.rates]
    return segment.processes, segment.settings, groups, segment.versions, segment.hardware


def _joined(earlier: Segment, later: Segment) -> Segment:
    return replace(
        later,
        first_step=earlier.first_step,
        read=earlier.read + later.read,
        rates=join_rates(earlier.rates, later.rates),
        started=earlier.started,
        seconds=round(earlier.seconds + later.seconds, 3),
        cpu_seconds=_sum(earlier.cpu_seconds, later.cpu_seconds),
        joules=_sum(earlier.joules, later.joules),
        resumed=earlier.resumed + 1,
    )


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else round(one + other, 3)


def join_rates(earlier: list[Rate], later: list[Rate]) -> list[Rate]:
    """Rates over two successive parts of a segment, which have the same groups."""
    if not earlier or not later:
        return later or earlier
    return [
        replace(
            after,
            first=before.first,
            lowest=min(before.lowest, after.lowest),
            highest=max(before.highest, after.highest),
        )
        for before, after in zip(earlier, later, strict=True)
    ]


def schedule_settings(scheduler: Any) -> dict[str, Any]:
    """Name, peak rates and numbers of steps of a schedule of learning rates, from its own state."""
    scheduler = getattr(scheduler, "scheduler", scheduler)  # of accelerate
    settings: dict[str, Any] = {"name": type(scheduler).__name__}
    functions = getattr(scheduler, "lr_lambdas", None)
    if functions:
        function = getattr(functions[0], "func", functions[0])
        name = getattr(function, "__name__", type(function).__name__)
        settings["name"] = name.removeprefix("_get_").split("_schedule")[0].split("_lambda")[0].strip("_")
        keywords: Mapping[str, Any] = getattr(functions[0], "keywords", {})
        settings |= {key: value for key, value in keywords.items() if isinstance(value, bool | int | float | str)}
    if rates := getattr(scheduler, "base_lrs", None):
        settings["base_rates"] = sorted({float(rate) for rate in rates}, reverse=True)
    return settings


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return list(map(_plain, value)) if isinstance(value, tuple | list) else value


def _versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that training uses."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _describe_hardware(num_processes: int, device_type: str) -> str:
    """Describe this machine: "2 x NVIDIA A100", or "x86_64 processor, 1 process with 2 threads"."""
    if device_type == "cuda":
        name = torch.cuda.get_device_name()
        return f"{num_processes} x {name}" if num_processes > 1 else name
    processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
    threads = num_threads()
    return f"{platform.machine()} processor, {processes} with {threads} thread{'s' if threads > 1 else ''}"
