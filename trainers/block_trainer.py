"""`BlockTrainer`: training on blocks of an episode source, with stream positions, logs and evaluation."""

import copy
import math
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import ProgressCallback
from transformers.utils import logging

from hf_recurrent.checkpoints.privacy import redact
from hf_recurrent.checkpoints.records import Sample
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.episode_source import EpisodeSource, EvaluationShare, check_window
from hf_recurrent.evaluation.samples import generate_samples, prompt_from
from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.modeling.block.recurrent_state import supports_recurrent_state
from hf_recurrent.stock_models.with_state import with_state
from hf_recurrent.trainers.agreement import check_same, same_error
from hf_recurrent.trainers.carried_state import CarriedState
from hf_recurrent.trainers.guarded_trainer import GuardedTrainer
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments
from hf_recurrent.trainers.stream_checkpoint import (
    StreamRun,
    check_stream_run,
    load_positions,
    load_states,
    save_stream_run,
    save_streams,
)
from hf_recurrent.trainers.trainer_state import shareable_arguments
from hf_recurrent.trainers.training_callbacks import BytesProgressCallback, SampleCallback

logger = logging.get_logger(__name__)

# Of the sample on the card.
_SAMPLE_BYTES, _TEMPERATURE = 200, 0.8
# Arguments that may differ between processes.
_OF_A_PROCESS = {"dataloader_num_workers", "log_level", "log_level_replica", "disable_tqdm"}


