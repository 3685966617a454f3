"""Online learning: every block of a stream is read once, with gradients through the past beyond the block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_recurrent.learning_rules.rules import build_learning_rule
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, supports_recurrent_state
from hf_recurrent.trainers.methods.training_method import TrainingMethod
from hf_recurrent.trainers.methods.truncated_bptt import next_token_loss
from hf_recurrent.trainers.online_arguments import OnlineTrainingArguments
from hf_recurrent.trainers.sharding import Replication

_SENSITIVITIES = "sensitivities."


class OnlineRule(TrainingMethod):
    """A learning rule on strides of the block with the weights frozen; streams carry the state and its sensitivities.

    `args.method` names the rule: "rtrl", "snap1", "truncated" or "spatial".
    """

    args: OnlineTrainingArguments
    shards_by_layer = False  # a rule adds to the gradients of whole weights

    def setup(self, model, args, train_corpus):
        if not supports_recurrent_state(model):
            raise ValueError(f"`model` is a {type(model).__name__}, which carries no state; it must be recurrent.")
        self.name = args.method
        return super().setup(model, args, train_corpus)

    def start(self, sharding: Replication) -> None:
        super().start(sharding)
        with sharding.gathered():
            self.rule = build_learning_rule(self.args.method, self.model)

    def settings(self) -> dict[str, Any]:
        return {"stride": self.args.stride}

    def zero(self, batch_size: int, device: torch.device | str) -> RecurrentState:
        sensitivities = self.rule.init_carried(batch_size, device)
        named = {f"{_SENSITIVITIES}{name}": tensor for name, tensor in sensitivities.items()}
        return self.model.init_state(batch_size, device=device) | named

    def parts(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Strides of `args.stride` steps; entries without a time dimension are repeated."""
        names = [name for name in ("input_ids", "shift_labels", "reset_mask", "target_weights") if name in batch]
        for tensors in zip(*(batch[name].split(self.args.stride, 1) for name in names), strict=True):
            yield batch | dict(zip(names, tensors, strict=True))

    @contextmanager
    def learning(self, carried: RecurrentState) -> Iterator[None]:
        """Apply the rule, which advances the carried sensitivities in place."""
        with self.sharding.gathered(), self.rule.block(_split(carried)[1]):
            yield

    def loss(self, model: nn.Module, batch: dict, carried: RecurrentState) -> tuple[torch.Tensor, RecurrentState]:
        """Nats of the stride / targets of the optimizer step, and the carried tensors after it."""
        loss, outputs = next_token_loss(model, self.model, batch, _split(carried)[0])
        self.count_answers(outputs.logits, batch["shift_labels"])
        return loss, carried | outputs.state


def _split(carried: RecurrentState) -> tuple[RecurrentState, RecurrentState]:
    """State and sensitivities."""
    state, sensitivities = {}, {}
    for name, tensor in carried.items():
        part = sensitivities if name.startswith(_SENSITIVITIES) else state
        part[name.removeprefix(_SENSITIVITIES)] = tensor
    return state, sensitivities
