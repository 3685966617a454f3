"""What our trainers have in common: checkpoints that are whole and execute nothing, exact resuming, our model card."""

import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import HfApi
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy, rotate_checkpoints
from transformers.utils import PushInProgress

from hf_recurrent.checkpoint_files import (
    STAGING_PREFIX,
    find_last_checkpoint,
    load_tree,
    publish_directory,
    publish_files,
    read_json,
    remove_staging,
    save_tree,
    write_json,
)
from hf_recurrent.trainers.parameter_groups import ParameterGroupsTrainer
from hf_recurrent.trainers.training_callbacks import Throughput

MANIFEST_FILE = "manifest.json"
TRAINER_STATE_FILE = "trainer_state.json"
WEIGHTS_FILE, WEIGHTS_INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"


class RecurrentTrainer(ParameterGroupsTrainer):
    """A `Trainer` of recurrent models, as the base of those that say what is read and what the loss is.

    A checkpoint holds everything that training depends on, so that continuing it is the uninterrupted run, bit for
    bit. It appears under its name only when it is complete, holds tensors as safetensors and everything else as JSON,
    and reading it executes nothing.

    A subclass has one endless pass over its data, cut after `num_training_steps`, and adds to a checkpoint in
    `_save_run` and `_load_run` what its data need to go on, and in `_process_state` and `_load_process_state` what
    each process counts.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: TrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
    ):
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self._throughput = Throughput()
        self._eval_metrics: dict[str, float] = {}
        self._operations_per_token: int | None = None

    @property
    def num_training_steps(self) -> int:
        """Optimizer steps of the whole run."""
        raise NotImplementedError

    @property
    def step_rows(self) -> int:
        """Rows of input that one optimizer step reads, over all processes and accumulation steps."""
        return self.args.per_device_train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps

    @property
    def trained_model(self) -> PreTrainedModel:
        """The plain model that is saved, evaluated, sampled from and pushed."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def sync_trained_model(self) -> None:
        """Bring [`trained_model`] up to date before it is used, where training works on other weights."""

    def synced_model(self) -> PreTrainedModel:
        """[`trained_model`], up to date."""
        self.sync_trained_model()
        return self.trained_model

    def _save_run(self, directory: str) -> None:
        """Write what the data of this run need to go on; called by every process."""
        raise NotImplementedError

    def _load_run(self, checkpoint: str) -> None:
        """Check that this run can continue the checkpoint, and take over where its data stand."""
        raise NotImplementedError

    def _start_run(self) -> None:
        """Forget what an earlier call of [`train`] left."""

    def _process_state(self) -> dict[str, Any]:
        """What this process has counted and not logged yet."""
        return {}

    def _load_process_state(self, state: dict[str, Any]) -> None:
        """Take over what was counted: of the form that `_process_state` gave, tensors on the CPU."""

    def _set_epoch(self) -> None:
        """Give `self.state.epoch` the share of the data that was read."""

    def set_initial_training_values(self, args, dataloader):
        """One endless pass, cut after `num_training_steps`."""
        steps = self.num_training_steps
        return (sys.maxsize, steps, steps * self.step_rows, steps * self.step_rows, self.step_rows,
                steps * args.gradient_accumulation_steps, steps)  # fmt: skip

    # ---- Steps ----

    def train(self, resume_from_checkpoint: str | bool | None = None, trial=None, ignore_keys_for_eval=None):
        """Train, from a checkpoint where one is given: a path, or True for the last complete one in `output_dir`.

        Raises:
            ValueError: there is no such checkpoint, it is incomplete or damaged, or it belongs to other data or to a
                model of another shape.
        """
        checkpoint = self._find_checkpoint(resume_from_checkpoint)
        self._start_run()
        if checkpoint is not None:
            self._load_run(checkpoint)
        if self.args.should_save:
            remove_staging(self.args.output_dir)
        return super().train(checkpoint, trial, ignore_keys_for_eval)

    def _run_epoch(self, *args, **kwargs):
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # the checkpoint is of a finished run
            return
        self._throughput.start(self.state.global_step)
        if self.args.device.type != "mps":
            # Sums of losses are exact in float64, so logs do not depend on which process added what first.
            self._tr_loss = self._tr_loss.double()
        super()._run_epoch(*args, **kwargs)

    def _sum(self, value: float) -> float | int:
        """The sum of a number over all processes."""
        dtype = torch.float64 if isinstance(value, float) and self.args.device.type != "mps" else None
        total = self.accelerator.reduce(torch.tensor([value], dtype=dtype, device=self.args.device), reduction="sum")
        return total.item()

    def floating_point_ops(self, inputs: dict[str, torch.Tensor | Any]) -> int:
        """Those of a step, as `Trainer` has them; the parameters are counted once, which at T = 1 takes long."""
        main_input = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        if main_input is None:
            return 0
        if self._operations_per_token is None:
            self._operations_per_token = super().floating_point_ops(inputs) // main_input.numel()
        return self._operations_per_token * main_input.numel()

    # ---- Saving ----

    def _saved_models(self) -> dict[str, PreTrainedModel]:
        """What a checkpoint holds, by the folder in it: in the empty one the model that training is for."""
        return {"": self.trained_model}

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Models and tokenizer, written beside and moved in; no pickled arguments."""
        output_dir = self.args.output_dir if output_dir is None else output_dir
        if not self.args.should_save:
            return
        self.sync_trained_model()
        for folder, model in self._saved_models().items():
            staging = os.path.join(output_dir, f"{STAGING_PREFIX}model")
            shutil.rmtree(staging, ignore_errors=True)
            model.save_pretrained(staging, state_dict=None if folder else state_dict)
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
        name = f"checkpoint-{self.state.global_step}"
        final, staging = os.path.join(run_dir, name), os.path.join(run_dir, STAGING_PREFIX + name)
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
            os.makedirs(staging)
        self.accelerator.wait_for_everyone()
        self.save_model(staging, _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(staging)
            self._save_scaler(staging)
            self._save_rng_state(staging)
            self._save_run(staging)
        best = os.path.join(run_dir, f"checkpoint-{self.state.best_global_step}")
        if self.state.best_global_step and (best == final or os.path.isdir(best)):
            self.state.best_model_checkpoint = best
        if self.args.should_save:
            self._save_trainer_state(staging)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            write_json(
                {"num_processes": self.args.world_size, "files": _files(staging)}, os.path.join(staging, MANIFEST_FILE)
            )
            publish_directory(staging, final)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(final)
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=run_dir,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
            )

    def _save_trainer_state(self, directory: str) -> None:
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                if isinstance(self.state.stateful_callbacks.get(name), list):
                    self.state.stateful_callbacks[name].append(callback.state())
                else:
                    self.state.stateful_callbacks[name] = callback.state()
        self.state.save_to_json(os.path.join(directory, TRAINER_STATE_FILE))
        with open(os.path.join(directory, "training_args.json"), "w", encoding="utf-8") as file:
            json.dump(self.args.to_dict(), file, indent=1, default=str)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:
            save_tree(self.optimizer.state_dict(), output_dir, "optimizer")
            save_tree(self.lr_scheduler.state_dict(), output_dir, "scheduler")

    def _save_scaler(self, output_dir: str) -> None:
        if self.accelerator.scaler is not None and self.args.should_save:
            write_json(self.accelerator.scaler.state_dict(), os.path.join(output_dir, "scaler.json"))

    def _save_rng_state(self, output_dir: str) -> None:
        """What is this process's own: random states, and the losses that are not logged yet."""
        numpy_state = np.random.get_state(legacy=False)
        tree = {
            "python": random.getstate(),
            "numpy": [numpy_state["bit_generator"], numpy_state["state"]["key"].tolist(), numpy_state["state"]["pos"],
                      numpy_state["has_gauss"], numpy_state["gauss"]],
            "torch": torch.random.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if self.args.device.type == "cuda" else None,
            "unlogged_loss": self._tr_loss,
            "last_logged_step": self._globalstep_last_logged,
            "counts": self._process_state(),
        }  # fmt: skip
        save_tree(tree, output_dir, _process_file(self.args.process_index))

    # ---- Resuming ----

    def _find_checkpoint(self, resume_from_checkpoint: str | bool | None) -> str | None:
        if resume_from_checkpoint is None or resume_from_checkpoint is False:
            return None
        if resume_from_checkpoint is True:
            found = find_last_complete_checkpoint(self.args.output_dir)
            if found is None:
                raise ValueError(f"There is no complete checkpoint in `output_dir` {self.args.output_dir!r}.")
            return found
        checkpoint = os.fspath(resume_from_checkpoint)
        if missing := _missing_part(checkpoint):
            raise ValueError(f"`resume_from_checkpoint` {checkpoint!r} is not a complete checkpoint: no {missing}.")
        return checkpoint

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """Weights from safetensors, shapes checked first."""
        if os.path.isfile(os.path.join(resume_from_checkpoint, ADAPTER_FILE)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        models = self._saved_models() if model is None else {"": model}
        for folder, part in models.items():
            _load_weights(part, os.path.join(resume_from_checkpoint, folder))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.optimizer.load_state_dict(load_tree(checkpoint, "optimizer"))
            self.lr_scheduler.load_state_dict(load_tree(checkpoint, "scheduler"))

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.accelerator.scaler is not None:
            path = os.path.join(checkpoint, "scaler.json")
            if os.path.isfile(path):
                self.accelerator.scaler.load_state_dict(read_json(path))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Random states, and the losses not logged yet; called when everything else stands ready for the next step."""
        if checkpoint is None:
            return
        stored_processes = read_json(os.path.join(checkpoint, MANIFEST_FILE))["num_processes"]
        trees = [load_tree(checkpoint, _process_file(rank)) for rank in range(stored_processes)]
        tree = trees[min(self.args.process_index, stored_processes - 1)]
        random.setstate(tree["python"])
        kind, key, position, has_gauss, gauss = tree["numpy"]
        np.random.set_state((kind, np.array(key, dtype=np.uint32), position, has_gauss, gauss))
        torch.random.set_rng_state(tree["torch"])
        if tree["cuda"] is not None and self.args.device.type == "cuda":
            torch.cuda.set_rng_state(tree["cuda"])
        # Logs average the losses of all processes.
        same = stored_processes == self.args.world_size
        losses = tree["unlogged_loss"] if same else torch.stack([other["unlogged_loss"] for other in trees]).mean(0)
        self._tr_loss = losses.to(self.args.device)
        # They add what they counted: where their number changed, the first one takes it all over.
        mine = [tree["counts"]] if same else [other["counts"] for other in trees]
        self._load_process_state(_added(mine, times=int(same or self.args.process_index == 0)))
        self._globalstep_last_logged = tree["last_logged_step"]
        # `train_loss` is the mean of the steps of this call: the restored ones belong to the call before.
        self._total_loss_scalar = -self._sum(float(self._tr_loss)) / self.args.world_size

    # ---- Hub ----

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        recipe: str | None = None,
        **kwargs,
    ) -> None:
        """Our card with what was measured, in place of the Trainer's "fine-tuned version of"."""
        if not self.is_world_process_zero():
            return
        from hf_recurrent.hub.model_card import create_model_card

        card = create_model_card(
            self.trained_model,
            self.args,
            None if self.train_dataset is None else self.train_dataset.name,
            {name: value for name, value in self._eval_metrics.items() if name.startswith("eval_")},
            repo_id=self.hub_model_id,
            model_name=model_name,
            recipe=recipe,
            train_steps=self.state.global_step or None,
            license=license or "apache-2.0",
            language=language,
            tags=[tags] if isinstance(tags, str) else tags,
        )
        card.save(os.path.join(self.args.output_dir, "README.md"))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload what was just saved, in the background."""
        args = self.args
        if not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if busy and not args.hub_always_push:
            return
        self.callback_handler.on_push_begin(args, self.state, self.control)
        self._save(args.output_dir)
        self.create_model_card()
        message = f"Training in progress, step {self.state.global_step}"
        api = HfApi(token=args.hub_token)
        upload = {"repo_id": self.hub_model_id, "run_as_future": True, "revision": args.hub_revision}
        jobs = [
            api.upload_folder(
                folder_path=args.output_dir, commit_message=message, ignore_patterns=["_*", "checkpoint-*"], **upload
            )
        ]
        if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            last = args.hub_strategy == HubStrategy.CHECKPOINT
            jobs.append(
                api.upload_folder(
                    folder_path=checkpoint_folder,
                    path_in_repo="last-checkpoint" if last else os.path.basename(checkpoint_folder),
                    commit_message=f"{message}, checkpoint",
                    **upload,
                )
            )
        if busy:
            self.push_in_progress.jobs.extend(jobs)
        else:
            self.push_in_progress = PushInProgress(jobs)


def find_last_complete_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """Where `resume_from_checkpoint=True` continues, or None."""
    return find_last_checkpoint(output_dir, lambda path: _missing_part(path) is None)


def _process_file(rank: int) -> str:
    return f"process_rank{rank}"


def _added(trees: list[Any], times: int) -> Any:
    """`times` the sum of numbers, tensors and dictionaries of such; None where all have None."""
    trees = [tree for tree in trees if tree is not None]
    if not trees:
        return None
    if isinstance(trees[0], dict):
        names = dict.fromkeys(name for tree in trees for name in tree)
        return {name: _added([tree.get(name) for tree in trees], times) for name in names}
    return sum(trees[1:], trees[0]) * times


def _files(directory: str) -> list[str]:
    """All files below a directory, by their names relative to it."""
    return sorted(path.relative_to(directory).as_posix() for path in Path(directory).rglob("*") if path.is_file())


def _missing_part(checkpoint: str) -> str | None:
    """The first file that the checkpoint was complete with and has no longer."""
    manifest = os.path.join(checkpoint, MANIFEST_FILE)
    if not os.path.isfile(manifest):
        return MANIFEST_FILE
    return next(
        (name for name in read_json(manifest)["files"] if not os.path.isfile(os.path.join(checkpoint, name))), None
    )


def _load_weights(model: PreTrainedModel, directory: str) -> None:
    index = os.path.join(directory, WEIGHTS_INDEX_FILE)
    names = sorted(set(read_json(index)["weight_map"].values())) if os.path.isfile(index) else [WEIGHTS_FILE]
    paths = [os.path.join(directory, name) for name in names]
    _check_weights(paths, model.state_dict(), set(getattr(model, "all_tied_weights_keys", None) or ()), directory)
    for path in paths:
        model.load_state_dict(load_file(path), strict=False)
    model.tie_weights()


def _check_weights(paths: list[str], own: dict[str, torch.Tensor], tied: set[str], checkpoint: str) -> None:
    """Raise a ValueError that names the first weight that a checkpoint lacks or has in another shape."""
    found = set()
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dictionary)
                    shape = tuple(file.get_slice(name).get_shape())
                    if name not in own:
                        raise ValueError(f"The checkpoint {checkpoint!r} has a weight `{name}`; the model has none.")
                    if shape != tuple(own[name].shape):
                        raise ValueError(
                            f"`{name}` has shape {shape} in the checkpoint {checkpoint!r}, but "
                            f"{tuple(own[name].shape)} in the model."
                        )
                    found.add(name)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"The checkpoint file `{path}` is missing or damaged: {error}.") from error
    if missing := sorted(set(own) - found - tied):
        raise ValueError(f"The checkpoint {checkpoint!r} lacks the weight `{missing[0]}` of the model.")
