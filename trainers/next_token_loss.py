"""Next-token loss of a language model on a block of streams."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.modeling.block.recurrent_state import supports_recurrent_state, upcast
from hf_recurrent.stock_models.stock_model import StockModelWithState


def next_token_loss(
    model: nn.Module,
    plain_model: nn.Module,
    inputs: dict[str, Any],
    num_targets: torch.Tensor | None,
    *,
    returns_state: bool,
) -> tuple[torch.Tensor, Any]:
    """Return the nats of a block / targets of the optimizer step, and the model's output.

    Args:
        model: the model, possibly wrapped for several processes.
        plain_model: the same model without the wrapper.
        inputs: `input_ids`, `shift_labels`, `reset_mask` (B, T); `state` if one is carried.
        num_targets: targets of the optimizer step over all micro-batches and processes; None for those of the block.
        returns_state: include the state after the block in the output.
    """
    if num_targets is None:
        num_targets = inputs["shift_labels"].ne(IGNORE_INDEX).sum().clamp(min=1)
    # Without a state, a stock model runs its own code, and its kernels.
    runs_stock_code = isinstance(plain_model, StockModelWithState) and not returns_state
    if supports_recurrent_state(plain_model) and not runs_stock_code:
        outputs = model(**inputs, use_cache=returns_state, num_items_in_batch=num_targets)
        return outputs.loss, outputs
    outputs = model(input_ids=inputs["input_ids"], use_cache=False)
    logits = upcast(outputs.logits.flatten(0, 1))
    return F.cross_entropy(logits, inputs["shift_labels"].flatten(), reduction="sum") / num_targets, outputs
