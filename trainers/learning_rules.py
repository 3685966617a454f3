"""Rules for learning from blocks of T steps with the state carried: what each lets a step learn of its past.

| rule | gradient |
|---|---|
| `rtrl` | exact in each recurrent layer over all of the past, spatial between layers (Zucchet et al. 2023) |
| `truncated` | backpropagation inside the block; at T = 1 the state before a step is a constant (one-step BPTT) |
| `spatial` | no temporal term: what a step keeps of its state is a constant, the rate at which it keeps it included |
"""

from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Literal, get_args

import torch
from transformers import PreTrainedModel

from hf_recurrent.modeling.recurrent_state import RecurrentState
from hf_recurrent.modeling.recurrent_unit import RecurrentUnit
from hf_recurrent.trainers.sensitivities import SensitivityEngine, shadowed

RuleName = Literal["rtrl", "truncated", "spatial"]
RULES = get_args(RuleName)


class LearningRule:
    """`truncated`, and the base of the others: gradients inside the block, nothing carried beside the state."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def init_carried(self, batch_size: int, device: torch.device | str | None = None) -> RecurrentState:
        """What the rule carries from block to block of `batch_size` streams, batch first."""
        return {}

    def block(self, carried: RecurrentState) -> AbstractContextManager:
        """Forward and backward pass of one block go inside; what is carried advances in place."""
        return nullcontext()


class RealTimeRecurrentLearning(LearningRule):
    """`rtrl`: carries the sensitivities of every recurrent unit ([`SensitivityEngine`])."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.engine = SensitivityEngine(model)

    def init_carried(self, batch_size: int, device: torch.device | str | None = None) -> RecurrentState:
        return self.engine.init_sensitivities(batch_size, device)

    def block(self, carried: RecurrentState) -> AbstractContextManager:
        return self.engine.trace(carried)


class SpatialLearning(LearningRule):
    """`spatial`: every step of a unit learns as if it had started from a zero state, at the true states' values."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.units = [module for module in model.modules() if isinstance(module, RecurrentUnit)]
        if not self.units:
            raise ValueError(
                f"`model` is a {type(model).__name__} without recurrent units of this package, so their temporal term "
                "cannot be left out; use `bptt`."
            )

    @contextmanager
    def block(self, carried: RecurrentState):
        with ExitStack() as stack:
            for unit in self.units:
                stack.enter_context(shadowed(unit, recur=_spatial(unit.recur)))
            yield


def _spatial(recur):
    def spatial(projections, state, reset_mask=None, padding_mask=None):
        with torch.no_grad():
            states, final_state = recur(projections, state, reset_mask, padding_mask)
        every_step = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        alone, _ = recur(projections, torch.zeros_like(state), every_step, padding_mask)
        return states + (alone - alone.detach()), final_state

    return spatial


_CLASSES: dict[str, type[LearningRule]] = {
    "rtrl": RealTimeRecurrentLearning,
    "truncated": LearningRule,
    "spatial": SpatialLearning,
}


def build_learning_rule(name: str, model: PreTrainedModel) -> LearningRule:
    """The rule of that name for a model.

    Raises:
        ValueError: there is no such rule, or it cannot be had for this model.
    """
    if name not in _CLASSES:
        raise ValueError(f"The learning rule is {name!r}; it must be one of {', '.join(_CLASSES)}.")
    return _CLASSES[name](model)
