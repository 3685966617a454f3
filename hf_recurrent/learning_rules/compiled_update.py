"""The update of all weights from one block of memory with their gradients, as one pass of a compiled kernel."""

from collections.abc import Mapping

import torch
from torch import nn

from hf_recurrent.learning_rules.compiled_program import block_cpu

_MOMENTS = {torch.optim.AdamW: ("exp_avg", "exp_avg_sq"), torch.optim.RMSprop: (None, "square_avg")}
_KINDS = {torch.optim.AdamW: "adamw", torch.optim.RMSprop: "rmsprop"}
_ABSENT = ("amsgrad", "maximize", "weight_decay", "momentum", "centered")  # what the kernel does not compute


class GradientMemory:
    """The gradients of some parameters of one type, one after another in one tensor."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self.parameters = list(parameters.values())
        self.flat, self.views = self._views(parameters)
        self._by_name = dict(parameters)
        self._other: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None

    @staticmethod
    def _views(parameters: Mapping[str, nn.Parameter]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        sizes = [parameter.numel() for parameter in parameters.values()]
        flat = torch.empty(sum(sizes), dtype=next(iter(parameters.values())).dtype)
        pairs = zip(parameters.items(), flat.split(sizes), strict=True)
        return flat, {name: part.view(parameter.shape) for (name, parameter), part in pairs}

    @property
    def is_empty(self) -> bool:
        """True if no parameter has a gradient."""
        return all(parameter.grad is None for parameter in self.parameters)

    @property
    def is_attached(self) -> bool:
        """True if the gradients of all parameters lie here."""
        return all(p.grad is view for p, view in zip(self.parameters, self.views.values(), strict=True))

    def attach(self) -> None:
        """Make what lies here the gradients of the parameters."""
        for parameter, view in zip(self.parameters, self.views.values(), strict=True):
            parameter.grad = view

    def gather(self) -> None:
        """Move all gradients here."""
        for parameter, view in zip(self.parameters, self.views.values(), strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
        self.attach()

    def other_views(self) -> dict[str, torch.Tensor]:
        """Memory for gradients that [`add_other`] adds."""
        if self._other is None:
            self._other = self._views(self._by_name)
        return self._other[1]

    def add_other(self) -> None:
        """Add the gradients in the memory of [`other_views`]."""
        self.flat.add_(self._other[0])


class CompiledUpdate:
    """Steps of an optimizer without weight decay.

    Args:
        optimizer: AdamW or RMSprop; its state is the same as after its own steps, up to rounding.
        memory: the gradients of its parameters; those without a place in it have none.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, memory: GradientMemory):
        self.optimizer, self.memory = optimizer, memory
        self._update: block_cpu.WeightUpdate | None = None
        self._bound: tuple | None = None  # what the update was made of
        self._steps = 0

    @staticmethod
    def is_supported(optimizer: torch.optim.Optimizer) -> bool:
        """True for optimizers and settings that the kernel computes."""
        return type(optimizer) in _KINDS and not any(
            group.get(name) for group in optimizer.param_groups for name in _ABSENT
        )

    def norm(self) -> float:
        """The norm of the gradient."""
        self._bind()
        return self._update.norm()

    def step(self, scale: float) -> None:
        """One step with `scale` times the gradient."""
        self._bind()
        self._steps += 1
        self._update.step(self._steps, scale)
        torch.autograd.graph.increment_version(self.memory.parameters)

    def write_steps(self) -> None:
        """Bring the numbers of steps in the optimizer's state up to date."""
        if self._bound is not None and self._bound[0] is self.optimizer.state:
            for parameter in self.memory.parameters:
                self.optimizer.state[parameter]["step"].fill_(self._steps)

    def _bind(self) -> None:
        """Take the tensors and rates of the optimizer, if these are new."""
        bound = self.optimizer.state, [group["lr"] for group in self.optimizer.param_groups]
        if self._bound is not None and self._bound[0] is bound[0] and self._bound[1] == bound[1]:
            return
        if self._bound is not None:
            self.write_steps()
        first, second = _MOMENTS[type(self.optimizer)]
        rates = {p: group["lr"] for group in self.optimizer.param_groups for p in group["params"]}
        trained = []
        for parameter in self.memory.parameters:
            state = self.optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                for name in filter(None, (first, second)):
                    state[name] = torch.zeros_like(parameter)
            moments = state[first] if first else None, state[second]
            trained.append(block_cpu.Trained(parameter, *moments, rates[parameter]))
        group, kind = self.optimizer.param_groups[0], _KINDS[type(self.optimizer)]
        betas = group["betas"] if "betas" in group else (0.0, group["alpha"])
        self._update = block_cpu.WeightUpdate(kind, self.memory.flat, trained, betas, group["eps"])
        self._steps = int(self.optimizer.state[self.memory.parameters[0]]["step"])
        self._bound = bound
