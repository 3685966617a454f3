"""`StreamTrainer`: a `Trainer` on blocks of an episode source, put together from parts.

Its `method` (`methods/`) has the loss and says what streams carry, `count_learning` fills a count memory, `progress`
knows positions, `checkpointing` writes and resumes, `records` has the record of training, `guard` watches for NaN and
infinite values, `signals` for Ctrl-C and SIGTERM, and `sharding` says how processes share the model.
"""

import copy
import math
import os
import sys
import time
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.utils import logging

from hf_recurrent.checkpoints.files import remove_staging
from hf_recurrent.checkpoints.output_lock import output_lock
from hf_recurrent.checkpoints.records import Provenance
from hf_recurrent.data.episode_source import EpisodeSource, EvaluationShare
from hf_recurrent.learning_rules.joint_optimizer import join_optimizers
from hf_recurrent.learning_rules.optimizers import apply_learning_rate_factors, frozen
from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.modeling.block.linear_maps import rounded_products
from hf_recurrent.modeling.block.recurrent_state import detach_state, supports_recurrent_state
from hf_recurrent.stock_models.with_state import with_state
from hf_recurrent.trainers.agreement import check_same_run, check_sources, same_error, total
from hf_recurrent.trainers.checkpointing import Checkpointing
from hf_recurrent.trainers.count_learning import CountLearning
from hf_recurrent.trainers.divergence_guard import DivergenceGuard
from hf_recurrent.trainers.hub import write_model_card
from hf_recurrent.trainers.kernel_threads import kernel_threads
from hf_recurrent.trainers.methods.training_method import TrainingMethod
from hf_recurrent.trainers.methods.truncated_bptt import TruncatedBptt
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments
from hf_recurrent.trainers.phase_records import PhaseRecords
from hf_recurrent.trainers.sharding import build_sharding, recompute_activations, sharding_by_trainer
from hf_recurrent.trainers.stop_signals import EvaluationStopped, StopSignals, TrainingInterrupted
from hf_recurrent.trainers.stream_progress import CarriedState, StreamProgress
from hf_recurrent.trainers.table_gradients import TableGradients
from hf_recurrent.trainers.training_callbacks import LoopCallback, SampleCallback, Throughput, replace_progress_bar

logger = logging.get_logger(__name__)


