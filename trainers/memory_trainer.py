"""`MemoryTrainer`: base class of `SmtTrainer` and `DmtTrainer`, which train an RNN on its teacher's memories."""

import copy
import math
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from hf_recurrent.checkpoints.fingerprints import weights_fingerprint
from hf_recurrent.checkpoints.provenance_files import base_of, find_provenance
from hf_recurrent.checkpoints.records import Phase, Teacher
from hf_recurrent.data.episode_source import EpisodeSource
from hf_recurrent.learning_rules.optimizers import frozen
from hf_recurrent.modeling.smt.modeling_smt_rnn import SmtRnnForCausalLM, check_readout_match
from hf_recurrent.modeling.smt.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.trainers.block_trainer import BlockTrainer
from hf_recurrent.trainers.smt.metrics import measure_memories
from hf_recurrent.trainers.smt.student_and_teacher import StudentAndTeacher
from hf_recurrent.trainers.smt.windows import choose_anchors, choose_cuts
from hf_recurrent.trainers.smt_arguments import MemoryTrainingArguments

TEACHER_FOLDER = "teacher"


class MemoryTrainer(BlockTrainer):
    """Trains a [`StudentAndTeacher`] on independent blocks; base class of [`SmtTrainer`] and [`DmtTrainer`].

    Checkpoints and the final model hold the RNN, loadable by `from_pretrained`, and the teacher in the subdirectory
    `teacher`. `evaluate()` runs the RNN on its own, as [`MultiStreamTrainer`] does, and compares it with the teacher
    ([`measure_memories`]) on `eval_windows` held-out blocks. See the subclasses for arguments and errors.
    """

    args: MemoryTrainingArguments
    shards_by_layer = False  # a step calls methods of both models, many times
    predictive_loss: str  # the loss that logs report as bits per byte

    def __init__(
        self,
        model: SmtRnnForCausalLM,
        teacher: SmtTeacherModel,
        args: MemoryTrainingArguments,
        train_corpus: EpisodeSource | None = None,
        eval_corpus: EpisodeSource | dict[str, EpisodeSource] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
    ):
        check_readout_match(model.config, teacher.config)
        episode_length = None if train_corpus is None else train_corpus.episode_length
        if episode_length is not None and args.chooses_block_size:
            args = copy.copy(args)
            args.block_size = episode_length
        elif episode_length is None and args.block_size < args.shortest_block:
            parts = " + ".join(f"`{name}` {getattr(args, name)}" for name in args.block_parts)
            raise ValueError(f"`block_size` is {args.block_size}; it must be {args.shortest_block} or more ({parts}).")
        self.student, self.teacher = model, teacher
        self._provenance, self._base = find_provenance(model), base_of(model)
        self._context_length = min(args.context_length, args.block_size)
        objective = self._build_objective(args)
        self._provenance.weights = weights_fingerprint(model)  # SMT has copied the teacher's decoder
        super().__init__(objective, args, train_corpus, eval_corpus, processing_class, callbacks, optimizers)

    # ---- Defined by the subclasses ----

    def _build_objective(self, args: MemoryTrainingArguments) -> StudentAndTeacher:
        """Build the module whose forward pass returns the losses."""
        raise NotImplementedError

    def train(self, resume_from_checkpoint: str | bool | None = None, trial=None, ignore_keys_for_eval=None):
        """Train, optionally from a checkpoint; see [`RecurrentTrainer.train`]."""
        with frozen(*self.accelerator.unwrap_model(self.model).frozen_modules):
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def model_inputs(self, inputs):
        """The block (B, T), its `anchors` (B, positions), and additional resets where a context is cut."""
        batch = super().model_inputs(inputs)
        streams, positions = (inputs[name].cpu().numpy() for name in ("stream_indices", "stream_positions"))
        first = self.train_dataset.first_anchor(self._context_length)
        last, num_anchors = self.args.last_anchor(first), self.args.num_anchors(first)
        anchors = choose_anchors(streams, positions, self.data_seed, first, last, num_anchors)
        reset_mask = batch["reset_mask"]
        batch["anchors"] = torch.from_numpy(anchors).to(reset_mask.device)
        if first and self.args.start_share:
            cuts = torch.from_numpy(self._choose_cuts(streams, positions, anchors)).to(reset_mask.device)
            batch["reset_mask"] = reset_mask | (torch.arange(reset_mask.shape[1], device=cuts.device) == cuts[:, None])
        return batch

    def _choose_cuts(self, streams: np.ndarray, positions: np.ndarray, anchors: np.ndarray) -> np.ndarray:
        """Position of each block (B,) at which an episode is made to begin; -1 for none."""
        return choose_cuts(streams, positions, self.data_seed, anchors, self._context_length, self.args.start_share)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Mean loss of the blocks of a micro-batch, divided by the number of micro-batches."""
        losses = model(**inputs)
        parts = {name: value.detach() for name, value in vars(losses).items() if name != "total"}
        if model.training:
            count = self._loss_parts.pop("count", 0) + 1
            self._loss_parts = {name: value + self._loss_parts.get(name, 0) for name, value in parts.items()}
            self._loss_parts["count"] = count
        loss = losses.total / self.args.gradient_accumulation_steps
        return (loss, losses) if return_outputs else loss

    def training_metrics(self, loss: float) -> dict[str, float]:
        parts = dict(self._loss_parts)
        count = self._sum(parts.pop("count", 0)) or 1
        self._loss_parts = {}
        metrics = {name: self._sum(float(value)) / count for name, value in parts.items()}
        return {"bits_per_byte": metrics[self.predictive_loss] / math.log(2), **metrics}

    @property
    def trained_model(self) -> SmtRnnForCausalLM:
        return self.student

    def _evaluation_model(self) -> PreTrainedModel:
        return self.student

    def measure(self, source: EpisodeSource) -> dict[str, float]:
        metrics = super().measure(source)
        if not self.args.eval_windows:
            return metrics
        # Every process measures all of the few blocks.
        blocks = source.held_out_blocks(self.args.eval_windows, self.args.block_size)
        with self.sharding.joined():
            return metrics | measure_memories(
                self.student,
                self.teacher,
                **blocks,
                start=source.first_anchor(self._context_length),
                context_length=min(self.args.context_length, blocks["input_ids"].shape[1]),
                batch_size=self.args.per_device_eval_batch_size,
            )

    def _read_settings(self) -> dict[str, Any]:
        objective = self.accelerator.unwrap_model(self.model)
        return super()._read_settings() | {
            "context_length": objective.context_length,
            "timesteps": self.args.timesteps,
            "start_share": self.args.start_share,
        }

    def _new_phase(self) -> Phase:
        """A phase with the training of the teacher, unless that is known from the phases of the RNN."""
        phase = super()._new_phase()
        phase.base = phase.base and self._base
        teacher = find_provenance(self.teacher)
        known = self.provenance.phases[: len(teacher.phases)]
        if teacher.phases:
            phase.teacher = Teacher(
                weights_fingerprint(self.teacher), [] if teacher.phases == known else teacher.phases
            )
        self.provenance.gaps += [f"Teacher: {gap}" for gap in teacher.gaps if gap not in self.provenance.gaps]
        return phase

    def _start_run(self) -> None:
        super()._start_run()
        self._loss_parts: dict[str, Any] = {}  # sums of losses since the last log, and their count

    def _process_state(self) -> dict[str, Any]:
        return super()._process_state() | {"unlogged_parts": self._loss_parts}

    def _load_process_state(self, state: dict[str, Any]) -> None:
        super()._load_process_state(state)
        self._loss_parts = {
            name: value.to(self.args.device) if isinstance(value, torch.Tensor) else value
            for name, value in state["unlogged_parts"].items()
        }

    def _saved_models(self) -> dict[str, PreTrainedModel]:
        return {"": self.student, TEACHER_FOLDER: self.teacher}
