"""`RecurrentTrainer`: complete checkpoints that execute nothing when loaded, and exact resuming."""

import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import rotate_checkpoints
from transformers.utils import logging

from hf_recurrent.checkpoints.files import (
    checkpoint_number,
    list_checkpoints,
    load_tree,
    new_staging_directory,
    publish_directory,
    publish_files,
    read_json,
    reading_checkpoint,
    remove_staging,
    save_tree,
    staging_path,
    write_json,
    writing_checkpoint,
)
from hf_recurrent.checkpoints.fingerprints import adapter_parameters, weights_fingerprint
from hf_recurrent.checkpoints.manifest import MANIFEST_FILE, check_manifest, read_manifest, write_manifest
from hf_recurrent.checkpoints.provenance_files import write_provenance
from hf_recurrent.checkpoints.weights import load_weights, save_weights
from hf_recurrent.learning_rules.optimizer_state import load_optimizer_state, optimizer_state, own_part_of_state
from hf_recurrent.trainers.agreement import check_same, same_error
from hf_recurrent.trainers.hub_trainer import HubTrainer
from hf_recurrent.trainers.resumed_arguments import (
    HYPERPARAMETERS,
    changed_arguments,
    check_changes,
    check_length,
    describe_changes,
    new_run_hint,
    touches_schedule,
)
from hf_recurrent.trainers.trainer_state import check_trainer_state, shareable_arguments
from hf_recurrent.trainers.training_callbacks import Throughput

logger = logging.get_logger(__name__)

