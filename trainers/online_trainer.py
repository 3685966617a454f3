"""Online learning: every block of a stream is read once, with gradients through the past beyond the block."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_recurrent.learning_rules.rules import build_learning_rule
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, detach_state, supports_recurrent_state
from hf_recurrent.trainers.block_trainer import BlockTrainer
from hf_recurrent.trainers.carried_state import CarriedState
from hf_recurrent.trainers.next_token_loss import next_token_loss
from hf_recurrent.trainers.online_arguments import OnlineTrainingArguments

_SENSITIVITIES = "sensitivities."


class OnlineTrainer(BlockTrainer):
    """Training with a learning rule whose gradients may reach back beyond the block.

    An optimizer step reads `args.block_size` bytes of each stream, in strides of `args.stride` with the weights
    frozen. With `method="rtrl"` every recurrent unit learns from its whole past ([`SensitivityEngine`]): the
    derivative of the state with respect to every weight is carried and saved like the state, and is zero where an
    episode begins. In everything else the trainer works like [`MultiStreamTrainer`].

    Args:
        model: a recurrent language model. `rtrl` and `snap1` need this package's recurrent units, and `rtrl` units
            that do not mix channels.
        args: [`OnlineTrainingArguments`]; the trainer works on a copy.
        train_corpus, eval_corpus, processing_class, callbacks, optimizers: see [`BlockTrainer`].

    Raises:
        ValueError: see [`BlockTrainer`]; or the model carries no state, or does not support `args.method`.
    """

    args: OnlineTrainingArguments
    shards_by_layer = False  # a rule adds to the gradients of whole weights
    _final_state: RecurrentState | None = None  # of the last stride

    @property
    def method(self) -> str:
        """Name of the learning rule."""
        return self.args.method

    def _read_settings(self) -> dict[str, Any]:
        return super()._read_settings() | {"stride": self.args.stride}

    def carries_state(self, model: PreTrainedModel, args: OnlineTrainingArguments) -> bool:
        if not supports_recurrent_state(model):
            raise ValueError(f"`model` is a {type(model).__name__}, which carries no state; it must be recurrent.")
        return True

    def build_carried(self) -> CarriedState:
        with self.sharding.gathered():
            self._rule = build_learning_rule(self.args.method, self.model)
        return CarriedState(self._zero, self.args.device)

    def _zero(self, batch_size: int, device: torch.device | str) -> RecurrentState:
        sensitivities = self._rule.init_carried(batch_size, device)
        named = {f"{_SENSITIVITIES}{name}": tensor for name, tensor in sensitivities.items()}
        return self.model.init_state(batch_size, device=device) | named

    def learn_block(self, model, inputs, num_items_in_batch) -> torch.Tensor:
        """Run one micro-batch stride by stride, accumulating the gradients."""
        group = int(inputs["stream_indices"][0])
        carried = self.carried.get(group, len(inputs["stream_indices"]))
        state, sensitivities = {}, {}
        for name, tensor in carried.items():
            part = sensitivities if name.startswith(_SENSITIVITIES) else state
            part[name.removeprefix(_SENSITIVITIES)] = tensor
        losses = []
        for part in _strides(inputs, self.args.stride):
            with self.sharding.gathered(), self._rule.block(sensitivities):  # advances them in place
                losses.append(super().learn_block(model, part | {"state": state}, num_items_in_batch))
            state = self._final_state
        self._final_state = None
        self.carried.set(group, carried | state)
        return torch.stack(losses).sum()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Nats of a stride / targets of the optimizer step; keeps the final state, detached."""
        loss, outputs = next_token_loss(model, self.model, inputs, num_items_in_batch, returns_state=True)
        self._final_state = detach_state(outputs.state)
        if model.training:
            self.count_training(outputs.logits, inputs["shift_labels"])
        # DDP averages the gradients, but each loss is already divided by the targets of all processes.
        loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def _strides(inputs: dict[str, torch.Tensor], stride: int) -> Iterator[dict[str, torch.Tensor]]:
    """Split a batch into parts of `stride` steps; entries without a time dimension are repeated."""
    names = ("input_ids", "shift_labels", "reset_mask")
    for tensors in zip(*(inputs[name].split(stride, 1) for name in names), strict=True):
        yield {**inputs, **dict(zip(names, tensors, strict=True))}
