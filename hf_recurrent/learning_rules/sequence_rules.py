"""The learning rules at T = 1 over whole sequences, in one pass: for training on sequences that are at hand.

While the weights stand still, the gradient that a rule sums up byte by byte is that of a backward pass through the
whole sequence in which some errors are not sent. For `rtrl` a unit's own parameters get the errors of all later steps
of that unit, and what lies before it those of the same step (Zucchet et al. 2023, section 3.2). Nothing is carried, so
that a batch costs about twice what backpropagation through time costs, however many weights there are.

Shape letters: B batch, T steps, S state width.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from transformers import PreTrainedModel

from hf_recurrent.learning_rules.rules import SpatialLearning, build_learning_rule
from hf_recurrent.learning_rules.snap1 import diagonal_recurrence, states_before
from hf_recurrent.learning_rules.traced_unit import shadowed
from hf_recurrent.modeling.dense_units import DenseUnit
from hf_recurrent.modeling.recurrent_unit import RecurrentUnit

SEQUENCE_RULES = ("bptt", "rtrl", "snap1", "truncated", "spatial")
_Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class SequenceRule:
    """Forward passes inside `block()` are such that backpropagation gives the gradient of a rule at T = 1.

    Example:
        ```python
        rule = SequenceRule("rtrl", model)
        with rule.block():
            loss = model(input_ids, shift_labels=targets).loss
        loss.backward()
        ```

    Sequences start from zero states or at resets: what lies before the pass is not learned from.

    Args:
        name: `bptt`, `rtrl`, `snap1`, `truncated` or `spatial`.
        model: a recurrent model, with or without a head, whose states are those of [`RecurrentUnit`]s alone.

    Raises:
        ValueError: there is no such rule, it cannot be had for this model, or the model remembers by something else,
            such as a convolution.
    """

    def __init__(self, name: str, model: PreTrainedModel):
        if name not in SEQUENCE_RULES:
            raise ValueError(f"The rule is {name!r}; it must be one of {', '.join(SEQUENCE_RULES)}.")
        others = [part for part in model.init_state(1) if not part.endswith(".recurrent")]
        if others and name != "bptt":
            raise ValueError(
                f"`model` is a {type(model).__name__} that also remembers by `{others[0]}`, through which {name!r} "
                "would learn from other steps; carry the state with `stride` 1 instead."
            )
        if name in ("rtrl", "snap1"):
            build_learning_rule(name, model)  # refuses units that mix channels, and what it cannot trace
        self.name = name
        self.units = [module for module in model.modules() if isinstance(module, RecurrentUnit)]
        self._spatial = SpatialLearning(model) if name == "spatial" else None

    @contextmanager
    def block(self) -> Iterator[None]:
        """Forward passes go inside; the backward pass may follow later."""
        with ExitStack() as stack:
            if self._spatial is not None:
                stack.enter_context(self._spatial.block({}))
            elif self.name != "bptt":
                for unit in self.units:
                    stack.enter_context(shadowed(unit, forward=self._forward(unit)))
            yield

    def _forward(self, unit: RecurrentUnit) -> _Forward:
        if self.name == "truncated":
            return _one_step_back(unit)
        return _exact_inside(unit, self.name == "snap1" and isinstance(unit, DenseUnit))


def _one_step_back(unit: RecurrentUnit) -> _Forward:
    """Every step learns with the state before it as a constant."""

    def forward(inputs, state, reset_mask=None, padding_mask=None):
        projections = unit.project(inputs)
        with torch.no_grad():
            states, final_state = unit.recur(projections, state, reset_mask, padding_mask)
        now = _single_steps(unit, projections, states_before(states, state, reset_mask), padding_mask)
        return unit.read_out(now, *projections), final_state

    return forward


def _exact_inside(unit: RecurrentUnit, diagonal: bool) -> _Forward:
    """The unit's own parameters learn from all steps, what lies before it from each step alone."""

    def forward(inputs, state, reset_mask=None, padding_mask=None):
        recur = diagonal_recurrence(unit) if diagonal else unit.recur
        projections = unit.project(inputs.detach())
        states, final_state = recur(projections, state, reset_mask, padding_mask)
        outputs = unit.read_out(states, *projections)
        with _frozen(unit):
            projections = unit.project(inputs)
            now = _single_steps(unit, projections, states_before(states, state, reset_mask), padding_mask)
            of_inputs = unit.read_out(now, *projections)
        return outputs + (of_inputs - of_inputs.detach()), final_state.detach()

    return forward


def _single_steps(unit, projections, before, padding_mask) -> torch.Tensor:
    """Each step's state from the given one before it, (B, T, S): the steps side by side as sequences of one."""
    if padding_mask is not None:
        padding_mask = padding_mask.flatten().unsqueeze(1)
    side_by_side = tuple(projection.flatten(0, 1).unsqueeze(1) for projection in projections)
    states, _ = unit.recur(side_by_side, before.flatten(0, 1), None, padding_mask)
    return states.view(before.shape)


@contextmanager
def _frozen(unit: RecurrentUnit) -> Iterator[None]:
    """What is computed inside is a function of the unit's inputs only."""
    learning = [parameter for parameter in unit.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
