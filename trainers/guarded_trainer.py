"""`GuardedTrainer`: training that stops or goes back when it diverges, saves on signals and owns its directory."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import TrainerCallback
from transformers.utils import logging

from hf_recurrent.checkpoints.files import checkpoint_number, list_checkpoints
from hf_recurrent.checkpoints.output_lock import output_lock
from hf_recurrent.checkpoints.sharded_tensors import whole
from hf_recurrent.interruption import StopRequest, stop_on_signals
from hf_recurrent.learning_rules.rules import NonFiniteLossError
from hf_recurrent.trainers.agreement import same_error
from hf_recurrent.trainers.divergence import check_finite_weights, divergence_error
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments
from hf_recurrent.trainers.recurrent_trainer import RecurrentTrainer
from hf_recurrent.trainers.sharding import EarlyStop

logger = logging.get_logger(__name__)

# Each return to a checkpoint multiplies the learning rate that follows it by this.
ROLLBACK_FACTOR = 0.5
_MOST_ROLLBACKS = 5  # in a row to one checkpoint


class TrainingInterrupted(KeyboardInterrupt):
    """Training was stopped by a signal, after saving `checkpoint`."""

    def __init__(self, stop: StopRequest, checkpoint: str):
        self.number, self.checkpoint = stop.number, checkpoint
        super().__init__(f"stopped by {stop.number.name}; saved {checkpoint}")


class _EvaluationStopped(Exception):
    """A signal arrived during an evaluation inside training."""


class GuardedTrainer(RecurrentTrainer):
    """A [`RecurrentTrainer`] that ends well.

    * A NaN or infinite loss, gradient or weight stops training before the weights change, or with `on_divergence`
      "rollback" continues from the last checkpoint with half the learning rate. Weights that are not finite are never
      saved.
    * Ctrl-C and SIGTERM end training after the current step, with a checkpoint (`save_on_signal`).
    * A run holds a lock of `output_dir`, and an error while saving leaves the checkpoints before it as they are.
    """

    args: MultiStreamTrainingArguments
    _stop: StopRequest | None = None
    _agreed_to_stop = False  # by all processes
    _rate_factor = 1.0  # of the learning rate after the checkpoint that is loaded next

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.add_callback(_StopCallback(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, trial=None, ignore_keys_for_eval=None):
        """Train, optionally from a checkpoint; see [`RecurrentTrainer.train`].

        Raises:
            ValueError: see [`RecurrentTrainer.train`]; or another process writes to `output_dir`.
            NonFiniteLossError: training diverged and cannot go back to a checkpoint.
            TrainingInterrupted: a signal arrived; a checkpoint was saved.
            OSError: a checkpoint cannot be written.
        """
        with ExitStack() as stack:
            with same_error():
                stack.enter_context(output_lock(self.args.output_dir) if self.args.should_save else nullcontext())
            stack.enter_context(self._signals())
            try:
                result = self._train_with_rollbacks(resume_from_checkpoint, trial, ignore_keys_for_eval)
            except _EvaluationStopped:
                self._save_checkpoint(self.model, trial)
            if self.stop_is_due:
                name = f"checkpoint-{self.state.global_step}"
                raise TrainingInterrupted(self._stop, os.path.join(self._get_output_dir(trial=trial), name))
        return result

    # ---- Signals ----

    @contextmanager
    def _signals(self) -> Iterator[None]:
        self._agreed_to_stop = False
        if not self.args.save_on_signal:
            yield
            return
        with stop_on_signals(repeatable=self.args.world_size > 1) as self._stop:
            try:
                yield
            finally:
                self._stop = None

    @property
    def stop_is_due(self) -> bool:
        """True if training has to end after this step; the same in all processes."""
        if self.args.world_size > 1:
            return self._agreed_to_stop
        return self._stop is not None and self._stop.is_set()

    def _sum_and_agree(self, count: int, device: torch.device) -> torch.Tensor:
        """Sum of a count over all processes, which at the same time agree whether to stop after this step."""
        requested = self._stop is not None and self._stop.is_set()
        total = self.accelerator.reduce(torch.tensor([count, requested], device=device), reduction="sum")
        if self.args.world_size > 1:
            self._agreed_to_stop = bool(total[1])
        return total[0]

    @contextmanager
    def _stoppable(self, model: nn.Module) -> Iterator[None]:
        """An evaluation that a signal ends early if it runs inside training; for all processes together."""

        def is_due() -> bool:
            return self._stop is not None and self._stop.is_set()

        def check(*_) -> None:
            if is_due():
                raise EarlyStop

        stopped, hook = False, nullcontext()
        if not self.sharding.is_sharded:  # otherwise processes agree before every pass
            hook = model.register_forward_pre_hook(check)
        try:
            with hook, self.sharding.joined(is_due):
                yield
        except EarlyStop:
            stopped = True
        if self._stop is not None and self._sum(int(stopped)):
            self._agreed_to_stop = True
            raise _EvaluationStopped

    # ---- Divergence ----

    def _train_with_rollbacks(self, checkpoint: str | bool | None, trial, ignore_keys_for_eval):
        rollbacks = 0
        while True:
            try:
                return super().train(checkpoint, trial, ignore_keys_for_eval)
            except NonFiniteLossError as error:
                last = self._last_good_checkpoint()
                rollbacks = rollbacks + 1 if last == checkpoint else 1
                self._check_rollback(error, last, rollbacks)
                checkpoint, self._rate_factor = last, ROLLBACK_FACTOR**rollbacks
                if self.is_world_process_zero():
                    logger.warning(
                        "%s Going back to %s with %g times its learning rate.", error, checkpoint, self._rate_factor
                    )

    def _last_good_checkpoint(self) -> str | None:
        """The last intact checkpoint in `output_dir` that is not after the current step."""
        for checkpoint in reversed(list_checkpoints(self.args.output_dir)):
            if checkpoint_number(checkpoint) <= self.state.global_step and self._find_damage(checkpoint) is None:
                return checkpoint
        return None

    def _check_rollback(self, error: NonFiniteLossError, last: str | None, rollbacks: int) -> None:
        """Raise the error again, with the way on, if there is no going back."""
        place = f"The last good checkpoint is {last!r}" if last else "There is no checkpoint before it"
        if self.args.on_divergence == "rollback" and last and rollbacks <= _MOST_ROLLBACKS:
            return
        if last and rollbacks > _MOST_ROLLBACKS:
            place += f", from which training diverged {rollbacks} times with ever smaller learning rates"
        hint = "a smaller `learning_rate` may help" + (" (or `on_divergence` 'rollback')" if rollbacks == 1 else "")
        raise NonFiniteLossError(f"{error} {place}; {hint}.") from error

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        factor, self._rate_factor = self._rate_factor, 1.0
        if factor != 1:
            scheduler = self._plain_scheduler
            scheduler.base_lrs = [factor * rate for rate in getattr(scheduler, "base_lrs", [])]
            for group in self.optimizer.param_groups:
                group |= {name: factor * group[name] for name in ("lr", "initial_lr") if name in group}

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        self._clipped_to = self.args.max_grad_norm
        return self._checked_norm(model, self._clipped_to)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        return super()._get_grad_norm(model, self._checked_norm(model) if grad_norm is None else grad_norm)

    def _checked_norm(self, model: nn.Module, limit: float | None = None) -> torch.Tensor:
        """Norm of the gradient, clipped to `limit` after it was found finite: clipping would spread a NaN."""
        self.accelerator.unscale_gradients()
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        norm = whole(get_total_norm([parameter.grad for parameter in parameters]))
        # A gradient scaler skips steps with infinite gradients by itself, as part of finding its scale.
        watched = self._tr_loss if self.accelerator.scaler is not None else self._tr_loss + norm
        diverged = not torch.isfinite(watched)
        if self.args.world_size > 1:
            diverged = self._sum(int(diverged)) > 0
        if diverged:
            raise divergence_error(model, self.state.global_step + 1, float(self._tr_loss), float(norm))
        if limit is not None:
            clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def _write_checkpoint(self, trial) -> None:
        self._check_saved_weights()
        super()._write_checkpoint(trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; a NonFiniteLossError if a weight is NaN or infinite."""
        if not _internal_call:
            self._check_saved_weights()
        super().save_model(output_dir, _internal_call)

    def _check_saved_weights(self) -> None:
        self.sync_trained_model()
        for model in self._saved_models().values():
            check_finite_weights(model, self.state.global_step)


class _StopCallback(TrainerCallback):
    """Saves and ends training at a request."""

    def __init__(self, trainer: GuardedTrainer):
        self._trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if self._trainer.stop_is_due:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
