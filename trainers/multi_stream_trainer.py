"""Training on continuous streams: blocks of many parallel rows of episodes, the state carried from block to block."""

import json
import math
import os
import random
import shutil
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub import HfApi
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState, ProgressCallback
from transformers.trainer_utils import HubStrategy, rotate_checkpoints
from transformers.utils import PushInProgress, logging

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
from hf_recurrent.trainers.checkpoint_files import (
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
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments
from hf_recurrent.trainers.stream_checkpoint import (
    STREAMS_FILE,
    StreamRun,
    check_stream_run,
    load_positions,
    load_states,
    save_stream_run,
    save_streams,
    streams_rank_file,
)
from hf_recurrent.trainers.training_callbacks import BytesProgressCallback, SampleCallback, Throughput

logger = logging.get_logger(__name__)

TRAINER_STATE_FILE = "trainer_state.json"
WEIGHTS_FILE, WEIGHTS_INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"


class MultiStreamTrainer(Trainer):
    """A `Trainer` whose batches are blocks of continuous streams, with the recurrent state carried between them.

    Streams = `per_device_train_batch_size` × processes × `gradient_accumulation_steps`. An accumulation step is
    another group of streams with a state of its own, and the loss is the mean over all targets of a step, so that
    8 × 1, 4 × 2 accumulated and two processes of 4 are the same training. The state is handed on detached: gradients
    reach back one block.

    Models without `supports_recurrent_state` (stock Llama, Mamba2) are trained on the same batches with nothing to
    carry: each block is all they see.

    A checkpoint holds everything that training depends on; continuing it is the uninterrupted run, bit for bit, also
    with another number of processes as long as the streams are the same. It appears under its name only when it is
    complete, holds tensors as safetensors and everything else as JSON, and reading it executes nothing.

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
        self._throughput = Throughput()
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(BytesProgressCallback())
        if args.sample_every:
            self.add_callback(
                SampleCallback(
                    processing_class, args.sample_prompts, args.sample_every, args.sample_bytes, self._throughput
                )
            )
        self._states: dict[int, RecurrentState] = {}
        self._positions: dict[int, torch.Tensor] = {}
        self._final_state: RecurrentState | None = None
        self._start_positions: torch.Tensor | None = None
        self._resets = 0
        self._answers: torch.Tensor | None = None  # (right, asked) since the last log
        self._eval_metrics: dict[str, float] = {}

    # ---- Streams ----

    @property
    def num_streams(self) -> int:
        """Streams over all processes and accumulation steps."""
        return self.args.per_device_train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps

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

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """All that `Trainer` decays but what the model says has no natural place at zero."""
        names = super().get_decay_parameter_names(model)
        if not hasattr(self.model, "parameters_without_weight_decay"):
            return names
        exempt = self.model.parameters_without_weight_decay()
        return [name for name in names if name not in exempt]

    def set_initial_training_values(self, args, dataloader):
        """One endless pass, cut after `num_training_steps`."""
        steps = self.num_training_steps
        return (sys.maxsize, steps, steps * self.num_streams, steps * self.num_streams, self.num_streams,
                steps * args.gradient_accumulation_steps, steps)  # fmt: skip

    # What streams carry from block to block, and checkpoints hold; a trainer with more than the state extends these.

    def _init_carried(self, batch_size: int, device: torch.device | str) -> RecurrentState:
        return self.model.init_state(batch_size, device=device)

    def _carried(self, group: int) -> RecurrentState:
        return self._states[group]

    def _carry(self, group: int, carried: RecurrentState) -> None:
        self._states[group] = carried

    # ---- Steps ----

    def train(self, resume_from_checkpoint: str | bool | None = None, trial=None, ignore_keys_for_eval=None):
        """Train, from a checkpoint where one is given: a path, or True for the last complete one in `output_dir`.

        Raises:
            ValueError: there is no such checkpoint, it is incomplete or damaged, or it belongs to other streams,
                another corpus or a model of another shape.
        """
        checkpoint = self._find_checkpoint(resume_from_checkpoint)
        self._states, self._positions, self._resets, self._start_positions = {}, {}, 0, None
        self._answers = None
        if checkpoint is not None:
            self._load_streams(checkpoint)
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
        batch = {name: inputs[name] for name in ("input_ids", "shift_labels", "reset_mask")}
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
            logs["bits_per_byte"] = logs["loss"] / math.log(2)
            logs["bytes_per_second"] = self.step_bytes * self._throughput.steps_per_second(self.state.global_step)
            logs["state_resets"] = self._sum(self._resets)
            logs["bytes_seen"] = self.state.global_step * self.step_bytes
            if self._answers is not None:
                right, asked = (self._sum(count) for count in self._answers.tolist())
                logs["accuracy"] = right / max(asked, 1)
                self._answers = None
        super().log(logs, start_time)

    def _set_epoch(self) -> None:
        if self.train_dataset is not None:
            self.state.epoch = self.state.global_step * self.step_bytes / self.train_dataset.num_bytes

    def _sum(self, value: float) -> float | int:
        """The sum of a number over all processes."""
        dtype = torch.float64 if isinstance(value, float) and self.args.device.type != "mps" else None
        total = self.accelerator.reduce(torch.tensor([value], dtype=dtype, device=self.args.device), reduction="sum")
        return total.item()

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
            metrics = self._answer_metrics(corpus) if isinstance(corpus, Task) else self._byte_metrics(corpus)
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

    # ---- Saving ----

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Model and tokenizer, written beside and moved in; no pickled arguments."""
        output_dir = self.args.output_dir if output_dir is None else output_dir
        if not self.args.should_save:
            return
        staging = os.path.join(output_dir, f"{STAGING_PREFIX}model")
        shutil.rmtree(staging, ignore_errors=True)
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        model.save_pretrained(staging, state_dict=state_dict)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(staging)
        publish_files(staging, output_dir)

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
            self._save_streams(staging)
        best = os.path.join(run_dir, f"checkpoint-{self.state.best_global_step}")
        if self.state.best_global_step and (best == final or os.path.isdir(best)):
            self.state.best_model_checkpoint = best
        if self.args.should_save:
            self._save_trainer_state(staging)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
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
            "state_resets": self._resets,
            "unlogged_answers": self._answers,
        }  # fmt: skip
        save_tree(tree, output_dir, _process_file(self.args.process_index))

    def _save_streams(self, output_dir: str) -> None:
        if self.args.should_save:
            save_stream_run(self._stream_run(), self.state.global_step, output_dir)
        streams = self._local_streams()
        groups = streams[:: self.args.per_device_train_batch_size].tolist()
        state = concatenate_states([self._carried(group) for group in groups]) if self.carries_state else {}
        positions = torch.stack([self._positions[stream] for stream in streams.tolist()])
        save_streams(output_dir, self.args.process_index, streams, positions, state)

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

    def _load_streams(self, checkpoint: str) -> None:
        """Check that this run can continue the checkpoint, and take over positions and states."""
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

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """Weights from safetensors, shapes checked first."""
        model = self.model if model is None else model
        if os.path.isfile(os.path.join(resume_from_checkpoint, ADAPTER_FILE)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        index = os.path.join(resume_from_checkpoint, WEIGHTS_INDEX_FILE)
        names = sorted(set(read_json(index)["weight_map"].values())) if os.path.isfile(index) else [WEIGHTS_FILE]
        paths = [os.path.join(resume_from_checkpoint, name) for name in names]
        own = model.state_dict()
        _check_weights(paths, own, set(getattr(model, "all_tied_weights_keys", None) or ()), resume_from_checkpoint)
        for path in paths:
            model.load_state_dict(load_file(path), strict=False)
        model.tie_weights()

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
        stored_processes = read_json(os.path.join(checkpoint, STREAMS_FILE))["num_processes"]
        rank = self.args.process_index
        trees = [load_tree(checkpoint, _process_file(other)) for other in range(stored_processes)]
        tree = trees[min(rank, stored_processes - 1)]
        random.setstate(tree["python"])
        kind, key, position, has_gauss, gauss = tree["numpy"]
        np.random.set_state((kind, np.array(key, dtype=np.uint32), position, has_gauss, gauss))
        torch.random.set_rng_state(tree["torch"])
        if tree["cuda"] is not None and self.args.device.type == "cuda":
            torch.cuda.set_rng_state(tree["cuda"])
        answers = tree.get("unlogged_answers")  # absent in checkpoints of before there were tasks
        if stored_processes == self.args.world_size:
            self._tr_loss, self._resets = tree["unlogged_loss"].to(self.args.device), tree["state_resets"]
        else:
            # Logs average the losses and add the resets of all processes.
            self._tr_loss = torch.stack([other["unlogged_loss"] for other in trees]).mean(0).to(self.args.device)
            self._resets = sum(other["state_resets"] for other in trees) if rank == 0 else 0
            if answers is not None:
                answers = sum(other["unlogged_answers"] for other in trees) * (rank == 0)
        self._answers = None if answers is None else answers.to(self.args.device)
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
            self.accelerator.unwrap_model(self.model, keep_torch_compile=False),
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


def _missing_part(checkpoint: str) -> str | None:
    """The first file that a complete checkpoint has and this one has not."""
    names = [STREAMS_FILE, TRAINER_STATE_FILE, "optimizer.json", "optimizer.safetensors", "scheduler.json"]
    if os.path.isfile(os.path.join(checkpoint, STREAMS_FILE)):
        for rank in range(read_json(os.path.join(checkpoint, STREAMS_FILE))["num_processes"]):
            process = _process_file(rank)
            names += [streams_rank_file(rank), f"{process}.json", f"{process}.safetensors"]
    for name in names:
        if not os.path.isfile(os.path.join(checkpoint, name)):
            return name
    weights = (WEIGHTS_FILE, WEIGHTS_INDEX_FILE, ADAPTER_FILE)
    return None if any(os.path.isfile(os.path.join(checkpoint, name)) for name in weights) else WEIGHTS_FILE


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
