"""Comparison of a learning rule's gradient with full backpropagation through time."""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from hf_recurrent.argument_checks import check_integer
from hf_recurrent.learning_rules.optimizers import without_gradients
from hf_recurrent.learning_rules.rules import RULES, LearningRule, build_learning_rule
from hf_recurrent.modeling.block.recurrent_state import supports_recurrent_state
from hf_recurrent.modeling.contexts.counted_predictions import init_network_state

REFERENCE = "bptt"
_LARGEST_STRIDE = 2**31


class GradientAlignment(NamedTuple):
    """Comparison of one parameter's gradient with the true gradient.

    Args:
        parameter: name of the parameter.
        cosine: cosine of the angle between the gradients.
        norm_ratio: norm of the rule's gradient / norm of the true gradient.
        max_relative_difference: largest difference / largest magnitude of the true gradient.
    """

    parameter: str
    cosine: float
    norm_ratio: float
    max_relative_difference: float


def gradient_alignment(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    shift_labels: torch.LongTensor,
    reset_mask: torch.Tensor | None = None,
    *,
    rule: str = "rtrl",
    stride: int = 1,
) -> list[GradientAlignment]:
    """Compare a rule's gradient, summed over blocks with the weights frozen, with full backpropagation through time.

    The streams start from a zero state. In float32 an exact rule differs by rounding; use `model.double()` to test for
    exactness. The model and its `.grad`s are not changed.

    Args:
        model: a recurrent language model.
        input_ids: (B, length).
        shift_labels: (B, length), the next bytes; -100 is ignored.
        reset_mask: (B, length) bool, true where an episode starts.
        rule: `rtrl`, `snap1`, `truncated`, `spatial`, or `bptt`, the reference itself.
        stride: T, steps of a block; the last block may be shorter.

    Returns:
        one comparison for every trained parameter.

    Raises:
        ValueError: the rule is unknown or not supported by the model, the stride is below 1, or there is no target.
    """
    if rule not in (*RULES, REFERENCE):
        raise ValueError(f"`rule` is {rule!r}; it must be one of {', '.join((*RULES, REFERENCE))}.")
    check_integer("stride", stride, 1, _LARGEST_STRIDE)
    if not supports_recurrent_state(model):
        raise ValueError(f"`model` is a {type(model).__name__}, which carries no state; it must be recurrent.")
    if not bool(shift_labels.ne(-100).any()):
        raise ValueError("`shift_labels` holds no target: all are -100.")
    reset_mask = torch.zeros_like(input_ids, dtype=torch.bool) if reset_mask is None else reset_mask
    batch = (input_ids, shift_labels, reset_mask)
    expected = _gradients(model, LearningRule(model), batch, input_ids.shape[1])
    learned = expected if rule == REFERENCE else _gradients(model, build_learning_rule(rule, model), batch, stride)
    return [_compare(name, learned[name], gradient) for name, gradient in expected.items()]


def _gradients(model, rule, batch, stride) -> dict[str, torch.Tensor]:
    """Gradient of the mean loss over all targets, computed in blocks."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    input_ids = batch[0]
    state, carried = init_network_state(model, len(input_ids), input_ids.device), rule.init_carried(len(input_ids))
    targets = batch[1].ne(-100).sum()
    with without_gradients(parameters.values()):
        for ids, labels, resets in zip(*(tensor.split(stride, 1) for tensor in batch), strict=True):
            state = rule.learn(carried, state, ids, labels, resets, targets).state
        return {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in parameters.items()
        }


def _compare(name: str, actual: torch.Tensor, expected: torch.Tensor) -> GradientAlignment:
    actual, expected = actual.detach().double().flatten(), expected.detach().double().flatten()
    norms, smallest = (actual.norm(), expected.norm()), torch.finfo(torch.float64).tiny
    return GradientAlignment(
        name,
        (actual @ expected / (norms[0] * norms[1]).clamp(min=smallest)).item(),
        (norms[0] / norms[1].clamp(min=smallest)).item(),
        ((actual - expected).abs().max() / expected.abs().max().clamp(min=smallest)).item(),
    )
