"""The loss of a language model.

Shape letters: B streams or batch, T steps, V vocabulary.
"""

import torch
from torch import Tensor, nn

from .recurrent_state import upcast
from .tensor_checks import check_tensor
from .training_kernels import training_kernels

IGNORE_INDEX = -100  # a label without a loss, as in torch and transformers


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    target_weights: Tensor | None = None,
) -> Tensor:
    """Cross-entropy in nats, computed in float32, or in float64 for float64 logits; targets of -100 are ignored.

    Targets are `labels` (B, T), shifted here, or `shift_labels`, the target of every step. `num_items_in_batch`
    divides the sum, by default the number of targets; `target_weights` (B, T) multiply the losses.

    Raises:
        TypeError: the targets are not a tensor.
        ValueError: the targets are not integers, or not (B, T).
    """
    name, targets = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
    check_tensor(name, targets)
    if targets.dim() != 2 or targets.is_floating_point():
        raise ValueError(f"`{name}` is {targets.dtype} of shape {tuple(targets.shape)}; it must be integers, (B, T).")
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if logits.shape[:2] != shift_labels.shape:
        raise ValueError(
            f"The targets have shape {tuple(shift_labels.shape)}, but there are logits for {tuple(logits.shape[:2])}."
        )
    targets = shift_labels.flatten().to(logits.device)
    logits, reduction = upcast(logits).flatten(0, 1), "none"
    if targets.dtype is torch.long and (kernels := training_kernels(logits)) is not None:
        loss = _FusedCrossEntropy.apply(kernels, logits, targets)
    else:
        if target_weights is None:
            reduction = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction=reduction)
    if target_weights is not None:
        loss = loss * target_weights.flatten().to(loss)
    if reduction == "none":
        loss = loss.sum()
    if num_items_in_batch is None and reduction != "mean":
        num_items_in_batch = (targets != IGNORE_INDEX).sum()
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class _FusedCrossEntropy(torch.autograd.Function):
    """The loss (rows,) of each row of logits (rows, V), zero where the target (rows,) is ignored."""

    @staticmethod
    def forward(ctx, kernels, logits, targets):
        nats, kept = kernels.cross_entropy(logits, targets, IGNORE_INDEX)
        ctx.kernels = kernels
        ctx.save_for_backward(logits, targets, kept)
        return nats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return None, ctx.kernels.cross_entropy_backward(*ctx.saved_tensors, grad), None
