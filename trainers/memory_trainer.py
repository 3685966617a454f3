"""What the two phases of training on memories have in common: an RNN, its teacher, and positions of blocks."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.streams import IIDDataset
from hf_recurrent.modeling.modeling_smt_rnn import SmtRnnForCausalLM, check_readout_match
from hf_recurrent.modeling.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.tasks.task import Task
from hf_recurrent.trainers.memory_metrics import measure_memories
from hf_recurrent.trainers.memory_windows import choose_anchors, choose_cuts
from hf_recurrent.trainers.multi_stream_trainer import MultiStreamTrainer
from hf_recurrent.trainers.smt_arguments import MemoryTrainingArguments
from hf_recurrent.trainers.smt_objective import StudentAndTeacher

TEACHER_FOLDER = "teacher"


class MemoryTrainer(MultiStreamTrainer):
    """Trains a [`StudentAndTeacher`] on blocks that stand for themselves; base of [`SmtTrainer`] and [`DmtTrainer`].

    A checkpoint, and what is saved at the end, is the RNN's, as `from_pretrained` reads it; the teacher's lies in its
    folder `teacher`. `evaluate()` is that of [`MultiStreamTrainer`] for the RNN on its own, and adds what compares it
    with its teacher ([`measure_memories`]) on `eval_windows` held-out blocks.
    """

    args: MemoryTrainingArguments
    # The loss whose bits the progress bar shows.
    predictive_loss: str

    def __init__(
        self,
        model: SmtRnnForCausalLM,
        teacher: SmtTeacherModel,
        args: MemoryTrainingArguments,
        train_corpus: Corpus | Task | None = None,
        eval_corpus: Corpus | Task | dict[str, Corpus | Task] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
    ):
        check_readout_match(model.config, teacher.config)
        if isinstance(train_corpus, Task) and args.chooses_block_size:
            args.block_size = train_corpus.length
        elif not isinstance(train_corpus, Task) and args.block_size < args.shortest_block:
            parts = " + ".join(f"`{name}` {getattr(args, name)}" for name in args.block_parts)
            raise ValueError(f"`block_size` is {args.block_size}; it must be {args.shortest_block} or more ({parts}).")
        self.student, self.teacher = model, teacher
        # No context is longer than the blocks.
        self._context_length = min(args.context_length, args.block_size)
        super().__init__(
            self._build_objective(model, teacher, args),
            args,
            train_corpus,
            eval_corpus,
            processing_class,
            callbacks,
            optimizers,
        )

    # ---- What the phases differ in ----

    def _build_objective(
        self, student: SmtRnnForCausalLM, teacher: SmtTeacherModel, args: MemoryTrainingArguments
    ) -> StudentAndTeacher:
        """The module whose forward pass gives the losses."""
        raise NotImplementedError

    def _frozen(self) -> list[nn.Module]:
        """Parts that this phase does not train."""
        raise NotImplementedError

    def _last_anchor(self, reads_task: bool) -> int:
        """The last position of a block that can be used."""
        raise NotImplementedError

    # ---- Steps ----

    def _first_anchor(self, reads_task: bool) -> int:
        # Examples of a task begin with their first step; a block of a corpus begins somewhere.
        return 0 if reads_task else self._context_length

    def train(self, resume_from_checkpoint: str | bool | None = None, trial=None, ignore_keys_for_eval=None):
        """Train, from a checkpoint where one is given; see [`MultiStreamTrainer.train`]."""
        with _without_gradients(self._frozen()):
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _model_inputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batch = super()._model_inputs(inputs)
        reads_task = isinstance(self.train_dataset, Task)
        streams, positions = (inputs[name].cpu().numpy() for name in ("stream_indices", "stream_positions"))
        return batch | self._choose_positions(batch["reset_mask"], streams, positions, self.args.timesteps, reads_task)

    def _choose_positions(
        self, reset_mask: torch.Tensor, streams: np.ndarray, positions: np.ndarray, timesteps: int, reads_task: bool
    ) -> dict[str, torch.Tensor]:
        """Anchors, and resets where an episode is taken to begin."""
        first, last = self._first_anchor(reads_task), self._last_anchor(reads_task)
        seed, available = self._data_seed, last - first + 1
        anchors = choose_anchors(streams, positions, seed, first, last, min(timesteps or available, available))
        chosen = {"anchors": torch.from_numpy(anchors).to(reset_mask.device)}
        if not reads_task and self.args.start_share:
            cuts = self._choose_cuts(streams, positions, seed, anchors)
            places = torch.arange(reset_mask.shape[1], device=reset_mask.device)
            chosen["reset_mask"] = reset_mask | (places == torch.from_numpy(cuts)[:, None].to(reset_mask.device))
        return chosen

    def _choose_cuts(self, streams: np.ndarray, positions: np.ndarray, seed: int, anchors: np.ndarray) -> np.ndarray:
        return choose_cuts(streams, positions, seed, anchors, self._context_length, self.args.start_share)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The mean over the blocks of a micro-batch, divided by the number of micro-batches of a step."""
        losses = model(**inputs)
        parts = {name: value.detach() for name, value in vars(losses).items() if name != "total"}
        if model.training:
            count = self._loss_parts.pop("count", 0) + 1
            self._loss_parts = {name: value + self._loss_parts.get(name, 0) for name, value in parts.items()}
            self._loss_parts["count"] = count
        loss = losses.total / self.args.gradient_accumulation_steps
        return (loss, losses) if return_outputs else loss

    def _loss_metrics(self, loss: float) -> dict[str, float]:
        parts = dict(self._loss_parts)
        count = self._sum(parts.pop("count", 0)) or 1
        self._loss_parts = {}
        metrics = {name: self._sum(float(value)) / count for name, value in parts.items()}
        return {"bits_per_byte": metrics[self.predictive_loss] / math.log(2), **metrics}

    # ---- Evaluation ----

    @property
    def trained_model(self) -> SmtRnnForCausalLM:
        """The RNN."""
        return self.student

    def _evaluation_model(self) -> PreTrainedModel:
        return self.trained_model

    def _measure(self, corpus: Corpus | Task) -> dict[str, float]:
        metrics = super()._measure(corpus)
        return metrics | self._memory_metrics(corpus) if self.args.eval_windows else metrics

    def _memory_metrics(self, corpus: Corpus | Task) -> dict[str, float]:
        """Drift and the teacher's loss, on the same blocks whatever the number of processes: there are few."""
        num_rows, reads_task = self.args.eval_windows, isinstance(corpus, Task)
        if reads_task:
            inputs, labels = (
                torch.from_numpy(part) for part in corpus.examples(np.arange(num_rows), split="validation")
            )
            resets = torch.zeros_like(inputs, dtype=torch.bool)
            resets[:, 0] = True
        else:
            block = next(iter(IIDDataset(corpus, num_rows, self.args.block_size, seed=0)))
            inputs, labels, resets = (block[name] for name in ("input_ids", "shift_labels", "reset_mask"))
        return measure_memories(
            self.trained_model,
            self.teacher,
            inputs,
            labels,
            resets,
            start=self._first_anchor(reads_task),
            context_length=min(self.args.context_length, inputs.shape[1]),
            batch_size=self.args.per_device_eval_batch_size,
        )

    # ---- Checkpoints ----

    def _start_run(self) -> None:
        super()._start_run()
        # Sums since the last log, and how many.
        self._loss_parts: dict[str, Any] = {}

    def _process_state(self) -> dict[str, Any]:
        return super()._process_state() | {"unlogged_parts": self._loss_parts}

    def _load_process_state(self, state: dict[str, Any]) -> None:
        super()._load_process_state(state)
        self._loss_parts = {
            name: value.to(self.args.device) if isinstance(value, torch.Tensor) else value
            for name, value in state["unlogged_parts"].items()
        }

    def _saved_models(self) -> dict[str, PreTrainedModel]:
        return {"": self.trained_model, TEACHER_FOLDER: self.teacher}


@contextmanager
def _without_gradients(modules: list[nn.Module]) -> Iterator[None]:
    parameters = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
