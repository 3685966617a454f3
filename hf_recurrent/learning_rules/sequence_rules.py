"""Learning rules at T = 1 computed over whole sequences in one pass, for training on complete sequences.

With constant weights, the gradient that a rule accumulates byte by byte is the gradient of one backward pass through
the whole sequence in which some paths are cut. With `rtrl`, the parameters of a unit get the errors of all later steps
of the unit, and everything before the unit gets only the errors of the same step (Zucchet et al. 2023, section 3.2).
Nothing is carried; a batch costs about twice as much as with backpropagation through time, for any number of weights.

Shape letters: B batch, T steps, S state width.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from transformers import PreTrainedModel

from hf_recurrent.learning_rules.optimizers import frozen
from hf_recurrent.learning_rules.rules import SpatialLearning, build_learning_rule, diagonal_recurrence, states_before
from hf_recurrent.learning_rules.traced_unit import shadowed_each
from hf_recurrent.modeling.block.recurrent_backbone import NGRAMS
from hf_recurrent.modeling.units.dense_units import DenseUnit
from hf_recurrent.modeling.units.recurrent_unit import RecurrentUnit

SEQUENCE_RULES = ("bptt", "rtrl", "snap1", "truncated", "spatial")


class SequenceRule:
    """Makes backpropagation through a whole sequence give the gradient of a learning rule at T = 1.

    Example:
        ```python
        rule = SequenceRule("rtrl", model)
        with rule.block():
            loss = model(input_ids, shift_labels=targets).loss
        loss.backward()
        ```

    Sequences start from a zero state or at a reset; there is no gradient for inputs before the pass.

    Args:
        name: `bptt`, `rtrl`, `snap1`, `truncated` or `spatial`.
        model: a recurrent model, with or without a head, whose only states belong to [`RecurrentUnit`]s.

    Raises:
        ValueError: the rule is unknown or not supported by this model, or the model has other states, such as the taps
            of a convolution.
    """

    def __init__(self, name: str, model: PreTrainedModel):
        if name not in SEQUENCE_RULES:
            raise ValueError(f"`name` is {name!r}; it must be one of {', '.join(SEQUENCE_RULES)}.")
        others = [part for part in model.base_model.init_state(1) if not part.endswith((".recurrent", NGRAMS))]
        if others and name != "bptt":
            raise ValueError(
                f"`model` is a {type(model).__name__} that also has the state `{others[0]}`, through which {name!r} "
                "would learn from other steps; carry the state with `stride` 1 instead."
            )
        if name in ("rtrl", "snap1"):
            build_learning_rule(name, model)  # raises if the units mix channels or cannot be traced
        self.name = name
        self.units = [module for module in model.modules() if isinstance(module, RecurrentUnit)]
        self._spatial = SpatialLearning(model) if name == "spatial" else None

    def block(self) -> AbstractContextManager:
        """Context for forward passes; the backward pass may come later."""
        if self._spatial is not None:
            return self._spatial.block({})
        return nullcontext() if self.name == "bptt" else shadowed_each(self.units, "forward", self._forward)

    def _forward(self, unit: RecurrentUnit):
        if self.name == "truncated":
            return _one_step_back(unit)
        return _exact_inside(unit, self.name == "snap1" and isinstance(unit, DenseUnit))


def _one_step_back(unit: RecurrentUnit):
    """Forward pass in which the state before each step is a constant."""

    def forward(inputs, state, reset_mask=None, padding_mask=None):
        projections = unit.project(inputs)
        with torch.no_grad():
            states, final_state = unit.recur(projections, state, reset_mask, padding_mask)
        before = states_before(states, state, reset_mask)
        return _single_steps(unit, projections, before, padding_mask), final_state

    return forward


def _exact_inside(unit: RecurrentUnit, diagonal: bool):
    """Forward pass in which the unit's parameters learn from all steps, and its inputs from their own step only."""

    def forward(inputs, state, reset_mask=None, padding_mask=None):
        recur = diagonal_recurrence(unit) if diagonal else unit.recur
        projections = unit.project(inputs.detach())
        states, final_state = recur(projections, state, reset_mask, padding_mask)
        outputs = unit.read_out(states, *projections)
        with frozen(unit):
            before = states_before(states, state, reset_mask)
            of_inputs = _single_steps(unit, unit.project(inputs), before, padding_mask)
        return outputs + (of_inputs - of_inputs.detach()), final_state.detach()

    return forward


def _single_steps(unit, projections, before, padding_mask) -> torch.Tensor:
    """Outputs of all steps from the states `before` (B, T, S), computed in parallel as B · T sequences of one step."""
    if padding_mask is not None:
        padding_mask = padding_mask.flatten().unsqueeze(1)
    parallel = tuple(projection.flatten(0, 1).unsqueeze(1) for projection in projections)
    states, _ = unit.recur(parallel, before.flatten(0, 1), None, padding_mask)
    return unit.read_out(states.view(before.shape), *projections)
