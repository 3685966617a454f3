"""Learning while reading: every block of a stream is read once and learned from, with credit for what came before."""

import os
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from hf_recurrent.data.episode_source import EpisodeSource
from hf_recurrent.learning_rules.rules import NonFiniteLossError, build_learning_rule
from hf_recurrent.modeling.recurrent_state import RecurrentState, detach_state, supports_recurrent_state
from hf_recurrent.trainers.block_trainer import BlockTrainer
from hf_recurrent.trainers.carried_state import CarriedState
from hf_recurrent.trainers.next_token_loss import next_token_loss
from hf_recurrent.trainers.online_arguments import OnlineTrainingArguments

_SENSITIVITIES = "sensitivities."


class OnlineTrainer(BlockTrainer):
    """Training with gradients that may reach back further than the block that they are taken from.

    An optimizer step reads `args.block_size` bytes of each stream, in strides of `args.stride` with the weights
    frozen. With `method="rtrl"` every recurrent unit learns from all of its past ([`SensitivityEngine`]): the
    derivative of the state with respect to every weight is carried like the state itself. It is zero where an episode
    begins and part of every checkpoint. Streams, states, evaluation, logs and the exactness of a resumed run are those
    of [`MultiStreamTrainer`].

    A NaN or infinite loss ends training before anything is learned from it, with a checkpoint of everything before.

    Args:
        model: a recurrent language model; for `rtrl` and `snap1`, with our recurrent units; `rtrl` takes
            none whose channels mix.
        args: [`OnlineTrainingArguments`]; the trainer works on a copy.
        train_corpus, eval_corpus, processing_class, callbacks, optimizers: see [`MultiStreamTrainer`].

    Raises:
        ValueError: the model carries no state, or its units cannot learn by `args.method`; and the errors of
            [`MultiStreamTrainer`].
    """

    args: OnlineTrainingArguments

    def __init__(
        self,
        model: PreTrainedModel,
        args: OnlineTrainingArguments,
        train_corpus: EpisodeSource | None = None,
        eval_corpus: EpisodeSource | dict[str, EpisodeSource] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
    ):
        if not supports_recurrent_state(model):
            raise ValueError(
                f"`model` is a {type(model).__name__}, which carries no state; learning while reading needs one."
            )
        if train_corpus is not None:
            train_corpus.check_training(args, carries_state=True)
        super().__init__(model, args, train_corpus, eval_corpus, processing_class, callbacks, optimizers)
        self._rule = build_learning_rule(args.method, model)
        self.carried = CarriedState(self._zero, self.args.device)
        self._final_state: RecurrentState | None = None

    def _zero(self, batch_size: int, device: torch.device | str) -> RecurrentState:
        sensitivities = self._rule.init_carried(batch_size, device)
        named = {f"{_SENSITIVITIES}{name}": tensor for name, tensor in sensitivities.items()}
        return self.model.init_state(batch_size, device=device) | named

    def learn_block(self, model, inputs, num_items_in_batch) -> torch.Tensor:
        """One micro-batch, a stride at a time; gradients add up."""
        group = int(inputs["stream_indices"][0])
        carried = self.carried.get(group, len(inputs["stream_indices"]))
        # The rule advances these in place.
        sensitivities = {
            name.removeprefix(_SENSITIVITIES): carried[name] for name in carried if name.startswith(_SENSITIVITIES)
        }
        state = {name: tensor for name, tensor in carried.items() if not name.startswith(_SENSITIVITIES)}
        losses = []
        for part in _strides(inputs, self.args.stride):
            with self._rule.block(sensitivities):
                losses.append(super().learn_block(model, part | {"state": state}, num_items_in_batch))
            state = self._final_state
        self._final_state = None
        self.carried.set(group, carried | state)
        return torch.stack(losses).sum()

    def model_inputs(self, inputs):
        return super().model_inputs(inputs) | {"state": inputs["state"]}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Nats of a stride / targets of the whole step; keeps the final state, detached.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite.
        """
        loss, outputs = next_token_loss(model, self.model, inputs, num_items_in_batch, returns_state=True)
        self._final_state = detach_state(outputs.state)
        if model.training:
            self.count_training(outputs.logits, inputs["shift_labels"])
            if not torch.isfinite(loss):
                raise NonFiniteLossError(
                    f"The loss is {loss.item()} in the step after step {self.state.global_step}: nothing was learned "
                    f"from this block. {self._save_what_was_learned()} A smaller `learning_rate` may help."
                )
        # Processes average their gradients, but each has already divided by the targets of all.
        loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def _save_what_was_learned(self) -> str:
        """Save a checkpoint unless there is one of this step, and say where; one process cannot save for all."""
        step = self.state.global_step
        checkpoint = os.path.join(self.args.output_dir, f"checkpoint-{step}")
        if step == 0:
            return "The weights are those that training began with."
        if not os.path.isdir(checkpoint):
            if self.args.world_size > 1 or self.args.save_strategy == "no":
                return f"The last checkpoint in {self.args.output_dir!r} holds the weights before it."
            self._save_checkpoint(self.model, None)
        return f"The weights before it are in {checkpoint!r}."


def _strides(inputs: dict[str, torch.Tensor], stride: int) -> Iterator[dict[str, torch.Tensor]]:
    """The batch in parts of `stride` steps; tensors without steps are the same in all parts."""
    names = ("input_ids", "shift_labels", "reset_mask")
    for tensors in zip(*(inputs[name].split(stride, 1) for name in names), strict=True):
        yield {**inputs, **dict(zip(names, tensors, strict=True))}
