"""Training on continuous streams: blocks of many parallel rows of episodes, the state carried from block to block."""

import math
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import ProgressCallback
from transformers.utils import logging

from hf_recurrent.bits_per_byte import evaluate_bits_per_byte, supports_recurrent_state
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.streams import IIDDataset, MultiStreamDataset
from hf_recurrent.modeling.recurrent_state import (
    RecurrentState,
    check_state,
    concatenate_states,
    detach_state,
    select_state,
)
from hf_recurrent.tasks.evaluation import check_vocabulary, count_answers, summarize_answers
from hf_recurrent.tasks.task import Task
from hf_recurrent.tasks.task_streams import TaskStreams
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments
from hf_recurrent.trainers.recurrent_trainer import RecurrentTrainer
from hf_recurrent.trainers.stream_checkpoint import (
    StreamRun,
    check_stream_run,
    load_positions,
    load_states,
    save_stream_run,
    save_streams,
)
from hf_recurrent.trainers.training_callbacks import BytesProgressCallback, SampleCallback

logger = logging.get_logger(__name__)


class MultiStreamTrainer(RecurrentTrainer):
    """A `Trainer` whose batches are blocks of continuous streams, with the recurrent state carried between them.

    Streams = `per_device_train_batch_size` × processes × `gradient_accumulation_steps`. An accumulation step is
    another group of streams with a state of its own, and the loss is the mean over all targets of a step, so that
    8 × 1, 4 × 2 accumulated and two processes of 4 are the same training. The state is handed on detached: gradients
    reach back one block.

    Models without `supports_recurrent_state` (stock Llama, Mamba2) are trained on the same batches with nothing to
    carry: each block is all they see.

    A checkpoint ([`RecurrentTrainer`]) can be continued with another number of processes as long as the streams are
    the same.

    `evaluate()` reads whole held-out episodes from zero states ([`evaluate_bits_per_byte`]), every process its share,
    and reports `eval_loss` (nats per target) and `eval_bits_per_byte`. Logs hold `bits_per_byte`, `bytes_per_second`,
    `state_resets` and `bytes_seen`; `epoch` is bytes seen / bytes of the corpus.

    A [`Task`] may stand in for a corpus: its examples are the episodes ([`TaskStreams`]), and a byte is a token.
    `evaluate()` then asks its validation examples ([`evaluate_task`]) and reports `eval_accuracy`, `eval_exact_match`
    and `eval_loss`; logs hold the `accuracy` of the answers since the last one, and `loss` is the mean over steps of
    the nats per answer. Where no state is carried, each block has to be one example.

    Args:
        model: a causal language model over the corpus' token ids.
        args: [`MultiStreamTrainingArguments`].
        train_corpus: episodes to train on, or a task.
        eval_corpus: held-out episodes or a task, or a dictionary of several such by name.
        processing_class: the tokenizer; saved with the model, and needed for samples.
        callbacks: further callbacks.
        optimizers: an optimizer and a schedule of your own.

    Raises:
        ValueError: a corpus is empty or has more token ids than the model's vocabulary, a block is longer than the
            model's positions, there is no tokenizer to print samples with, or a task is endless and nothing says how
            long to train, or has not one block per example where that is needed.
    """

    # The loss is already the sum over the whole step's targets divided by their number.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel,
        args: MultiStreamTrainingArguments,
        train_corpus: Corpus | Task | None = None,
        eval_corpus: Corpus | Task | dict[str, Corpus | Task] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
    ):
        if args.n_gpu > 1:
            # nn.DataParallel would split the streams anew at every block.
            logger.warning("Using one of %d GPUs; start one process per GPU with `accelerate launch`.", args.n_gpu)
            args._n_gpu = 1
        self.carries_state = supports_recurrent_state(model) and args.regime == "multi_stream"
        evaluated = eval_corpus.values() if isinstance(eval_corpus, dict) else (eval_corpus,)
        for name, corpus in [("train_corpus", train_corpus), *(("eval_corpus", corpus) for corpus in evaluated)]:
            if corpus is not None:
                _check_corpus(name, corpus, model)
        if isinstance(train_corpus, Task):
            _check_training_task(train_corpus, args, self.carries_state)
        _check_positions(model, args, [corpus for corpus in (train_corpus, *evaluated) if corpus is not None])
        if args.sample_every and processing_class is None:
            raise ValueError(f"`sample_every` is {args.sample_every}, but samples need a `processing_class`.")
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_corpus,
            eval_dataset=eval_corpus,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(BytesProgressCallback())
        if args.sample_every:
            self.add_callback(
                SampleCallback(
                    processing_class,
                    args.sample_prompts,
                    args.sample_every,
                    args.sample_bytes,
                    self._throughput,
                    lambda: self.trained_model,
                )
            )
        self._final_state: RecurrentState | None = None
        self._start_run()

    # ---- Streams ----

    @property
    def num_streams(self) -> int:
        """Streams over all processes and accumulation steps."""
        return self.step_rows

    @property
    def step_bytes(self) -> int:
        """Bytes that one optimizer step reads."""
        return self.num_streams * self.args.block_size

    @property
    def num_training_steps(self) -> int:
        """`max_steps`, else as many as `train_bytes` or `num_train_epochs` need."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        budget = self.args.train_bytes or self.args.num_train_epochs * self.train_dataset.num_bytes
        return max(1, math.ceil(budget / self.step_bytes))

    def _local_streams(self) -> torch.Tensor:
        """Global numbers of this process's streams, in the order of its micro-batches."""
        batch_size, processes = self.args.per_device_train_batch_size, self.args.world_size
        first = torch.arange(self.args.gradient_accumulation_steps) * processes + self.args.process_index
        return (first[:, None] * batch_size + torch.arange(batch_size)).flatten()

    def _stream_run(self) -> StreamRun:
        return StreamRun(
            num_streams=self.num_streams,
            block_size=self.args.block_size,
            regime=self.args.regime,
            data_seed=self._data_seed,
            corpus_name=self.train_dataset.name,
            corpus_fingerprint=self.train_dataset.fingerprint,
            num_processes=self.args.world_size,
        )

    @property
    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def get_train_dataloader(self) -> DataLoader:
        """Ready batches of this process's streams; not prepared by accelerate, which would deal the rows anew."""
        if self.train_dataset is None:
            raise ValueError("`train_corpus` is None; training needs a corpus.")
        args = self.args
        kind = MultiStreamDataset if args.regime == "multi_stream" else IIDDataset
        streams = (TaskStreams if isinstance(self.train_dataset, Task) else kind)(
            self.train_dataset,
            self.num_streams,
            args.block_size,
            seed=self._data_seed,
            stream_indices=self._local_streams().tolist(),
            accumulation_groups=args.gradient_accumulation_steps,
            positions=None if self._start_positions is None else self._start_positions.numpy(),
        )
        workers = args.dataloader_num_workers
        return DataLoader(
            streams,
            batch_size=None,
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
            prefetch_factor=args.dataloader_prefetch_factor if workers else None,
            persistent_workers=args.dataloader_persistent_workers and workers > 0,
            # Its own generator: starting a loader draws a number, which would change dropout.
            generator=torch.Generator().manual_seed(self._data_seed),
        )

    # What streams carry from block to block, and checkpoints hold; a trainer with more than the state extends these.

    def _init_carried(self, batch_size: int, device: torch.device | str) -> RecurrentState:
        return self.model.init_state(batch_size, device=device)

    def _carried(self, group: int) -> RecurrentState:
        return self._states[group]

    def _carry(self, group: int, carried: RecurrentState) -> None:
        self._states[group] = carried

    # ---- Steps ----

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor:
        """Targets of one optimizer step, over all micro-batches and processes."""
        count = sum(int(batch["shift_labels"].ne(-100).sum()) for batch in batch_samples)
        total = self.accelerator.reduce(torch.tensor([count], device=device), reduction="sum")
        return total.squeeze(0).clamp(min=1)

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """One micro-batch: the state of its group of streams goes in, and what comes out is kept."""
        streams = inputs["stream_indices"]
        group = int(streams[0])
        self._resets += int(inputs["reset_mask"].sum())
        batch = self._model_inputs(inputs)
        if self.carries_state:
            if group not in self._states:
                self._states[group] = self.model.init_state(len(streams), device=self.args.device)
            batch["state"] = self._states[group]
        loss = super().training_step(model, batch, num_items_in_batch)
        if self.carries_state:
            self._states[group], self._final_state = self._final_state, None
        # Only now: a position is where the stream stands after what was trained on, not after what was fetched.
        self._positions |= zip(streams.tolist(), inputs["stream_positions"], strict=True)
        return loss

    def _model_inputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the model gets of a micro-batch, but for the state."""
        return {name: inputs[name] for name in ("input_ids", "shift_labels", "reset_mask")}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Sum of the nats of a micro-batch / targets of the whole step; keeps the final state, detached."""
        labels = inputs["shift_labels"]
        if num_items_in_batch is None:
            num_items_in_batch = labels.ne(-100).sum().clamp(min=1)
        if supports_recurrent_state(self.model):
            outputs = model(**inputs, use_cache=self.carries_state, num_items_in_batch=num_items_in_batch)
            loss = outputs.loss
            if self.carries_state:
                self._final_state = detach_state(outputs.state)
        else:
            outputs = model(input_ids=inputs["input_ids"], use_cache=False)
            logits = outputs.logits.flatten(0, 1)
            loss = F.cross_entropy(logits.float(), labels.flatten(), reduction="sum") / num_items_in_batch
        if model.training and isinstance(self.train_dataset, Task):
            self._count_answers(outputs.logits, labels)
        # Processes average their gradients, but each has already divided by the targets of all.
        loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def _count_answers(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        # Numbers stay on the device: reading them would make every step wait.
        counts = torch.stack([(logits.detach().argmax(-1) == labels).sum(), labels.ne(-100).sum()])
        self._answers = counts if self._answers is None else self._answers + counts

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds what streams are measured in; called by all processes."""
        self._set_epoch()
        if "loss" in logs:
            logs |= self._loss_metrics(logs["loss"])
            logs["bytes_per_second"] = self.step_bytes * self._throughput.steps_per_second(self.state.global_step)
            logs["state_resets"] = self._sum(self._resets)
            logs["bytes_seen"] = self.state.global_step * self.step_bytes
        super().log(logs, start_time)

    def _loss_metrics(self, loss: float) -> dict[str, float]:
        """What was measured since the last log, whose mean loss is given; called by all processes."""
        metrics = {"bits_per_byte": loss / math.log(2)}
        if self._answers is not None:
            right, asked = (self._sum(count) for count in self._answers.tolist())
            metrics["accuracy"] = right / max(asked, 1)
            self._answers = None
        return metrics

    def _set_epoch(self) -> None:
        if self.train_dataset is not None:
            self.state.epoch = self.state.global_step * self.step_bytes / self.train_dataset.num_bytes

    # ---- Checkpoints ----

    def _start_run(self) -> None:
        self._states: dict[int, RecurrentState] = {}
        self._positions: dict[int, torch.Tensor] = {}
        self._start_positions: torch.Tensor | None = None
        self._resets = 0
        self._answers: torch.Tensor | None = None  # (right, asked) since the last log

    def _save_run(self, directory: str) -> None:
        """Where every stream stands, and what it carries."""
        if self.args.should_save:
            save_stream_run(self._stream_run(), self.state.global_step, directory)
        streams = self._local_streams()
        groups = streams[:: self.args.per_device_train_batch_size].tolist()
        state = concatenate_states([self._carried(group) for group in groups]) if self.carries_state else {}
        positions = torch.stack([self._positions[stream] for stream in streams.tolist()])
        save_streams(directory, self.args.process_index, streams, positions, state)

    def _load_run(self, checkpoint: str) -> None:
        """Check that the streams are the same, and take over positions and states."""
        if self.train_dataset is None:
            raise ValueError("`train_corpus` is None; training needs a corpus.")
        stored = check_stream_run(checkpoint, self._stream_run())
        self._start_positions = load_positions(checkpoint, stored)
        if not self.carries_state:
            return
        streams, batch_size = self._local_streams(), self.args.per_device_train_batch_size
        state = load_states(checkpoint, stored, streams)
        empty = self._init_carried(len(streams), "meta")
        try:
            check_state(state, {name: tensor.shape for name, tensor in empty.items()})
        except ValueError as error:
            raise ValueError(f"The checkpoint {checkpoint!r} has the states of another model: {error}") from error
        for rows in torch.arange(len(streams)).split(batch_size):
            part = select_state(state, rows)
            carried = {name: tensor.to(self.args.device, empty[name].dtype) for name, tensor in part.items()}
            self._carry(int(streams[rows[0]]), carried)

    def _process_state(self) -> dict[str, Any]:
        return {"state_resets": self._resets, "unlogged_answers": self._answers}

    def _load_process_state(self, state: dict[str, Any]) -> None:
        self._resets, answers = state["state_resets"], state["unlogged_answers"]
        self._answers = None if answers is None else answers.to(self.args.device)

    # ---- Evaluation ----

    def evaluate(
        self,
        eval_dataset: Corpus | Task | dict[str, Corpus | Task] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Bits per byte of whole episodes, or answers to whole examples, from zero states; training is not touched.

        Every process reads its own share of the episodes, so the result does not depend on their number.
        """
        corpus = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(corpus, dict):
            metrics = {}
            for name, part in corpus.items():
                metrics |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        if corpus is None:
            raise ValueError("`eval_dataset` is None; evaluation needs a corpus.")
        _check_corpus("eval_dataset", corpus, self.model)
        self._memory_tracker.start()
        begin = time.time()
        with self._throughput.paused():
            metrics = self._measure(corpus)
        seconds = time.time() - begin
        metrics["runtime"] = round(seconds, 4)
        if "num_bytes" in metrics:
            metrics["bytes_per_second"] = round(metrics["num_bytes"] / seconds, 1)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self._eval_metrics = dict(metrics)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._memory_tracker.stop_and_update_metrics(metrics)
        return metrics

    def _measure(self, corpus: Corpus | Task) -> dict[str, float]:
        return self._answer_metrics(corpus) if isinstance(corpus, Task) else self._byte_metrics(corpus)

    def _byte_metrics(self, corpus: Corpus) -> dict[str, float]:
        nats = self._sum(self._local_nats(corpus))
        num_targets = corpus.num_bytes - (len(corpus) if corpus.end_token_id is None else 0)
        return {
            "loss": nats / max(num_targets, 1),
            "bits_per_byte": nats / math.log(2) / corpus.num_bytes,
            "num_bytes": int(corpus.num_bytes),
            "num_episodes": len(corpus),
        }

    def _local_nats(self, corpus: Corpus) -> float:
        """Nats of this process's episodes: long ones are dealt first, so that all processes get about as much."""
        order = np.argsort(-np.diff(corpus.offsets), kind="stable")
        mine = np.sort(order[self.args.process_index :: self.args.world_size])
        if not len(mine):
            return 0.0
        return evaluate_bits_per_byte(
            self._evaluation_model(),
            corpus.select(mine) if self.args.world_size > 1 else corpus,
            num_streams=self.args.per_device_eval_batch_size,
            block_size=self.args.eval_block_size,
            carry_state=self.args.eval_carry_state,
            progress=not self.args.disable_tqdm and self.is_world_process_zero() and sys.stderr.isatty(),
        )["nats"]

    def _answer_metrics(self, task: Task) -> dict[str, float]:
        counts = count_answers(
            self._evaluation_model(),
            task,
            np.arange(self.args.process_index, task.num_validation_examples, self.args.world_size),
            batch_size=self.args.per_device_eval_batch_size,
            block_size=self.args.eval_block_size,
        )
        return summarize_answers({name: self._sum(count) for name, count in counts.items()})

    def _evaluation_model(self) -> PreTrainedModel:
        if self.accelerator._models:
            return self.model
        # Outside training nothing has prepared the model for mixed precision yet.
        return self.accelerator.prepare_model(self.model, evaluation_mode=True)


def _check_corpus(argument: str, corpus: Corpus | Task, model: PreTrainedModel) -> None:
    if isinstance(corpus, Task):
        check_vocabulary(argument, corpus, model)
        return
    if not len(corpus) or not corpus.num_bytes:
        raise ValueError(f"`{argument}` {corpus.name!r} is empty; it must hold at least one byte.")
    if corpus.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"`{argument}` {corpus.name!r} has {corpus.vocab_size} token ids, but the model's vocabulary has only "
            f"{model.config.vocab_size}."
        )