class BlockTrainer(GuardedTrainer):
    """Base class of the trainers that read blocks of many parallel streams.

    Number of streams = `per_device_train_batch_size` × processes × `gradient_accumulation_steps`; each accumulation
    step reads another group of streams. Checkpoints hold the position of every stream after its last trained block.

    Logs hold `bits_per_byte`, `bytes_per_second`, `state_resets`, `bytes_seen` and the training metrics of the source;
    `epoch` is bytes seen / bytes of the source. `evaluate()` splits the held-out data between the processes.

    Subclasses define `compute_loss`, and `carries_state` and `build_carried` if streams pass tensors from block to
    block.

    Args:
        model: the model to train; its vocabulary must cover the token ids of the sources.
        args: [`MultiStreamTrainingArguments`]; the trainer works on a copy.
        train_corpus: episodes to train on: a corpus, a task or any other [`EpisodeSource`].
        eval_corpus: held-out episodes, or a dictionary of sources by name.
        processing_class: the tokenizer; saved with the model, and required for samples.
        callbacks: additional callbacks.
        optimizers: a custom optimizer and learning rate schedule.

    Raises:
        ValueError: a source is empty, has no end without a given number of steps, or has more token ids than the
            model; a block is longer than the model's positions; or `sample_every` is set without a tokenizer.
    """

    args: MultiStreamTrainingArguments
    # `compute_loss` already divides by the targets of the whole step.
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
    ):
        args = copy.copy(args)
        with same_error():
            carries_state = self.carries_state(model, args)
            if train_corpus is not None:
                train_corpus.check_training(args, carries_state)
            evaluated = eval_corpus.values() if isinstance(eval_corpus, dict) else (eval_corpus,)
            sources = [("train_corpus", train_corpus), *(("eval_corpus", source) for source in evaluated)]
            for argument, source in sources:
                if source is not None:
                    source.check_model(argument, model, args.eval_block_size)
            check_window("block_size", args.block_size, model)
            if args.sample_every and processing_class is None:
                raise ValueError(f"`processing_class` is None; `sample_every` {args.sample_every} needs a tokenizer.")
        if args.world_size > 1:
            check_same(_facts(args, model, {"train_corpus": train_corpus, "eval_corpus": eval_corpus}))
        if args.n_gpu > 1:
            # nn.DataParallel would distribute the streams differently at every block.
            logger.warning("Using one of %d GPUs; start one process per GPU with `accelerate launch`.", args.n_gpu)
            args._n_gpu = 1
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_corpus,
            eval_dataset=eval_corpus,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self._progress: BytesProgressCallback | None = None
        if self.pop_callback(ProgressCallback) is not None:
            self._progress = BytesProgressCallback(getattr(train_corpus, "unit", "byte"))
            self.add_callback(self._progress)
        if args.sample_every:
            self.add_callback(SampleCallback(processing_class, args, self._throughput, self.model_for_first))
        self.carried: CarriedState | None = self.build_carried() if carries_state else None
        self._start_run()

    def carries_state(self, model: torch.nn.Module, args: MultiStreamTrainingArguments) -> bool:
        """True if streams pass tensors from block to block."""
        return False

    def build_carried(self) -> CarriedState:
        """Build the carried tensors; called at the end of the constructor."""
        raise NotImplementedError

    # ---- Streams ----

    @property
    def step_bytes(self) -> int:
        """Bytes read by one optimizer step."""
        return self.num_streams * self.args.block_size

    @property
    def num_training_steps(self) -> int:
        """Optimizer steps: `max_steps`, else computed from `train_bytes`, else from `num_train_epochs`."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        budget = self.args.train_bytes or self.args.num_train_epochs * self.train_dataset.tokens_per_epoch
        return max(1, math.ceil(budget / self.step_bytes))

    @property
    def data_seed(self) -> int:
        """Seed of the order of episodes: `data_seed`, by default `seed`."""
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def _local_streams(self) -> torch.Tensor:
        """Global numbers of this process's streams, in the order of its micro-batches."""
        batch_size, processes = self.args.per_device_train_batch_size, self.args.world_size
        first = torch.arange(self.args.gradient_accumulation_steps) * processes + self.args.process_index
        return (first[:, None] * batch_size + torch.arange(batch_size)).flatten()

    def _require_train_corpus(self) -> EpisodeSource:
        if self.train_dataset is None:
            raise ValueError("`train_corpus` is None; training needs a source of episodes.")
        return self.train_dataset

    def get_train_dataloader(self) -> DataLoader:
        """Batches of this process's streams; not prepared by accelerate, which would redistribute the streams."""
        args = self.args
        blocks = self._require_train_corpus().blocks(
            self.num_streams,
            args.block_size,
            self.data_seed,
            regime=args.regime,
            stream_indices=self._local_streams().tolist(),
            accumulation_groups=args.gradient_accumulation_steps,
            positions=None if self._start_positions is None else self._start_positions.numpy(),
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
            generator=torch.Generator().manual_seed(self.data_seed),
        )

    # ---- Steps ----

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor:
        """Number of targets of one optimizer step, over all micro-batches and processes."""
        count = sum(int(batch["shift_labels"].ne(IGNORE_INDEX).sum()) for batch in batch_samples)
        return self._sum_and_agree(count, device).clamp(min=1)

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """Compute the gradients of one micro-batch, then record the positions of its streams."""
        self._resets += int(inputs["reset_mask"].sum())
        self._tokens_read += inputs["input_ids"].numel() * self.args.world_size
        loss = self.learn_block(model, inputs, num_items_in_batch)
        # Not when the batch is fetched: prefetched batches have not been trained on.
        self._positions |= zip(inputs["stream_indices"].tolist(), inputs["stream_positions"], strict=True)
        return loss

    def learn_block(self, model, inputs: dict[str, torch.Tensor], num_items_in_batch) -> torch.Tensor:
        """Run forward and backward on one micro-batch; subclasses that carry tensors extend this."""
        return super().training_step(model, self.model_inputs(inputs), num_items_in_batch)

    def model_inputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Arguments of the model for a micro-batch: (B, T) tensors, and the state if one is carried."""
        return {name: inputs[name] for name in ("input_ids", "shift_labels", "reset_mask", "state") if name in inputs}

    def count_training(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a block to the training metrics of the source: logits (B, T, V), labels (B, T)."""
        counts = self.train_dataset.count_training(logits.detach(), labels)
        if counts is not None:  # stays on the device: reading it would synchronize every step
            self._counts = counts if self._counts is None else self._counts + counts

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the metrics of the streams; called by all processes."""
        self._set_epoch()
        if "loss" in logs:
            logs |= self.training_metrics(logs["loss"])
            logs["bytes_per_second"] = self.step_bytes * self._throughput.steps_per_second(self.state.global_step)
            logs["state_resets"] = self._sum(self._resets)
            logs["bytes_seen"] = self.state.global_step * self.step_bytes
        super().log(logs, start_time)

    def training_metrics(self, loss: float) -> dict[str, float]:
        """Metrics since the last log, given its mean loss in nats; called by all processes."""
        metrics = {"bits_per_byte": loss / math.log(2)}
        if self._counts is not None:
            metrics |= self.train_dataset.training_metrics([self._sum(count) for count in self._counts.tolist()])
            self._counts = None
        return metrics

    def _set_epoch(self) -> None:
        if self.train_dataset is not None:
            self.state.epoch = self.state.global_step * self.step_bytes / self.train_dataset.tokens_per_epoch

    def _read_settings(self) -> dict[str, Any]:
        return super()._read_settings() | {
            "regime": self.args.regime,
            "streams": self.num_streams,
            "block_size": self.args.block_size,
            "state_carried": self.carried is not None,
            "data_seed": self.data_seed,
        }

    # ---- Checkpoints ----

    def _start_run(self) -> None:
        if self.carried is not None:
            self.carried.clear()
        self._positions: dict[int, torch.Tensor] = {}
        self._start_positions: torch.Tensor | None = None
        self._resets = 0
        self._counts: torch.Tensor | None = None  # of the source's training metrics, since the last log

    def _stream_run(self) -> StreamRun:
        return StreamRun(
            num_streams=self.num_streams,
            block_size=self.args.block_size,
            regime=self.args.regime,
            data_seed=self.data_seed,
            corpus_name=self.train_dataset.name,
            corpus_fingerprint=self.train_dataset.fingerprint,
            num_processes=self.args.world_size,
        )

    def _save_run(self, directory: str) -> None:
        """Write position and carried tensors of every stream."""
        if self.args.should_save:
            save_stream_run(self._stream_run(), self.state.global_step, directory)
        streams = self._local_streams()
        groups = streams[:: self.args.per_device_train_batch_size].tolist()
        state = {} if self.carried is None else self.carried.save(groups)
        positions = torch.stack([self._positions[stream] for stream in streams.tolist()])
        save_streams(directory, self.args.process_index, streams, positions, state)

    def _load_run(self, checkpoint: str) -> None:
        """Check that the streams are the same, then restore positions and carried tensors."""
        self._require_train_corpus()
        stored = check_stream_run(checkpoint, self._stream_run())
        self._start_positions = load_positions(checkpoint, stored)
        if self.carried is None:
            return
        streams = self._local_streams()
        try:
            state = load_states(checkpoint, stored, streams)
            self.carried.load(state, streams, self.args.per_device_train_batch_size)
        except ValueError as error:
            raise ValueError(f"The checkpoint {checkpoint!r} has the states of another model: {error}") from error

    def _process_state(self) -> dict[str, Any]:
        return {"state_resets": self._resets, "unlogged_answers": self._counts}

    def _load_process_state(self, state: dict[str, Any]) -> None:
        self._resets, counts = state["state_resets"], state["unlogged_answers"]
        self._counts = None if counts is None else counts.to(self.args.device)

    # ---- Evaluation ----

    def record_sample(self) -> None:
        """Record a continuation of the beginning of a held-out document in `provenance`, for the card."""
        source, tokenizer = self.eval_dataset, self.processing_class
        if not isinstance(source, Corpus) or source.unit != "byte" or not hasattr(tokenizer, "decode_bytes"):
            return
        provenance, prompt = self.provenance, prompt_from(source, tokenizer)
        before = provenance.sample
        if prompt is None or (before is not None and before.weights == provenance.weights):
            return
        text = generate_samples(self.trained_model, tokenizer, [prompt], _SAMPLE_BYTES, temperature=_TEMPERATURE)[0]
        provenance.sample = Sample(redact(prompt), redact(text), provenance.weights, _TEMPERATURE)

    def evaluate(
        self,
        eval_dataset: EpisodeSource | dict[str, EpisodeSource] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate on held-out episodes, starting from zero states; training is not affected.

        Each process evaluates its share of the episodes, so the result does not depend on the number of processes.

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
        with self._throughput.paused():
            metrics = self.measure(source)
        seconds = time.time() - begin
        words = source.describe_result(metrics)
        carries = self.args.eval_carry_state and supports_recurrent_state(with_state(self.trained_model))
        self._record_result(source, metrics, block_size=self.args.eval_block_size, state_carried=carries)
        metrics["runtime"] = round(seconds, 4)
        if "num_bytes" in metrics:
            metrics["bytes_per_second"] = round(metrics["num_bytes"] / seconds, 1)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        if self._progress is not None and metric_key_prefix == "eval":
            self._progress.show_evaluation(self.state, words)
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
        model, sums = self._evaluation_model(), {}
        with self._stoppable(model):
            sums = source.evaluate(model, share)
        return source.evaluation_metrics({name: self._sum(value) for name, value in sums.items()})

    def _evaluation_model(self) -> PreTrainedModel:
        """The trained model as it is run in evaluation."""
        if self.accelerator._models:
            return self.model
        # Before training, the model is not prepared for mixed precision yet.
        return self.accelerator.prepare_model(self.model, evaluation_mode=True)


def _facts(args: MultiStreamTrainingArguments, model: torch.nn.Module, sources: dict[str, Any]) -> dict[str, Any]:
    """Everything about a run that all of its processes need to have alike, by name.

    Data come first: arguments may be derived from them.
    """
    facts = {}
    for argument, source in sources.items():
        parts = source.items() if isinstance(source, dict) else [("", source)]
        facts |= {f"{argument} {name}".strip(): part and (part.name, part.fingerprint) for name, part in parts}
    facts |= {name: value for name, value in shareable_arguments(args).items() if name not in _OF_A_PROCESS}
    config = model.config.to_dict() if hasattr(model, "config") else {}
    return facts | {f"{name} of the model": value for name, value in config.items()}
