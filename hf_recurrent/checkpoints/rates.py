"""Settings of an optimizer and its schedule, read while they act."""

from collections.abc import Mapping
from typing import Any

import torch

from hf_recurrent.checkpoints.records import Rate

# Hyperparameters of torch's optimizers that are recorded where a group has them.
_HYPERPARAMETERS = ("weight_decay", "betas", "eps", "alpha", "momentum", "nesterov", "amsgrad")


class RateMeter:
    """Reads the learning rate of each parameter group at every step of an optimizer.

    Args:
        optimizer: an optimizer of torch, or accelerate's wrapper of one.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = getattr(optimizer, "optimizer", optimizer)
        self._rates: list[list[float]] = []  # of each group: first, last, lowest, highest
        self._hook = None
        if isinstance(self._optimizer, torch.optim.Optimizer):
            self._hook = self._optimizer.register_step_pre_hook(self.read)

    def read(self, *_: Any) -> None:
        """Read the rates now; steps of the optimizer's own `step` are noticed without it."""
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        if len(self._rates) != len(rates):
            self._rates = [[rate] * 4 for rate in rates]
        for seen, rate in zip(self._rates, rates, strict=True):
            seen[1], seen[2], seen[3] = rate, min(seen[2], rate), max(seen[3], rate)

    def rates(self) -> list[Rate]:
        """Rates that were read so far, groups with the same values joined; empty before the first step."""
        joined: dict[str, Rate] = {}
        for group, seen in zip(self._optimizer.param_groups, self._rates, strict=False):
            settings = {name: _plain(group[name]) for name in _HYPERPARAMETERS if group.get(name) is not None}
            count = sum(parameter.numel() for parameter in group["params"])
            rate = joined.setdefault(f"{seen} {settings}", Rate(0, *seen, settings=settings))
            rate.parameters += count
        return sorted((rate for rate in joined.values() if rate.parameters), key=lambda rate: -rate.parameters)

    def close(self) -> None:
        """Stop reading."""
        if self._hook is not None:
            self._hook.remove()

    @property
    def trained_parameters(self) -> int:
        """Number of parameters that the optimizer updates."""
        groups = self._optimizer.param_groups
        return sum(weight.numel() for group in groups for weight in group["params"] if weight.requires_grad)

    @property
    def name(self) -> str:
        """Class of the optimizer."""
        return type(self._optimizer).__name__


def join_rates(earlier: list[Rate], later: list[Rate]) -> list[Rate]:
    """Rates over two successive parts of a segment, which have the same groups."""
    if not earlier or not later:
        return later or earlier
    return [
        Rate(
            after.parameters,
            before.first,
            after.last,
            min(before.lowest, after.lowest),
            max(before.highest, after.highest),
            after.settings,
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