# Fields of a configuration that do not change the function that the weights compute.
_NOT_OF_THE_FUNCTION = {
    "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


class RecurrentTrainer(HubTrainer):
    """A `Trainer` with complete checkpoints: a resumed run equals the uninterrupted run bit for bit.

    Checkpoints are written to a temporary directory, then renamed. Tensors are stored as safetensors and everything
    else as JSON, so loading a checkpoint executes nothing.

    Subclasses make one endless pass over their data, which ends after `num_training_steps`. They save and restore the
    state of the data in `_save_run` and `_load_run`, and counters of each process in `_process_state` and
    `_load_process_state`.
    """

    _operations_per_token: int | None = None
    # Arguments with another value than in the resumed checkpoint: name → (value there, value now).
    resumed_changes: dict[str, tuple[Any, Any]] = {}  # noqa: RUF012 (replaced, never changed)
    _has_new_schedule = False

    @cached_property
    def _throughput(self) -> Throughput:
        return Throughput()

    @property
    def num_training_steps(self) -> int:
        """Number of optimizer steps of the whole run."""
        raise NotImplementedError

    @property
    def num_streams(self) -> int:
        """Streams, or rows of the batches of one optimizer step, over all processes and accumulation steps."""
        return self.args.per_device_train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps

    def sync_trained_model(self) -> None:
        """Update `trained_model` before it is used, if training works on other weights."""

    def _finish_model(self) -> None:
        """Bring `trained_model` into its final form, at the end of training."""

    @contextmanager
    def model_for_first(self) -> Iterator[PreTrainedModel]:
        """The up-to-date `trained_model`, to be run by the first process; all of them enter and leave the block."""
        self.sync_trained_model()
        with self.sharding.joined():
            yield self.trained_model

    def _save_run(self, directory: str) -> None:
        """Save the state of the data; called by every process."""
        raise NotImplementedError

    def _load_run(self, checkpoint: str) -> None:
        """Restore the state of the data; a ValueError if this run cannot continue the checkpoint."""
        raise NotImplementedError

    def _start_run(self) -> None:
        """Reset the state of an earlier call of [`train`]."""

    def _process_state(self) -> dict[str, Any]:
        """Counters of this process since the last log: numbers, tensors and dictionaries of them."""
        return {}

    def _load_process_state(self, state: dict[str, Any]) -> None:
        """Restore the counters that `_process_state` returned; tensors are on the CPU."""

    def _set_epoch(self) -> None:
        """Set `self.state.epoch` to the number of passes over the data so far."""

    def set_initial_training_values(self, args, dataloader):
        """One endless pass that ends after `num_training_steps`."""
        steps, rows = self.num_training_steps, self.num_streams
        return sys.maxsize, steps, steps * rows, steps * rows, rows, steps * args.gradient_accumulation_steps, steps

    # ---- Steps ----

    def train(self, resume_from_checkpoint: str | bool | None = None, trial=None, ignore_keys_for_eval=None):
        """Train, optionally from a checkpoint.

        Args:
            resume_from_checkpoint: path of a checkpoint, or True for the last complete one in `output_dir`.

        Raises:
            ValueError: the checkpoint is missing, incomplete or damaged, or is of other data or another model.
        """
        checkpoint = self._find_checkpoint(resume_from_checkpoint)
        self._start_run()
        if checkpoint is not None:
            with same_error():
                check_trainer_state(checkpoint)
                with reading_checkpoint(checkpoint):
                    self._load_run(checkpoint)
                    self._check_resumed_arguments(checkpoint)
        self._begin_provenance(checkpoint)
        if self.args.should_save:
            remove_staging(self.args.output_dir)
        result = super().train(checkpoint, trial, ignore_keys_for_eval)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._return_to(self.state.best_model_checkpoint)
        self._finish_model()
        self.record()
        self._end_recording()
        return result

    def create_scheduler(self, num_training_steps, optimizer=None):
        """The scheduler of `Trainer`; a ValueError that names the arguments if it does not take its options."""
        try:
            return super().create_scheduler(num_training_steps, optimizer)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"`lr_scheduler_kwargs` is {self.args.lr_scheduler_kwargs}; with `lr_scheduler_type` "
                f"{str(self.args.lr_scheduler_type.value)!r}: {error}"
            ) from error

    def _run_epoch(self, *args, **kwargs):
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # resumed from the checkpoint of a finished run
            return
        self._throughput.start(self.state.global_step)
        self._begin_recording(is_resumed=self.state.global_step > 0)
        if self.args.device.type != "mps":
            # In float64 the sum of losses does not depend on the order in which processes add them.
            self._tr_loss = self._tr_loss.double()
        super()._run_epoch(*args, **kwargs)

    def _sum(self, value: float) -> float | int:
        """Sum of a number over all processes."""
        dtype = torch.float64 if isinstance(value, float) and self.args.device.type != "mps" else None
        total = self.accelerator.reduce(torch.tensor([value], dtype=dtype, device=self.args.device), reduction="sum")
        return total.item()

    def floating_point_ops(self, inputs: dict[str, torch.Tensor | Any]) -> int:
        """The estimate of `Trainer`, but with the parameters counted only once: at T = 1 that takes long."""
        main_input = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        if main_input is None:
            return 0
        if self._operations_per_token is None:
            self._operations_per_token = super().floating_point_ops(inputs) // main_input.numel()
        return self._operations_per_token * main_input.numel()

    # ---- Saving ----

    def _saved_models(self) -> dict[str, PreTrainedModel]:
        """Models of a checkpoint by subdirectory; the trained model is at ""."""
        return {"": self.trained_model}

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Save models and tokenizer through a temporary directory, without pickled arguments."""
        output_dir = self.args.output_dir if output_dir is None else output_dir
        writes = self.args.should_save
        if not self.takes_part_in_saving:
            return
        self.sync_trained_model()
        provenance = self.record()
        for folder, model in self._saved_models().items():
            final = os.path.join(output_dir, "model")
            staging = new_staging_directory(final) if writes else staging_path(final)
            own = replace(provenance, weights=weights_fingerprint(model), sample=None) if folder else provenance
            save_weights(model, staging, writes=writes, adapter=adapter_parameters(model))
            if not writes:
                continue
            write_provenance(own, staging)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(staging)
            publish_files(staging, os.path.join(output_dir, folder))

    def _save_checkpoint(self, model, trial) -> None:
        with self._throughput.paused():
            self._write_checkpoint(trial)

    def _write_checkpoint(self, trial) -> None:
        self.store_flos()
        self._set_epoch()
        run_dir = self._get_output_dir(trial=trial)
        final = os.path.join(run_dir, f"checkpoint-{self.state.global_step}")
        best = self._best_checkpoint(run_dir)
        if best is not None and (best == final or os.path.isdir(best)):
            self.state.best_model_checkpoint = best
        with writing_checkpoint(final):
            self._write_checkpoint_files(final)
        if self.args.push_to_hub:
            self._push_from_checkpoint(final)
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=run_dir,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
            )

    def _write_checkpoint_files(self, final: str) -> None:
        staging = os.fspath(staging_path(final))
        if self.args.should_save:
            new_staging_directory(final)
        self.accelerator.wait_for_everyone()
        self.save_model(staging, _internal_call=True)
        if not self.args.save_only_model:
            self._write_optimizer(staging)
            self._write_scaler(staging)
            self._write_process_state(staging)
            self._save_run(staging)
        if self.args.should_save:
            self._save_trainer_state(staging)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            write_manifest(staging, num_processes=self.args.world_size, num_threads=torch.get_num_threads())
            publish_directory(staging, final)
        self.accelerator.wait_for_everyone()

    def _save_trainer_state(self, directory: str) -> None:
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                if isinstance(self.state.stateful_callbacks.get(name), list):
                    self.state.stateful_callbacks[name].append(callback.state())
                else:
                    self.state.stateful_callbacks[name] = callback.state()
        # Checkpoints may be uploaded, so they hold no local path: the best checkpoint is found again by its step.
        replace(self.state, best_model_checkpoint=None).save_to_json(os.path.join(directory, "trainer_state.json"))
        write_json(shareable_arguments(self.args), os.path.join(directory, "training_args.json"))

    def _best_checkpoint(self, run_dir: str) -> str | None:
        step = self.state.best_global_step
        return os.path.join(run_dir, f"checkpoint-{step}") if step else None

    def _write_optimizer(self, output_dir: str) -> None:
        if self.takes_part_in_saving:
            save_tree(optimizer_state(self.optimizer), output_dir, "optimizer", writes=self.args.should_save)
        if self.args.should_save:
            save_tree(self.lr_scheduler.state_dict(), output_dir, "scheduler")

    def _write_scaler(self, output_dir: str) -> None:
        if self.accelerator.scaler is not None and self.args.should_save:
            write_json(self.accelerator.scaler.state_dict(), os.path.join(output_dir, "scaler.json"))

    def _write_process_state(self, output_dir: str) -> None:
        """Save the state of this process: random states, and losses and counters since the last log."""
        kind, key, *numpy_state = np.random.get_state()
        tree = {
            "python": random.getstate(),
            "numpy": [kind, key.tolist(), *numpy_state],
            "torch": torch.random.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if self.args.device.type == "cuda" else None,
            "unlogged_loss": self._tr_loss,
            "last_logged_step": self._globalstep_last_logged,
            "counts": self._process_state(),
        }
        save_tree(tree, output_dir, f"process_rank{self.args.process_index}")

    # ---- Resuming ----

    def _find_checkpoint(self, resume_from_checkpoint: str | bool | None) -> str | None:
        if resume_from_checkpoint is None or resume_from_checkpoint is False:
            return None
        with same_error():
            if resume_from_checkpoint is True:
                checkpoints = list_checkpoints(self.args.output_dir)
                if not checkpoints:
                    raise ValueError(f"There is no checkpoint in `output_dir` {self.args.output_dir!r}.")
                checkpoint = checkpoints[-1]
            else:
                checkpoint = os.fspath(resume_from_checkpoint)
            if not os.path.isfile(os.path.join(checkpoint, MANIFEST_FILE)):
                raise ValueError(
                    f"`resume_from_checkpoint` {checkpoint!r} is not a complete checkpoint: no {MANIFEST_FILE}."
                )
        check_same({"resume_from_checkpoint": checkpoint})
        if damage := self._find_damage(checkpoint):
            others = [
                path for path in list_checkpoints(Path(checkpoint).parent) if not os.path.samefile(path, checkpoint)
            ]
            hint = f" Another checkpoint to resume from is {others[-1]!r}." if others else ""
            raise ValueError(f"`resume_from_checkpoint` {checkpoint!r} cannot be used. {damage}{hint}")
        return checkpoint

    def _find_damage(self, checkpoint: str) -> str | None:
        """The damage of a checkpoint in words; each process reads a part of the files, and all get the same answer."""
        damage = None
        try:
            check_manifest(checkpoint, self.args.process_index, self.args.world_size)
        except ValueError as error:
            damage = str(error)
        found = gather_object([damage]) if self.args.world_size > 1 else [damage]
        return next(filter(None, found), None)

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ) -> tuple[int, int]:
        arguments = max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        if resume_from_checkpoint is None:
            return super()._init_training_state(*arguments)
        # `Trainer` warns about changed intervals; ours are applied, and named in `_check_resumed_arguments`.
        with reading_checkpoint(resume_from_checkpoint) as checkpoint, _errors_only("transformers.trainer_utils"):
            result = super()._init_training_state(*arguments)
            # `Trainer` would keep the intervals of the checkpoint, whatever the arguments are now.
            self.state.compute_steps(self.args, max_steps)
            best = self._best_checkpoint(os.path.dirname(os.path.abspath(checkpoint)))
            if best is not None and os.path.isdir(best):
                self.state.best_model_checkpoint = best
        return result

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """Load the weights after checking names and shapes."""
        if os.path.isfile(os.path.join(resume_from_checkpoint, "adapter_model.safetensors")):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        models = self._saved_models() if model is None else {"": model}
        for folder, part in models.items():
            load_weights(part, os.path.join(resume_from_checkpoint, folder))
        if model is None:
            self._check_resumed_models(resume_from_checkpoint)

    def _check_resumed_arguments(self, checkpoint: str) -> None:
        """Refuse changed arguments that cannot act, and name those without effect."""
        self.resumed_changes = changed_arguments(checkpoint, self.args)
        check_changes(checkpoint, self.resumed_changes)
        self._has_new_schedule = check_length(checkpoint, self.args, self.num_training_steps)
        is_finished = (checkpoint_number(checkpoint) or 0) >= self.num_training_steps
        if self.resumed_changes and self.is_world_process_zero():
            logger.warning(describe_changes(self.resumed_changes, is_finished))
        self._has_new_schedule |= touches_schedule(self.resumed_changes)

    def _check_resumed_models(self, checkpoint: str) -> None:
        """Refuse a model with another configuration, which the weights do not show."""
        for folder, model in self._saved_models().items():
            path = os.path.join(checkpoint, folder, "config.json")
            before, now = read_json(path), json.loads(model.config.to_json_string(use_diff=False))
            for name in sorted((before.keys() & now.keys()) - _NOT_OF_THE_FUNCTION):
                if before[name] != now[name]:
                    raise ValueError(
                        f"`{name}` of the model is {now[name]!r}, but {before[name]!r} in the checkpoint "
                        f"{checkpoint!r}; a resumed run cannot change it. {new_run_hint(checkpoint)}"
                    )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        given = [dict(group) for group in self.optimizer.param_groups]
        rates = list(getattr(self._plain_scheduler, "base_lrs", ()))
        with reading_checkpoint(checkpoint):
            saved = load_tree(checkpoint, "optimizer", own_part_of_state(self.optimizer))
            load_optimizer_state(self.optimizer, saved)
            schedule, own = load_tree(checkpoint, "scheduler"), self.lr_scheduler.state_dict()
            for name, value in schedule.items():
                if type(value) is not type(own.get(name)) or (
                    isinstance(value, list) and len(value) != len(own[name])
                ):
                    raise ValueError(f"{checkpoint!r} has another learning rate schedule: `{name}` is {value!r}.")
            self.lr_scheduler.load_state_dict(schedule)
        for group, own in zip(self.optimizer.param_groups, given, strict=True):
            for name, arguments in HYPERPARAMETERS.items():
                if name in own and self.resumed_changes.keys() & arguments.split():
                    group[name] = own[name]
        if self._has_new_schedule:
            self._apply_schedule(rates)

    @property
    def _plain_scheduler(self) -> Any:
        return getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)  # accelerate wraps it

    def _apply_schedule(self, rates: list[float]) -> None:
        """Continue with the current schedule of base rates `rates` at the step of the checkpoint."""
        scheduler = self._plain_scheduler
        if not isinstance(scheduler, LambdaLR):
            raise ValueError(
                f"`lr_scheduler_type` is {self.args.lr_scheduler_type.value!r}, whose rates follow from its past; a "
                "resumed run cannot change its schedule or its number of steps."
            )
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        last = [rate * factor for rate, factor in zip(rates, factors, strict=True)]
        scheduler.load_state_dict(scheduler.state_dict() | {"base_lrs": rates, "_last_lr": last})
        for group, base, rate in zip(self.optimizer.param_groups, rates, last, strict=True):
            group |= {"initial_lr": base, "lr": rate}

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.accelerator.scaler is not None:
            path = os.path.join(checkpoint, "scaler.json")
            if os.path.isfile(path):
                with reading_checkpoint(path):
                    self.accelerator.scaler.load_state_dict(read_json(path))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the state of this process; `Trainer` calls this last, right before the next step."""
        if checkpoint is None:
            return
        with reading_checkpoint(checkpoint):
            self._restore_process(checkpoint)

    def _restore_process(self, checkpoint: str) -> None:
        stored_processes = read_manifest(checkpoint)["num_processes"]
        trees = [load_tree(checkpoint, f"process_rank{rank}") for rank in range(stored_processes)]
        tree = trees[min(self.args.process_index, stored_processes - 1)]
        random.setstate(tree["python"])
        kind, key, *numpy_state = tree["numpy"]
        np.random.set_state((kind, np.array(key, dtype=np.uint32), *numpy_state))
        torch.random.set_rng_state(tree["torch"])
        if tree["cuda"] is not None and self.args.device.type == "cuda":
            torch.cuda.set_rng_state(tree["cuda"])
        # Logs average the losses over the processes, and sum the counters.
        same = stored_processes == self.args.world_size
        losses = tree["unlogged_loss"] if same else torch.stack([other["unlogged_loss"] for other in trees]).mean(0)
        self._tr_loss = losses.to(self.args.device)
        counts = [tree["counts"]] if same else [other["counts"] for other in trees]
        self._load_process_state(_sum_of_trees(counts, times=int(same or self.args.process_index == 0)))
        self._globalstep_last_logged = tree["last_logged_step"]
        # `train_loss` is the mean over the steps of this call, without the restored losses.
        self._total_loss_scalar = -self._sum(float(self._tr_loss)) / self.args.world_size


@contextmanager
def _errors_only(name: str) -> Iterator[None]:
    """Inside the block, a logger hides warnings."""
    other = logging.get_logger(name)
    before = other.level
    other.setLevel(logging.ERROR)
    try:
        yield
    finally:
        other.setLevel(before)


def _sum_of_trees(trees: list[Any], times: int) -> Any:
    """`times` × the sum of numbers, tensors or dictionaries of them; None if all are None."""
    trees = [tree for tree in trees if tree is not None]
    if not trees:
        return None
    if isinstance(trees[0], dict):
        names = dict.fromkeys(name for tree in trees for name in tree)
        return {name: _sum_of_trees([tree.get(name) for tree in trees], times) for name in names}
    return sum(trees[1:], trees[0]) * times
