"""Learning rules for blocks of T steps with the state carried; they differ in the gradient through the past.

| rule | gradient |
|---|---|
| `rtrl` | exact in each recurrent layer through the whole past, spatial between layers (Zucchet et al. 2023) |
| `truncated` | backpropagation inside the block: truncated to T steps; at T = 1 the previous state is a constant |
| `snap1` | as `rtrl`, but only the diagonal of ∂h_t/∂h_{t-1} if the recurrence mixes channels (Menick et al. 2021) |
| `spatial` | no temporal term: the part of the state that a step keeps is a constant, and so is its rate |
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hf_recurrent.learning_rules.sensitivities import SensitivityEngine
from hf_recurrent.learning_rules.traced_unit import shadowed_each
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, detach_state, upcast
from hf_recurrent.modeling.scan.linear_scan import linear_scan
from hf_recurrent.modeling.units.dense_units import DenseUnit
from hf_recurrent.modeling.units.recurrent_unit import RecurrentUnit


def diagonal_recurrence(unit: DenseUnit, *, temporal: bool = True) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """A replacement for `unit.recur` with the same states, and gradients by the diagonal of the Jacobian.

    Without `temporal`, all gradients through the previous state are cut, also of the maps of the state.
    """
    recur = unit.recur

    def diagonal(projections, state, reset_mask=None, padding_mask=None):
        with torch.no_grad():
            states, final_state = recur(projections, state, reset_mask, padding_mask)
        before = states_before(states, state, reset_mask)
        projections = [upcast(projection) for projection in projections]
        with torch.set_grad_enabled(temporal and torch.is_grad_enabled()):
            of_state = [upcast(state_map(before)) for state_map in unit.state_maps]
        combined = unit.combine(before, *projections, *of_state)
        change = combined - combined.detach()
        if padding_mask is not None:
            change = change.masked_fill(padding_mask.unsqueeze(-1), 0)
        if not temporal:
            return states + change, final_state
        decay = _diagonal_of_jacobian(unit, before, projections, of_state)
        if padding_mask is not None:
            decay = decay.masked_fill(padding_mask.unsqueeze(-1), 1)
        changes, final_change = linear_scan(decay, change, state - state.detach(), reset_mask)
        return states + changes, final_state + final_change

    return diagonal


def states_before(states: torch.Tensor, state: torch.Tensor, reset_mask: torch.Tensor | None) -> torch.Tensor:
    """State before each step, (B, T, S), detached; from `states` (B, T, S) and the initial `state` (B, S)."""
    before = torch.cat([state.detach().unsqueeze(1), states[:, :-1].detach()], 1)
    return before if reset_mask is None else before.masked_fill(reset_mask.unsqueeze(-1), 0)


def _diagonal_of_jacobian(unit, before, projections, of_state) -> torch.Tensor:
    """D_t of all steps, (B, T, S): the direct part, plus the part through each map's diagonal weight."""
    with torch.enable_grad():
        parts = [tensor.detach().requires_grad_() for tensor in (before, *of_state)]
        combined = unit.combine(parts[0], *(projection.detach() for projection in projections), *parts[1:])
        itself, *through = torch.autograd.grad(combined.sum(), parts, allow_unused=True, materialize_grads=True)
    diagonals = [upcast(state_map.weight.detach().diagonal()) for state_map in unit.state_maps]
    return itself + sum(gradient * weights for gradient, weights in zip(through, diagonals, strict=True))


class NonFiniteLossError(ValueError):
    """A NaN or infinite loss; the weights were not updated with it."""


