"""Learning while reading: every block of a stream is read once and learned from, with credit for what came before."""

import os

import torch
from transformers import PreTrainedModel

from hf_recurrent.bits_per_byte import supports_recurrent_state
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.modeling.recurrent_state import RecurrentState
from hf_recurrent.tasks.task import Task
from hf_recurrent.trainers.learning_rules import NonFiniteLossError, build_learning_rule
from hf_recurrent.trainers.multi_stream_trainer import MultiStreamTrainer
from hf_recurrent.trainers.online_arguments import OnlineTrainingArguments

_SENSITIVITIES = "sensitivities."


class OnlineTrainer(MultiStreamTrainer):
    """A [`MultiStreamTrainer`] whose gradients may reach back further than the block that they are taken from.

    An optimizer step reads `args.block_size` bytes of each stream, in strides of `args.stride` with the weights
    frozen. With `method="rtrl"` every recurrent unit learns from all of its past ([`SensitivityEngine`]); what a
    stream's state owes to the weights is carried like the state itself: zero where an episode begins, part of every
    checkpoint, and found again by whichever process reads the stream. Streams, states, evaluation, logs and the
    exactness of a resumed run are those of [`MultiStreamTrainer`].

    A loss that is not finite ends training before anything is learned from it, with a checkpoint of what was learned
    until then.

    Args:
        model: a recurrent language model; for `rtrl` and `snap1`, with our recurrent units; `rtrl` takes
            none whose channels mix.
        args: [`OnlineTrainingArguments`].
        train_corpus: episodes to read, or a task.
        others: those of [`MultiStreamTrainer`].

    Raises:
        ValueError: the model carries no state, or its units cannot learn by `args.method`; and whatever
            [`MultiStreamTrainer`] refuses.
    """

    args: OnlineTrainingArguments

    def __init__(
        self,
        model: PreTrainedModel,
        args: OnlineTrainingArguments,
        train_corpus: Corpus | Task | None = None,
        *others,
        **named_others,
    ):
        if not supports_recurrent_state(model):
            raise ValueError(
                f"`model` is a {type(model).__name__}, which carries no state; learning while reading needs one."
            )
        super().__init__(model, args, train_corpus, *others, **named_others)
        self._rule = build_learning_rule(args.method, model)
        self._sensitivities: dict[int, RecurrentState] = {}

    def train(self, resume_from_checkpoint: str | bool | None = None, trial=None, ignore_keys_for_eval=None):
        """Train, from a checkpoint where one is given; see [`MultiStreamTrainer.train`]."""
        self._sensitivities = {}
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """One micro-batch, a stride at a time; gradients add up."""
        group, streams = int(inputs["stream_indices"][0]), len(inputs["stream_indices"])
        if group not in self._sensitivities:
            self._sensitivities[group] = self._rule.init_carried(streams, self.args.device)
        losses = []
        for part in _strides(inputs, self.args.stride):
            with self._rule.block(self._sensitivities[group]):
                losses.append(super().training_step(model, part, num_items_in_batch))
        return torch.stack(losses).sum()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """That of [`MultiStreamTrainer`]; NonFiniteLossError if it is not finite."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training and not torch.isfinite(loss):
            raise NonFiniteLossError(
                f"The loss is {loss.item()} in the step after step {self.state.global_step}: nothing was learned from "
                f"this block. {self._save_what_was_learned()} A smaller `learning_rate` may help."
            )
        return (loss, outputs) if return_outputs else loss

    def _save_what_was_learned(self) -> str:
        """Save a checkpoint unless there is one of this step, and say where; one process cannot save for all."""
        step = self.state.global_step
        checkpoint = os.path.join(self.args.output_dir, f"checkpoint-{step}")
        if step == 0:
            return "The weights are those that training began with."
        if not os.path.isdir(checkpoint):
            if self.args.world_size > 1 or self.args.save_strategy == "no":
                return f"The last checkpoint in {self.args.output_dir!r} holds what was learned until then."
            self._save_checkpoint(self.model, None)
        return f"What was learned before it is in {checkpoint!r}."

    # ---- What streams carry ----

    def _init_carried(self, batch_size: int, device: torch.device | str) -> RecurrentState:
        return super()._init_carried(batch_size, device) | _named(self._rule.init_carried(batch_size, device))

    def _carried(self, group: int) -> RecurrentState:
        return super()._carried(group) | _named(self._sensitivities[group])

    def _carry(self, group: int, carried: RecurrentState) -> None:
        own = {name: tensor for name, tensor in carried.items() if name.startswith(_SENSITIVITIES)}
        self._sensitivities[group] = {name.removeprefix(_SENSITIVITIES): tensor for name, tensor in own.items()}
        super()._carry(group, {name: tensor for name, tensor in carried.items() if name not in own})


def _named(sensitivities: RecurrentState) -> RecurrentState:
    return {f"{_SENSITIVITIES}{name}": tensor for name, tensor in sensitivities.items()}


def _strides(inputs: dict[str, torch.Tensor], stride: int):
    """The batch in parts of `stride` steps; what is not by step is the same in all."""
    names = ("input_ids", "shift_labels", "reset_mask")
    for tensors in zip(*(inputs[name].split(stride, 1) for name in names), strict=True):
        yield {**inputs, **dict(zip(names, tensors, strict=True))}
