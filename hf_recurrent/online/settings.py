"""Settings of the online learner, and the optimizer that they describe."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hf_recurrent.argument_checks import check_integer, is_number
from hf_recurrent.learning_rules.optimizers import RMSPROP_ALPHA
from hf_recurrent.learning_rules.rules import RULES

_OPTIMIZERS = ("adamw", "rmsprop", "sgd")
_LARGEST_COUNT = 10**9  # a window of as many bytes takes 8 GB


@dataclass(frozen=True)
class LearnerSettings:
    """Settings of [`OnlineLearner`].

    Args:
        rule: `rtrl`, `snap1`, `truncated` or `spatial` ([`build_learning_rule`]).
        stride: T, bytes that are predicted and backpropagated through together. A block waits until it is full.
        update_every: blocks per update of the weights; their gradients are averaged over all bytes.
        learning_rate: constant.
        table_learning_rate: learning rate of row-wise Adagrad for tables of n-grams, constant.
        optimizer: `adamw` (β 0.9 and 0.999), `rmsprop` (α 0.9999) or `sgd`, all without weight decay, `sgd` without
            momentum.
        max_grad_norm: gradients are clipped to this norm; 0 for no clipping.
        window: bytes of the windowed bits per byte.
        binary: byte 0 is data. By default it ends an episode: state and sensitivities are zero after it.
        learn: False only predicts and scores.

    Raises:
        ValueError: a value is not allowed.
    """

    rule: str = "rtrl"
    stride: int = 1
    update_every: int = 1
    learning_rate: float = 3e-5
    table_learning_rate: float = 0.02
    optimizer: str = "adamw"
    max_grad_norm: float = 1.0
    window: int = 10_000
    binary: bool = False
    learn: bool = True

    def __post_init__(self):
        for name, allowed in (("rule", RULES), ("optimizer", _OPTIMIZERS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}.")
        for name in ("stride", "update_every", "window"):
            check_integer(name, getattr(self, name), 1, _LARGEST_COUNT)
        for name in ("learning_rate", "table_learning_rate"):
            if not is_number(rate := getattr(self, name)) or not 0 < rate < float("inf"):
                raise ValueError(f"`{name}` is {rate!r}; it must be finite and more than 0.")
        if not is_number(self.max_grad_norm) or not self.max_grad_norm >= 0:
            raise ValueError(f"`max_grad_norm` is {self.max_grad_norm!r}; it must be at least 0.")

    def build_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of these settings."""
        parameters = list(parameters)
        if self.optimizer == "rmsprop":
            return torch.optim.RMSprop(parameters, lr=self.learning_rate, alpha=RMSPROP_ALPHA)
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.learning_rate)
        # Fused: one pass over the weights instead of a dozen, which matters at one byte per step.
        fused = parameters[0].device.type in ("cpu", "cuda")
        return torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=0.0, fused=fused)
