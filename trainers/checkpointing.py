"""`Checkpointing`: complete checkpoints of a trainer, and runs that continue from them bit for bit."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import rotate_checkpoints
from transformers.utils import logging

from hf_recurrent.checkpoints.files import (
    list_checkpoints,
    load_tree,
    new_staging_directory,
    publish_directory,
    publish_files,
    read_json,
    reading_checkpoint,
    save_tree,
    staging_path,
    writing_checkpoint,
)
from hf_recurrent.checkpoints.fingerprints import adapter_parameters, weights_fingerprint
from hf_recurrent.checkpoints.manifest import MANIFEST_FILE, check_manifest, read_manifest, write_manifest
from hf_recurrent.checkpoints.optimizer_state import load_optimizer, save_optimizer
from hf_recurrent.checkpoints.provenance_files import write_provenance
from hf_recurrent.checkpoints.resumed_arguments import (
    HYPERPARAMETERS,
    SCHEDULE,
    changed_arguments,
    check_changes,
    check_length,
    describe_changes,
    load_trainer_state,
    new_run_hint,
    save_trainer_state,
)
from hf_recurrent.checkpoints.weights import load_weights, save_weights
from hf_recurrent.kernels.thread_count import num_threads
from hf_recurrent.trainers.agreement import check_same, gathered, same_error, total
from hf_recurrent.trainers.hub import push_checkpoint

if TYPE_CHECKING:
    from hf_recurrent.trainers.stream_trainer import StreamTrainer

logger = logging.get_logger(__name__)

# Fields of a configuration that do not change the function that the weights compute.
_NOT_OF_THE_FUNCTION = {
    "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
# Of a trainer's state: what the present run says, not the checkpoint.
_OF_THE_RUN = (
    "max_steps", "num_train_epochs", "trial_name", "trial_params", "is_local_process_zero", "is_world_process_zero",
)  # fmt: skip

_COUNTS = "count_learning"  # files of what the streams of a count memory carry


class Checkpointing:
    """Writes and restores the checkpoints of a trainer.

    A checkpoint is written to a temporary directory, then renamed. Tensors are stored as safetensors and everything
    else as JSON, so loading one executes nothing. A run is restored in three steps: [`begin`] checks the checkpoint
    and loads weights and streams, [`restore_optimizer`] follows once there is an optimizer, and [`restore_process`]
    right before the next step.
    """

    def __init__(self, trainer: "StreamTrainer"):
        self.trainer = trainer
        self.begin_new()

    def begin_new(self) -> None:
        """The run starts from no checkpoint."""
        self.checkpoint: str | None = None
        self.step = 0  # of the checkpoint
        # Arguments with another value than in the checkpoint: name → (value there, value now).
        self.changes: dict[str, tuple[Any, Any]] = {}
        self._rate_factor, self._has_new_schedule = 1.0, False

    # ---- Writing ----

    def write(self, trial: Any) -> None:
        """Write a checkpoint of the current step, and delete the oldest; called by all processes."""
        trainer = self.trainer
        trainer.guard.check_weights()
        trainer.store_flos()
        trainer.set_epoch()
        run_dir = trainer._get_output_dir(trial=trial)
        final = os.path.join(run_dir, f"checkpoint-{trainer.state.global_step}")
        self._name_best_checkpoint(run_dir, final)
        with writing_checkpoint(final):
            self._write_files(final)
        if trainer.args.push_to_hub:
            push_checkpoint(trainer, final)
        if trainer.args.should_save:
            rotate_checkpoints(
                output_dir=run_dir,
                save_total_limit=trainer.args.save_total_limit,
                best_model_checkpoint=trainer.state.best_model_checkpoint,
            )

    def _write_files(self, final: str) -> None:
        trainer, args, wait = self.trainer, self.trainer.args, self.trainer.accelerator.wait_for_everyone
        staging = os.fspath(staging_path(final))
        if args.should_save:
            new_staging_directory(final)
        wait()
        trainer.save_model(staging, _internal_call=True)
        if not args.save_only_model:
            save_optimizer(
                trainer.optimizer,
                trainer.lr_scheduler,
                trainer.accelerator.scaler,
                staging,
                takes_part=trainer.takes_part_in_saving,
                writes=args.should_save,
            )
            save_tree(self._process_state(), staging, f"process_rank{args.process_index}")
            trainer.progress.save(staging, trainer.state.global_step)
            if trainer.count_learning.memory is not None and args.should_save:
                save_tree(trainer.count_learning.state_dict(), staging, _COUNTS)
        if args.should_save:
            self._update_callback_states()
            save_trainer_state(trainer.state, args, staging)
        wait()
        if args.should_save:
            write_manifest(staging, num_processes=args.world_size, num_threads=num_threads())
            publish_directory(staging, final)
        wait()

    def save_models(self, output_dir: str) -> None:
        """Save models, tokenizer and provenance through a temporary directory; called by all processes."""
        trainer, writes = self.trainer, self.trainer.args.should_save
        if not trainer.takes_part_in_saving:
            return
        trainer.sync_trained_model()
        provenance = trainer.record()
        for folder, model in trainer.method.saved_models.items():
            final = os.path.join(output_dir, "model")
            staging = new_staging_directory(final) if writes else staging_path(final)
            own = replace(provenance, weights=weights_fingerprint(model), sample=None) if folder else provenance
            save_weights(model, staging, writes=writes, adapter=adapter_parameters(model))
            if not writes:
                continue
            write_provenance(own, staging)
            if trainer.processing_class is not None:
                trainer.processing_class.save_pretrained(staging)
            publish_files(staging, os.path.join(output_dir, folder))

    def _process_state(self) -> dict[str, Any]:
        """Random states of this process, and losses and counters since the last log."""
        trainer = self.trainer
        return _random_states(trainer.args.device) | {
            "unlogged_loss": trainer._tr_loss,
            "last_logged_step": trainer._globalstep_last_logged,
            "counts": {"state_resets": trainer.progress.resets} | trainer.method.counters(),
        }

    def _update_callback_states(self) -> None:
        states = self.trainer.state.stateful_callbacks
        for callback in [*self.trainer.callback_handler.callbacks, self.trainer.control]:
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                if isinstance(states.get(name), list):
                    states[name].append(callback.state())
                else:
                    states[name] = callback.state()

    def _name_best_checkpoint(self, run_dir: str, final: str | None = None) -> None:
        """Let the trainer's state name the best checkpoint, which is `final` or exists already."""
        state = self.trainer.state
        best = os.path.join(run_dir, f"checkpoint-{state.best_global_step}")
        if state.best_global_step and (best == final or os.path.isdir(best)):
            state.best_model_checkpoint = best

    # ---- Resuming ----

    def find(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """The checkpoint that an argument of `train` names, compared with its manifest.

        Raises:
            ValueError: it is missing, incomplete or damaged.
        """
        if resume_from_checkpoint is None or resume_from_checkpoint is False:
            return None
        output_dir = self.trainer.args.output_dir
        with same_error():
            if resume_from_checkpoint is True:
                checkpoints = list_checkpoints(output_dir)
                if not checkpoints:
                    raise ValueError(f"There is no checkpoint in `output_dir` {output_dir!r}.")
                checkpoint = checkpoints[-1]
            else:
                checkpoint = os.fspath(resume_from_checkpoint)
            if not os.path.isfile(os.path.join(checkpoint, MANIFEST_FILE)):
                raise ValueError(
                    f"`resume_from_checkpoint` {checkpoint!r} is not a complete checkpoint: no {MANIFEST_FILE}."
                )
        check_same({"resume_from_checkpoint": checkpoint})
        if damage := self.find_damage(checkpoint):
            others = [
                path for path in list_checkpoints(Path(checkpoint).parent) if not os.path.samefile(path, checkpoint)
            ]
            hint = f" Another checkpoint to resume from is {others[-1]!r}." if others else ""
            raise ValueError(f"`resume_from_checkpoint` {checkpoint!r} cannot be used. {damage}{hint}")
        return checkpoint

    def find_damage(self, checkpoint: str) -> str | None:
        """The damage of a checkpoint in words; each process reads a part of the files, and all get the same answer."""
        damage, args = None, self.trainer.args
        try:
            check_manifest(checkpoint, args.process_index, args.world_size)
        except ValueError as error:
            damage = str(error)
        return next(filter(None, gathered(damage)), None)

    def begin(self, checkpoint: str, rate_factor: float = 1.0) -> None:
        """Check that the run can continue a checkpoint of [`find`], and load weights and streams.

        Raises:
            ValueError: the checkpoint is damaged, or is of other data, another model or other arguments.
        """
        trainer = self.trainer
        with same_error():
            step = load_trainer_state(checkpoint).global_step
            with reading_checkpoint(checkpoint):
                trainer.progress.load(checkpoint)
                self._check_arguments(checkpoint, step)
        self.checkpoint, self.step, self._rate_factor = checkpoint, step, rate_factor
        if self._is_adapter:
            trainer._load_from_checkpoint(checkpoint)
            return
        for folder, model in trainer.method.saved_models.items():
            load_weights(model, os.path.join(checkpoint, folder))

    @property
    def _is_adapter(self) -> bool:
        return os.path.isfile(os.path.join(self.checkpoint, "adapter_model.safetensors"))

    def _check_arguments(self, checkpoint: str, step: int) -> None:
        """Refuse changed arguments that cannot act, and name those without effect."""
        args, steps = self.trainer.args, self.trainer.num_training_steps
        self.changes = changed_arguments(checkpoint, args)
        check_changes(checkpoint, self.changes)
        self._has_new_schedule = check_length(checkpoint, args, steps) or not SCHEDULE.isdisjoint(self.changes)
        if self.changes and self.trainer.is_world_process_zero():
            logger.warning(describe_changes(self.changes, is_finished=step >= steps))

    def restore_optimizer(self) -> None:
        """Restore trainer state, optimizer and schedule, which the trainer has just created."""
        if self.checkpoint is None:
            return
        trainer, now = self.trainer, self.trainer.state
        for folder, model in () if self._is_adapter else trainer.method.saved_models.items():
            # Only now: `Trainer.train` gives the model the special tokens of its tokenizer.
            _check_configuration(model, os.path.join(self.checkpoint, folder, "config.json"), self.checkpoint)
        trainer.state = load_trainer_state(self.checkpoint)
        with reading_checkpoint(self.checkpoint):
            trainer._load_callback_state()
        for name in _OF_THE_RUN:
            setattr(trainer.state, name, getattr(now, name))
        # The present arguments set the intervals.
        trainer.state.compute_steps(trainer.args, now.max_steps)
        self._name_best_checkpoint(os.path.dirname(os.path.abspath(self.checkpoint)))

        optimizer, schedule = trainer.optimizer, getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
        given = [dict(group) for group in optimizer.param_groups]
        rates = list(getattr(schedule, "base_lrs", ()))
        load_optimizer(optimizer, trainer.lr_scheduler, trainer.accelerator.scaler, self.checkpoint)
        for group, own in zip(optimizer.param_groups, given, strict=True):
            for name, arguments in HYPERPARAMETERS.items():
                if name in own and self.changes.keys() & arguments.split():
                    group[name] = own[name]
        if self._has_new_schedule:
            self._apply_schedule(schedule, rates)
        if self._rate_factor != 1:
            schedule.base_lrs = [self._rate_factor * rate for rate in getattr(schedule, "base_lrs", [])]
            for group in optimizer.param_groups:
                group |= {name: self._rate_factor * group[name] for name in ("lr", "initial_lr") if name in group}

    def _apply_schedule(self, schedule: Any, rates: list[float]) -> None:
        """Continue with the current schedule of base rates `rates` at the step of the checkpoint."""
        if not isinstance(schedule, LambdaLR):
            raise ValueError(
                f"`lr_scheduler_type` is {self.trainer.args.lr_scheduler_type.value!r}, whose rates follow from its "
                "past; a resumed run cannot change its schedule or its number of steps."
            )
        factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
        last = [rate * factor for rate, factor in zip(rates, factors, strict=True)]
        schedule.load_state_dict(schedule.state_dict() | {"base_lrs": rates, "_last_lr": last})
        for group, base, rate in zip(self.trainer.optimizer.param_groups, rates, last, strict=True):
            group |= {"initial_lr": base, "lr": rate}

    def restore_process(self) -> None:
        """Restore the random states of this process, and its losses and counters since the last log."""
        if self.checkpoint is None:
            return
        trainer, args = self.trainer, self.trainer.args
        with reading_checkpoint(self.checkpoint) as checkpoint:
            stored_processes = read_manifest(checkpoint)["num_processes"]
            trees = [load_tree(checkpoint, f"process_rank{rank}") for rank in range(stored_processes)]
            tree = trees[min(args.process_index, stored_processes - 1)]
            _set_random_states(tree, args.device)
            # Logs average the losses over the processes, and sum the counters.
            same = stored_processes == args.world_size
            losses = tree["unlogged_loss"] if same else torch.stack([part["unlogged_loss"] for part in trees]).mean(0)
            trainer._tr_loss = losses.to(args.device)
            counts = [tree["counts"]] if same else [part["counts"] for part in trees]
            counters = _sum_of_trees(counts, times=int(same or args.process_index == 0))
            trainer.progress.resets = counters["state_resets"]
            trainer.method.load_counters(counters)
            if trainer.count_learning.memory is not None:
                trainer.count_learning.load_state_dict(load_tree(checkpoint, _COUNTS))
            trainer._globalstep_last_logged = tree["last_logged_step"]
            # `train_loss` is the mean over the steps of this call, without the restored losses.
            trainer._total_loss_scalar = -total(float(trainer._tr_loss), args.device) / args.world_size


def _check_configuration(model: Any, path: str, checkpoint: str) -> None:
    """Refuse a model with another configuration, which the weights do not show."""
    before, now = read_json(path), json.loads(model.config.to_json_string(use_diff=False))
    for name in sorted((before.keys() & now.keys()) - _NOT_OF_THE_FUNCTION):
        if before[name] != now[name]:
            raise ValueError(
                f"`{name}` of the model is {now[name]!r}, but {before[name]!r} in the checkpoint {checkpoint!r}; a "
                f"resumed run cannot change it. {new_run_hint(checkpoint)}"
            )


def _random_states(device: torch.device) -> dict[str, Any]:
    """States of the random generators of this process, for [`save_tree`]."""
    kind, key, *numpy_state = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, key.tolist(), *numpy_state],
        "torch": torch.random.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if device.type == "cuda" else None,
    }


def _set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore [`_random_states`]."""
    random.setstate(states["python"])
    kind, key, *numpy_state = states["numpy"]
    np.random.set_state((kind, np.array(key, dtype=np.uint32), *numpy_state))
    torch.random.set_rng_state(states["torch"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"])


def _sum_of_trees(trees: list[Any], times: int) -> Any:
    """`times` × the sum of numbers, tensors or dictionaries of them; None if all are None."""
    trees = [tree for tree in trees if tree is not None]
    if not trees:
        return None
    if isinstance(trees[0], dict):
        names = dict.fromkeys(name for tree in trees for name in tree)
        return {name: _sum_of_trees([tree.get(name) for tree in trees], times) for name in names}
    return sum(trees[1:], trees[0]) * times