class StreamTrainer(Trainer):
    """Trains a model by a [`TrainingMethod`] on blocks of many parallel streams of episodes.

    Number of streams = `per_device_train_batch_size` × processes × `gradient_accumulation_steps`; each accumulation
    step reads another group of streams.

    * A resumed run equals the uninterrupted run bit for bit. Checkpoints hold no pickle ([`Checkpointing`]).
    * A NaN or infinite loss, gradient or weight stops training before the weights change, or sends it back to the last
      checkpoint (`on_divergence`). Weights that are not finite are never saved.
    * Ctrl-C and SIGTERM end training after the current step, with a checkpoint (`save_on_signal`).
    * A run holds a lock of `output_dir`, and an error while saving leaves earlier checkpoints as they are.
    * Models are replicated (DDP) or sharded (FSDP2), as the launcher asks.
    * Logs hold `bits_per_byte`, `bytes_per_second`, `state_resets`, `bytes_seen` and the metrics of the method;
      `epoch` is bytes seen / bytes of the source. `evaluate()` splits the held-out data between the processes.

    Args:
        model: the model to train; its vocabulary must cover the token ids of the sources.
        args: [`MultiStreamTrainingArguments`]; the trainer works on a copy.
        train_corpus: episodes to train on: a corpus, a task or any other [`EpisodeSource`].
        eval_corpus: held-out episodes, or a dictionary of sources by name.
        processing_class: the tokenizer; saved with the model, and required for samples.
        callbacks: additional callbacks.
        optimizers: a custom optimizer and learning rate schedule.
        method: how a block is learned from; by default the `method_class`.

    Raises:
        ValueError: a source is empty, has no end and no number of steps, or more token ids than the model; a block is
            longer than the model's positions; `sample_every` lacks a tokenizer; or the method cannot train the model.
    """

    args: MultiStreamTrainingArguments
    method_class: type[TrainingMethod] = TruncatedBptt
    # `compute_loss` already scales the loss to its share of the step.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: torch.nn.Module,
        args: MultiStreamTrainingArguments,
        train_corpus: EpisodeSource | None = None,
        eval_corpus: EpisodeSource | dict[str, EpisodeSource] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        *,
        method: TrainingMethod | None = None,
    ):
        self.method = method = method or self.method_class()
        args, self._operations_per_token = copy.copy(args), None
        self.sharding = build_sharding(args.device, method.shards_by_layer)
        with same_error():
            trained = method.setup(model, args, train_corpus)
            check_sources(trained, args, train_corpus, eval_corpus, method.carries_state)
            if args.sample_every and processing_class is None:
                raise ValueError(f"`processing_class` is None; `sample_every` {args.sample_every} needs a tokenizer.")
            if self.sharding.is_sharded and optimizers[0] is not None:
                raise ValueError("`optimizers` must be (None, None) with FSDP: it replaces the parameters by parts.")
        if args.world_size > 1:
            check_same_run(args, trained, {"train_corpus": train_corpus, "eval_corpus": eval_corpus})
        if args.n_gpu > 1:
            # nn.DataParallel would distribute the streams differently at every block.
            logger.warning("Using one of %d GPUs; start one process per GPU with `accelerate launch`.", args.n_gpu)
            args._n_gpu = 1
        self.records, self.guard, self.checkpointing = PhaseRecords(self), DivergenceGuard(self), Checkpointing(self)
        self.signals = StopSignals(args.save_on_signal, self.sharding, args.device, args.world_size)
        self.throughput, self._counted = Throughput(), None  # the batch with its last part, for `count_learning`
        super().__init__(
            model=trained,
            args=args,
            train_dataset=train_corpus,
            eval_dataset=eval_corpus,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.sharding.shard(trained)
        self.count_learning = CountLearning(self)
        self.tables = TableGradients(trained, args.world_size, self.count_learning.buffer_names(trained))
        self._mixed_mesh_grads = False  # tables are not sharded, and the guard takes them apart
        self._add_callbacks()
        method.start(self.sharding)
        self.carried = CarriedState(method.zero, args.device) if method.carries_state else None
        self.progress = StreamProgress(args, train_corpus, self.carried)
        method.reset()

    def _add_callbacks(self) -> None:
        self.add_callback(LoopCallback(self))
        self._bar = replace_progress_bar(self)
        if self.args.sample_every:
            self.add_callback(SampleCallback(self))

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; a sharded model is not prepared by it, and gradients are checked when clipped."""
        if self.sharding.settings.activation_checkpointing:
            recompute_activations(self.args)
        with sharding_by_trainer():
            super().create_accelerator_and_postprocess()
        self.accelerator.clip_grad_norm_ = self.guard.clip
        if self.sharding.is_sharded:
            # In training as in evaluation: for autocast and compilation, without another wrapper.
            prepare = self.accelerator.prepare_model
            options = {"device_placement": False, "evaluation_mode": True}
            self.accelerator.prepare_model = lambda model, *_, **__: prepare(model, **options)

    # ---- Data ----

    @property
    def num_training_steps(self) -> int:
        """Optimizer steps: `max_steps`, else computed from `train_bytes`, else from `num_train_epochs`."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        budget = self.args.train_bytes or self.args.num_train_epochs * self.train_dataset.tokens_per_epoch
        return max(1, math.ceil(budget / self.args.step_bytes))

    def set_initial_training_values(self, args, dataloader):
        """One endless pass that ends after `num_training_steps`; none if the resumed run is finished."""
        steps, rows = self.num_training_steps, args.num_streams
        passes = sys.maxsize if self.checkpointing.step < steps else 0
        return passes, steps, steps * rows, steps * rows, rows, steps * args.gradient_accumulation_steps, steps

    def get_train_dataloader(self) -> DataLoader:
        """Batches of this process's streams; not prepared by accelerate, which would redistribute them."""
        args = self.args
        blocks = self.train_dataset.blocks(
            args.num_streams,
            args.block_size,
            args.stream_seed,
            regime=args.regime,
            stream_indices=self.progress.streams.tolist(),
            accumulation_groups=args.gradient_accumulation_steps,
            **self.progress.start,
        )
        workers = args.dataloader_num_workers
        return DataLoader(
            blocks,
            batch_size=None,
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
            prefetch_factor=args.dataloader_prefetch_factor if workers else None,
            persistent_workers=args.dataloader_persistent_workers and workers > 0,
            # Starting a loader draws a random number; from the global generator it would change dropout.
            generator=torch.Generator().manual_seed(args.stream_seed),
        )

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The micro-batches of a step, and the number of its targets over all micro-batches and processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        count = sum(int(batch["shift_labels"].ne(IGNORE_INDEX).sum()) for batch in batches)
        return batches, self.signals.sum_and_agree(count).clamp(min=1)

    # ---- Optimizer ----

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """Names of parameters with weight decay, without the model's `parameters_without_weight_decay`."""
        exempt = getattr(self.model, "parameters_without_weight_decay", set)()
        return [name for name in super().get_decay_parameter_names(model) if name not in exempt]

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of `Trainer`, joined with others for tables and matrices; rate factors have groups."""
        is_new, args = self.optimizer is None, self.args
        optimizer = super().create_optimizer(model)
        if is_new:
            trained = self.model if model is None else model
            settings = args.matrix_optimizer, args.matrix_learning_rate, args.table_learning_rate
            self.optimizer = optimizer = join_optimizers(optimizer, trained, *settings)
            apply_learning_rate_factors(optimizer, self.model, dict(trained.named_parameters()))
        return optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        """Create the schedule of `Trainer`, whose creation is the last before training; then restore a checkpoint's.

        Raises:
            ValueError: the schedule does not take `lr_scheduler_kwargs`.
        """
        try:
            scheduler = super().create_scheduler(num_training_steps, optimizer)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"`lr_scheduler_kwargs` is {self.args.lr_scheduler_kwargs}; with `lr_scheduler_type` "
                f"{str(self.args.lr_scheduler_type.value)!r}: {error}"
            ) from error
        self.checkpointing.restore_optimizer()
        return scheduler

    # ---- Training ----

    def train(self, resume_from_checkpoint: str | bool | None = None, trial=None, ignore_keys_for_eval=None):
        """Train, optionally from a checkpoint.

        Args:
            resume_from_checkpoint: path of a checkpoint, or True for the last complete one in `output_dir`.

        Raises:
            ValueError: the checkpoint is missing, incomplete or damaged, or is of other data or another model; or
                another process writes to `output_dir`.
            NonFiniteLossError: training diverged and cannot go back to a checkpoint.
            TrainingInterrupted: a signal arrived; a checkpoint was saved.
            OSError: a checkpoint cannot be written.
        """
        if self.train_dataset is None:
            raise ValueError("`train_corpus` is None; training needs a source of episodes.")

        def attempt(checkpoint: str | bool | None, rate_factor: float):
            checkpoint = self.checkpointing.find(checkpoint)
            self._begin_run(checkpoint, rate_factor)
            return super(StreamTrainer, self).train(None, trial, ignore_keys_for_eval)

        with ExitStack() as stack:
            with same_error():
                stack.enter_context(output_lock(self.args.output_dir) if self.args.should_save else nullcontext())
            stack.enter_context(self.signals.listening())
            stack.enter_context(frozen(*self.method.frozen_modules))
            stack.enter_context(self.tables.coalescing())
            stack.enter_context(kernel_threads(self.trained_model, self.method, self.args))
            try:
                result = self.guard.run(attempt, resume_from_checkpoint)
                self._finish_run()
            except EvaluationStopped:
                self._save_checkpoint(self.model, trial)
            if self.signals.stop_is_due:
                folder = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
                raise TrainingInterrupted(self.signals.request, folder)
        return result

    def _begin_run(self, checkpoint: str | None, rate_factor: float) -> None:
        self.progress.reset()
        self.method.reset()
        self.count_learning.reset(is_new=checkpoint is None)
        self.checkpointing.begin_new()
        if checkpoint is not None:
            self.checkpointing.begin(checkpoint, rate_factor)
        self.records.find_beginning(checkpoint)
        if self.args.should_save:
            remove_staging(self.args.output_dir)

    def _finish_run(self) -> None:
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self.records.return_to(self.state.best_model_checkpoint)
        self.method.finish()
        self.count_learning.finish()
        self.record()
        self.records.close()

    def begin_steps(self) -> None:
        """Begin to measure and record, and restore the process of a checkpoint; called right before the first step."""
        self.throughput.start(self.state.global_step)
        self.records.begin()
        if self.args.device.type != "mps":
            # In float64 the sum of losses does not depend on the order in which processes add them.
            self._tr_loss = self._tr_loss.double()
        self.checkpointing.restore_process()

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """Compute the gradients of one micro-batch, then record the positions of its streams."""
        self.records.tokens_read += inputs["input_ids"].numel() * self.args.world_size
        # Arrays stay on the CPU, where they are read.
        batch = inputs | {name: inputs[name].cpu().numpy() for name in ("stream_indices", "stream_positions")}
        losses, self.method.block_logits = [], None if self.count_learning.memory is None else []
        parts = list(self.method.parts(batch | self.count_learning.target_weights(batch)))
        for number, part in enumerate(parts, 1):
            self._counted = batch if number == len(parts) else None
            with rounded_products(self.args.bf16_products), self.method.learning(self._carried_by(batch)):
                losses.append(super().training_step(model, part, num_items_in_batch))
        if self.accelerator.sync_gradients:
            self.tables.average()
        self.count_learning.wait()
        self.progress.advance(inputs)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _carried_by(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        streams = batch["stream_indices"]
        return {} if self.carried is None else self.carried.get(int(streams[0]), len(streams))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The loss of the method, scaled to its share of the step; what is carried moves on, detached."""
        batch = inputs | {"num_targets": num_items_in_batch}
        loss, carried = self.method.loss(model, batch, self._carried_by(inputs))
        if self._counted is not None:
            self.count_learning.add(self._counted, self.method.block_logits)
        if self.carried is not None:
            self.carried.set(int(inputs["stream_indices"][0]), detach_state(carried))
        if self.method.loss_is_mean:
            loss = loss / self.args.gradient_accumulation_steps
        else:  # DDP averages the gradients, but the loss is already divided by the targets of all processes
            loss = loss * self.accelerator.num_processes
        return (loss, None) if return_outputs else loss

    def floating_point_ops(self, inputs: dict[str, torch.Tensor | Any]) -> int:
        """The estimate of `Trainer`, but with the parameters counted only once: at T = 1 that takes long."""
        if (main_input := inputs.get(getattr(self.model, "main_input_name", "input_ids"))) is None:
            return 0
        if self._operations_per_token is None:
            self._operations_per_token = super().floating_point_ops(inputs) // main_input.numel()
        return self._operations_per_token * main_input.numel()

    def set_epoch(self) -> None:
        """Set `state.epoch` to the number of passes over the data so far."""
        if self.train_dataset is not None:
            self.state.epoch = self.state.global_step * self.args.step_bytes / self.train_dataset.tokens_per_epoch

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the metrics of the streams; called by all processes."""
        self.set_epoch()
        if "loss" in logs:
            sum_up = partial(total, device=self.args.device)
            logs |= self.method.metrics(logs["loss"], sum_up) | self.count_learning.metrics()
            rate = self.throughput.steps_per_second(self.state.global_step)
            logs["bytes_per_second"] = self.args.step_bytes * rate
            logs["state_resets"] = sum_up(self.progress.resets)
            logs["bytes_seen"] = self.state.global_step * self.args.step_bytes
        super().log(logs, start_time)

    # ---- The trained model: saving, records, uploads ----

    @property
    def trained_model(self) -> PreTrainedModel:
        """The unwrapped model that is saved, evaluated, sampled from and uploaded."""
        return self.method.trained_model

    def sync_trained_model(self) -> None:
        """Update `trained_model` before it is used, if training works on other weights."""
        if self.is_in_train:
            self.method.sync()

    @contextmanager
    def model_for_first(self):
        """The up-to-date `trained_model`, to be run by the first process; all of them enter and leave the block."""
        self.sync_trained_model()
        with self.sharding.joined():
            yield self.trained_model

    @property
    def takes_part_in_saving(self) -> bool:
        """True if this process writes the model, or holds a part of it."""
        return self.args.should_save or self.sharding.is_sharded

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; a NonFiniteLossError if a weight is NaN or infinite."""
        if not _internal_call:
            self.guard.check_weights()
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Save without the pickled arguments of `Trainer`, and atomically: `save_model` has no public hook for it."""
        self.checkpointing.save_models(self.args.output_dir if output_dir is None else output_dir)

    def _save_checkpoint(self, model, trial) -> None:
        """Write a checkpoint without pickle, and atomically: callbacks run after `Trainer` has written its own."""
        with self.throughput.paused():
            self.checkpointing.write(trial)

    @property
    def provenance(self) -> Provenance:
        """Provenance of the weights of `trained_model`, up to the last call of `record`."""
        return self.records.provenance

    def record(self) -> Provenance:
        """Bring `provenance` up to date with the weights, and return it."""
        return self.records.record()

    def init_hf_repo(self, *arguments: Any, **options: Any) -> None:
        """The method of `Trainer`; if the Hub refuses the first process, all raise its sentence as a ValueError."""
        with same_error():
            super().init_hf_repo(*arguments, **options)
        # Sharded models are saved for the Hub by all processes, so all of them know what it knows.
        self.push_in_progress = None
        if self.args.world_size > 1:
            self.hub_model_id = broadcast_object_list([self.hub_model_id])[0]

    def create_model_card(self, language=None, license=None, tags=None, model_name=None, recipe=None, **_):
        """Write README.md from `provenance`, and provenance.json; `Trainer` would write "fine-tuned version of"."""
        if self.takes_part_in_saving:
            tags = [tags] if isinstance(tags, str) else tags or []
            write_model_card(self, recipe, language=language, license=license, tags=tags, model_name=model_name)

    def push_to_hub(self, *arguments: Any, **options: Any) -> Any:
        """The method of `Trainer`, for all processes; an OSError in all of them if the Hub refuses the first."""
        try:
            with same_error():
                result = super().push_to_hub(*arguments, **options)
                if not self.is_world_process_zero():
                    self.create_model_card()  # as the first process has done inside
        except ValueError as error:
            raise error if self.is_world_process_zero() else OSError(str(error)) from error
        return result

    # ---- Evaluation ----

    def evaluate(
        self,
        eval_dataset: EpisodeSource | dict[str, EpisodeSource] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate on held-out episodes, each process on its share, from zero states; training is not affected.

        Raises:
            ValueError: there is no source, or the model cannot read it.
        """
        source = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(source, dict):
            metrics = {}
            for name, part in source.items():
                metrics |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        if source is None:
            raise ValueError("`eval_dataset` is None; evaluation needs a source of episodes.")
        source.check_model("eval_dataset", self.model)
        self.sync_trained_model()
        self._memory_tracker.start()
        begin = time.time()
        with self.throughput.paused():
            metrics = self.measure(source)
        seconds = time.time() - begin
        words = source.describe_result(metrics)
        carries = self.args.eval_carry_state and supports_recurrent_state(with_state(self.trained_model))
        self.records.add_result(source, metrics, block_size=self.args.eval_block_size, state_carried=carries)
        metrics["runtime"] = round(seconds, 4)
        if "num_bytes" in metrics:
            metrics["bytes_per_second"] = round(metrics["num_bytes"] / seconds, 1)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        if self._bar is not None and metric_key_prefix == "eval":
            self._bar.show_evaluation(self.state, words)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._memory_tracker.stop_and_update_metrics(metrics)
        return metrics

    def measure(self, source: EpisodeSource) -> dict[str, float]:
        """Metrics of a held-out source, over all processes."""
        share = EvaluationShare(
            index=self.args.process_index,
            count=self.args.world_size,
            batch_size=self.args.per_device_eval_batch_size,
            block_size=self.args.eval_block_size,
            carry_state=self.args.eval_carry_state,
            progress=not self.args.disable_tqdm and self.is_world_process_zero() and sys.stderr.isatty(),
        )
        model = self.trained_model
        if model is self.model and not self.accelerator._models:
            # Before training, the model is not prepared for mixed precision yet.
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
        sums = {}
        with self.signals.stoppable(model):
            sums = source.evaluate(model, share)
        sums = {name: total(value, self.args.device) for name, value in sums.items()}
        return source.evaluation_metrics(sums) | self.method.measure(source)
