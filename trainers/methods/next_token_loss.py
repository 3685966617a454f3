"""Next-token loss of a language model on a block of streams."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hf_recurrent.modeling.block.recurrent_state import RecurrentState, supports_recurrent_state, upcast
from hf_recurrent.stock_models.stock_model import StockModelWithState


def next_token_loss(
    model: nn.Module, plain_model: nn.Module, batch: dict[str, Any], state: RecurrentState | None
) -> tuple[torch.Tensor, Any]:
    """Return the nats of a block / targets of the optimizer step, and the model's output.

    Args:
        model: the model, possibly wrapped for several processes.
        plain_model: the same model without the wrapper.
        batch: `input_ids`, `shift_labels`, `reset_mask` (B, T); `num_targets`, the targets of the optimizer step over
            all micro-batches and processes; perhaps `target_weights` (B, T), for a model with a count memory.
        state: the state before the block; None if none is carried, and the output has none then.
    """
    carries = state is not None
    inputs = {name: batch[name] for name in ("input_ids", "shift_labels", "reset_mask")}
    # Without a state, a stock model runs its own code, and its kernels.
    runs_stock_code = isinstance(plain_model, StockModelWithState) and not carries
    if supports_recurrent_state(plain_model) and not runs_stock_code:
        given = inputs | ({"state": state} if carries else {})
        if "target_weights" in batch:
            given["target_weights"] = batch["target_weights"]
        outputs = model(**given, use_cache=carries, num_items_in_batch=batch["num_targets"])
        return outputs.loss, outputs
    outputs = model(input_ids=inputs["input_ids"], use_cache=False)
    logits = upcast(outputs.logits.flatten(0, 1))
    nats = F.cross_entropy(logits, inputs["shift_labels"].flatten(), reduction="sum")
    return nats / batch["num_targets"], outputs
