"""`DivergenceGuard`: NaN and infinite losses, gradients and weights stop training, or send it back to a checkpoint."""

from collections.abc import Callable, Iterable
from math import isfinite
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers.utils import logging

from hf_recurrent.checkpoints.files import checkpoint_number, list_checkpoints
from hf_recurrent.checkpoints.tensor_files import is_finite, whole
from hf_recurrent.learning_rules.rules import NonFiniteLossError
from hf_recurrent.trainers.agreement import total

if TYPE_CHECKING:
    from hf_recurrent.trainers.stream_trainer import StreamTrainer

logger = logging.get_logger(__name__)

# Each return to a checkpoint multiplies the learning rate that follows it by this.
ROLLBACK_FACTOR = 0.5
_MOST_ROLLBACKS = 5  # in a row to one checkpoint
Result = TypeVar("Result")


class DivergenceGuard:
    """Watches the gradients of a trainer before they are clipped, and its weights before they are saved.

    With `on_divergence` "stop", training ends before the weights change; with "rollback" it continues from the last
    checkpoint with half the learning rate.
    """

    def __init__(self, trainer: "StreamTrainer"):
        self.trainer = trainer
        self.clipped_to: float | None = None  # norm of the gradient in the last step

    def run(self, train: Callable[[str | bool | None, float], Result], checkpoint: str | bool | None) -> Result:
        """Call `train` with a checkpoint and a factor of its learning rates, again after each return to a checkpoint.

        Raises:
            NonFiniteLossError: training diverged and cannot go back to a checkpoint.
        """
        rollbacks, factor = 0, 1.0
        while True:
            try:
                return train(checkpoint, factor)
            except NonFiniteLossError as error:
                last = self._last_good_checkpoint()
                rollbacks = rollbacks + 1 if last == checkpoint else 1
                self._check_rollback(error, last, rollbacks)
                checkpoint, factor = last, ROLLBACK_FACTOR**rollbacks
                if self.trainer.is_world_process_zero():
                    logger.warning("%s Going back to %s with %g times its learning rate.", error, checkpoint, factor)

    def _last_good_checkpoint(self) -> str | None:
        """The last intact checkpoint in `output_dir` that is not after the current step."""
        trainer = self.trainer
        for checkpoint in reversed(list_checkpoints(trainer.args.output_dir)):
            is_after = checkpoint_number(checkpoint) > trainer.state.global_step
            if not is_after and trainer.checkpointing.find_damage(checkpoint) is None:
                return checkpoint
        return None

    def _check_rollback(self, error: NonFiniteLossError, last: str | None, rollbacks: int) -> None:
        """Raise the error again, with instructions, if no checkpoint can be restored."""
        place = f"The last good checkpoint is {last!r}" if last else "There is no checkpoint before it"
        if self.trainer.args.on_divergence == "rollback" and last and rollbacks <= _MOST_ROLLBACKS:
            return
        if last and rollbacks > _MOST_ROLLBACKS:
            place += f", from which training diverged {rollbacks} times with ever smaller learning rates"
        hint = "a smaller `learning_rate` may help" + (" (or `on_divergence` 'rollback')" if rollbacks == 1 else "")
        raise NonFiniteLossError(f"{error} {place}; {hint}.") from error

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Replaces `clip_grad_norm_` of the accelerator; checks the gradient first, because clipping spreads a NaN.

        Tables are checked, but are not part of the norm: the steps of row-wise Adagrad do not depend on it.

        Raises:
            NonFiniteLossError: the loss or the norm of the gradient is NaN or infinite, in any process.
        """
        trainer = self.trainer
        trainer.accelerator.unscale_gradients()
        tables = [table for table in trainer.tables if table.grad is not None]
        parameters = [part for part in parameters if part.grad is not None and part not in trainer.tables]
        norm = whole(get_total_norm([parameter.grad for parameter in parameters], norm_type))
        loss = trainer._tr_loss
        # A gradient scaler skips steps with infinite gradients by itself, as part of finding its scale.
        diverged = not torch.isfinite(loss if trainer.accelerator.scaler is not None else loss + norm)
        if trainer.accelerator.scaler is None:
            diverged |= not all(is_finite(table.grad) for table in tables)
        if trainer.args.world_size > 1:
            diverged = total(int(diverged), trainer.args.device) > 0
        if diverged:
            raise _error(trainer.model, trainer.state.global_step + 1, float(loss), float(norm))
        self.clipped_to = max_norm if isfinite(max_norm) else None
        if self.clipped_to is not None:
            clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def check_weights(self) -> None:
        """Raise a NonFiniteLossError that names the first weight, of those that are saved, that is not finite."""
        self.trainer.sync_trained_model()
        step = self.trainer.state.global_step
        for model in self.trainer.method.saved_models.values():
            for name, weight in model.named_parameters():
                if not is_finite(weight):
                    raise NonFiniteLossError(
                        f"Training diverged at step {step}: the weight `{name}` is NaN or infinite."
                    )


def _error(model: nn.Module, step: int, loss: float, norm: float) -> NonFiniteLossError:
    """The error for a step whose loss or norm of the gradient is not finite."""
    gradients = ((name, weight.grad) for name, weight in model.named_parameters() if weight.grad is not None)
    first = next((name for name, gradient in gradients if not is_finite(gradient)), None)
    causes = [f"the loss is {loss}"] if not isfinite(loss) else []
    if first is not None:
        causes.append(f"the gradient of `{first}` is NaN or infinite")
    elif not isfinite(norm):
        causes.append(f"the norm of the gradient is {norm}")
    return NonFiniteLossError(f"Training diverged in step {step}: {' and '.join(causes)}. The step was not applied.")