def _check_training_task(task: Task, args: MultiStreamTrainingArguments, carries_state: bool) -> None:
    if math.isinf(task.num_bytes) and args.max_steps <= 0 and not args.train_bytes:
        raise ValueError(
            f"`train_corpus` {task.name!r} is endless; give `max_steps` or `train_bytes`, or the task `num_examples`."
        )
    if not carries_state and args.block_size != task.length:
        raise ValueError(
            f"`block_size` is {args.block_size}, but the examples of {task.name!r} have {task.length} steps; the two "
            "must be equal where no state is carried from block to block."
        )


def _check_positions(model: PreTrainedModel, args: MultiStreamTrainingArguments, corpora: list[Corpus | Task]) -> None:
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is None or supports_recurrent_state(model):
        return
    # A task is read example by example, whatever the blocks of evaluation are.
    only_tasks = bool(corpora) and all(isinstance(corpus, Task) for corpus in corpora)
    for name in ("block_size",) if only_tasks else ("block_size", "eval_block_size"):
        if getattr(args, name) > limit:
            raise ValueError(f"`{name}` is {getattr(args, name)}; the model has {limit} positions.")
    for task in corpora:
        if isinstance(task, Task) and task.length > limit:
            raise ValueError(f"{task.name!r} has examples of {task.length} steps; the model has {limit} positions.")