class LearningRule:
    """`truncated`, and base class of the other rules: gradients inside the block, nothing carried but the state."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def init_carried(self, batch_size: int, device: torch.device | str | None = None) -> RecurrentState:
        """Tensors, batch first, that the rule carries from block to block in addition to the state."""
        return {}

    def block(self, carried: RecurrentState) -> AbstractContextManager:
        """Context for the forward and backward pass of one block; updates `carried` in place.

        An exception before the backward pass leaves `carried` unchanged.
        """
        return nullcontext()

    def learn(
        self,
        carried: RecurrentState,
        state: RecurrentState,
        input_ids: torch.LongTensor,
        shift_labels: torch.LongTensor,
        reset_mask: torch.Tensor | None,
        num_targets: torch.Tensor | int,
    ) -> ModelOutput:
        """Read one block, (B, T), and add the gradient of its nats / `num_targets` to every parameter's `.grad`.

        `carried` is updated in place. Returns the model's output, with the state after the block detached.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite; gradients and `carried` are unchanged.
        """
        with torch.enable_grad(), self.block(carried):
            output = self.model(
                input_ids,
                shift_labels=shift_labels,
                reset_mask=reset_mask,
                state=state,
                use_cache=True,
                num_items_in_batch=num_targets,
            )
            if not torch.isfinite(output.loss):
                raise NonFiniteLossError(f"The loss is {output.loss.item()}: nothing was learned from this block.")
            output.loss.backward()
        output.state = detach_state(output.state)
        return output


class RealTimeRecurrentLearning(LearningRule):
    """`rtrl`: carries the sensitivities of every recurrent unit ([`SensitivityEngine`])."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.engine = SensitivityEngine(model)

    def init_carried(self, batch_size: int, device: torch.device | str | None = None) -> RecurrentState:
        return self.engine.init_sensitivities(batch_size, device)

    def block(self, carried: RecurrentState) -> AbstractContextManager:
        return self.engine.trace(carried)


class SnAp1(RealTimeRecurrentLearning):
    """`snap1`: approximate RTRL for units that mix channels, see [`diagonal_recurrence`]."""

    def __init__(self, model: PreTrainedModel):
        self.dense_units = [module for module in model.modules() if isinstance(module, DenseUnit)]
        with self._diagonal():
            super().__init__(model)

    def _diagonal(self) -> AbstractContextManager:
        return shadowed_each(self.dense_units, "recur", diagonal_recurrence)

    @contextmanager
    def block(self, carried: RecurrentState):
        with self._diagonal(), super().block(carried):
            yield


class SpatialLearning(LearningRule):
    """`spatial`: states have their true values, but gradients are computed as if every step began at a zero state.

    A unit that mixes channels learns its maps of the input from single steps, and its maps of the state not at all.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.units = [module for module in model.modules() if isinstance(module, RecurrentUnit)]
        if not self.units:
            raise ValueError(
                f"`model` is a {type(model).__name__} without recurrent units of this package; `spatial` needs them. "
                "Use `bptt`."
            )

    def block(self, carried: RecurrentState) -> AbstractContextManager:
        return shadowed_each(self.units, "recur", _spatial_recurrence)


def _spatial_recurrence(unit: RecurrentUnit) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    if isinstance(unit, DenseUnit):
        return diagonal_recurrence(unit, temporal=False)
    recur = unit.recur

    def spatial(projections, state, reset_mask=None, padding_mask=None):
        with torch.no_grad():
            states, final_state = recur(projections, state, reset_mask, padding_mask)
        every_step = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        alone, _ = recur(projections, torch.zeros_like(state), every_step, padding_mask)
        return states + (alone - alone.detach()), final_state

    return spatial


_CLASSES: dict[str, type[LearningRule]] = {
    "rtrl": RealTimeRecurrentLearning,
    "snap1": SnAp1,
    "truncated": LearningRule,
    "spatial": SpatialLearning,
}
RULES = tuple(_CLASSES)


def build_learning_rule(name: str, model: PreTrainedModel) -> LearningRule:
    """Build a rule for a model; a ValueError if the rule is unknown or not supported by this model."""
    if name not in _CLASSES:
        raise ValueError(f"`name` is {name!r}; it must be one of {', '.join(RULES)}.")
    return _CLASSES[name](model)
