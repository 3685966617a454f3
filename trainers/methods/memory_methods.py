"""Supervised Memory Training and DAgger Memory Training (SMT, sections 2.2 and 2.3) as training methods."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.utils import logging

from hf_recurrent.checkpoints.fingerprints import weights_fingerprint
from hf_recurrent.checkpoints.provenance_files import base_of, find_provenance, remember_provenance
from hf_recurrent.checkpoints.records import Phase, Provenance, Teacher
from hf_recurrent.data.episode_source import EpisodeSource
from hf_recurrent.modeling.block.recurrent_state import RecurrentState
from hf_recurrent.modeling.smt.modeling_smt_rnn import SmtRnnForCausalLM, check_readout_match
from hf_recurrent.modeling.smt.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.trainers.methods.training_method import TrainingMethod
from hf_recurrent.trainers.smt.metrics import measure_memories
from hf_recurrent.trainers.smt.smt_objective import DmtObjective, SmtObjective
from hf_recurrent.trainers.smt.student_and_teacher import StudentAndTeacher
from hf_recurrent.trainers.smt.windows import choose_anchors, choose_cuts
from hf_recurrent.trainers.smt_arguments import MemoryTrainingArguments

TEACHER_FOLDER = "teacher"

logger = logging.get_logger(__name__)


class MemoryMethod(TrainingMethod):
    """An RNN learns from the memories of its teacher, on independent blocks; base class of SMT and DMT.

    Both models are trained as one [`StudentAndTeacher`], whose forward pass returns the losses at the anchors of each
    block. Checkpoints hold the RNN, and the teacher in the subdirectory `teacher`.

    Args:
        teacher: the teacher of the model to train.
    """

    args: MemoryTrainingArguments
    loss_is_mean = True
    shards_by_layer = False  # a step calls methods of both models, many times
    predictive_loss: str  # the loss that logs report as bits per byte

    def __init__(self, teacher: SmtTeacherModel):
        self.teacher = teacher

    def build_objective(self) -> StudentAndTeacher:
        """Build the module whose forward pass returns the losses; override it to train by other losses."""
        raise NotImplementedError

    def setup(
        self, model: SmtRnnForCausalLM, args: MemoryTrainingArguments, train_corpus: EpisodeSource | None
    ) -> StudentAndTeacher:
        check_readout_match(model.config, self.teacher.config)
        episode_length = None if train_corpus is None else train_corpus.episode_length
        if episode_length is not None and args.chooses_block_size:
            args.block_size = episode_length
        elif episode_length is None and args.block_size < args.shortest_block:
            parts = " + ".join(f"`{name}` {getattr(args, name)}" for name in args.block_parts)
            raise ValueError(f"`block_size` is {args.block_size}; it must be {args.shortest_block} or more ({parts}).")
        self.model, self.args, self.source = model, args, train_corpus
        self.context_length = min(args.context_length, args.block_size)
        provenance, self._base = find_provenance(model), base_of(model)
        self.objective = self.build_objective()
        provenance.weights = weights_fingerprint(model)  # SMT has copied the teacher's decoder
        remember_provenance(model, provenance)
        return self.objective

    @property
    def first_anchor(self) -> int:
        """First position of a block that has a loss."""
        return self.source.first_anchor(self.context_length)

    # ---- For every block ----

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the objective: the block (B, T) and its `anchors` (B, positions); cut contexts are resets."""
        inputs = {name: batch[name] for name in ("input_ids", "shift_labels", "reset_mask")}
        streams, positions, reset_mask = batch["stream_indices"], batch["stream_positions"], batch["reset_mask"]
        first = self.first_anchor
        last, num_anchors = self.args.last_anchor(first), self.args.num_anchors(first)
        anchors = choose_anchors(streams, positions, self.args.stream_seed, first, last, num_anchors)
        inputs["anchors"] = torch.from_numpy(anchors).to(reset_mask.device)
        if first and self.args.start_share:
            cuts = torch.from_numpy(self.choose_cuts(streams, positions, anchors)).to(reset_mask.device)
            is_cut = torch.arange(reset_mask.shape[1], device=cuts.device) == cuts[:, None]
            inputs["reset_mask"] = reset_mask | is_cut
        return inputs

    def choose_cuts(self, streams: np.ndarray, positions: np.ndarray, anchors: np.ndarray) -> np.ndarray:
        """Position of each block (B,) at which an episode is made to begin; -1 for none."""
        args = self.args
        return choose_cuts(streams, positions, args.stream_seed, anchors, self.context_length, args.start_share)

    def loss(self, model: nn.Module, batch: dict, carried: RecurrentState) -> tuple[torch.Tensor, RecurrentState]:
        """Mean loss of the blocks of a micro-batch; nothing is carried."""
        losses = vars(model(**self.inputs(batch)))
        total, self.num_blocks = losses.pop("total"), self.num_blocks + 1
        for name, value in losses.items():
            self.loss_parts[name] = value.detach() + self.loss_parts.get(name, 0)
        return total, {}

    # ---- Logs and records ----

    def metrics(self, loss: float, total: Callable[[float], float]) -> dict[str, float]:
        count = total(self.num_blocks) or 1
        metrics = {name: total(float(value)) / count for name, value in self.loss_parts.items()}
        self.reset()
        return {"bits_per_byte": metrics[self.predictive_loss] / math.log(2), **metrics}

    def reset(self) -> None:
        super().reset()
        self.loss_parts: dict[str, torch.Tensor] = {}  # sums over the micro-batches since the last log
        self.num_blocks = 0

    def counters(self) -> dict[str, Any]:
        count = {"count": self.num_blocks} if self.num_blocks else {}
        return super().counters() | {"unlogged_parts": self.loss_parts | count}

    def load_counters(self, counters: dict[str, Any]) -> None:
        super().load_counters(counters)
        parts = dict(counters["unlogged_parts"])
        self.num_blocks = parts.pop("count", 0)
        self.loss_parts = {name: value.to(self.args.device) for name, value in parts.items()}

    def settings(self) -> dict[str, Any]:
        return {
            "context_length": self.objective.context_length,
            "timesteps": self.args.timesteps,
            "start_share": self.args.start_share,
        }

    def begin_phase(self, phase: Phase, provenance: Provenance) -> None:
        """Add the training of the teacher, unless that is known from the phases of the RNN."""
        phase.base = phase.base and self._base
        teacher = find_provenance(self.teacher)
        known = provenance.phases[: len(teacher.phases)]
        if teacher.phases:
            phase.teacher = Teacher(
                weights_fingerprint(self.teacher), [] if teacher.phases == known else teacher.phases
            )
        provenance.gaps += [f"Teacher: {gap}" for gap in teacher.gaps if gap not in provenance.gaps]

    # ---- What is saved and evaluated ----

    @property
    def saved_models(self):
        return {"": self.model, TEACHER_FOLDER: self.teacher}

    @property
    def frozen_modules(self) -> list[nn.Module]:
        return self.objective.frozen_modules

    def measure(self, source: EpisodeSource) -> dict[str, float]:
        """Distance of the RNN's memories from the teacher's, on `eval_windows` blocks ([`measure_memories`])."""
        if not self.args.eval_windows:
            return {}
        # Every process measures all of the few blocks.
        blocks = source.held_out_blocks(self.args.eval_windows, self.args.block_size)
        with self.sharding.joined():
            return measure_memories(
                self.model,
                self.teacher,
                **blocks,
                start=source.first_anchor(self.context_length),
                context_length=min(self.args.context_length, blocks["input_ids"].shape[1]),
                batch_size=self.args.per_device_eval_batch_size,
            )


class SmtMethod(MemoryMethod):
    """Supervised Memory Training: single steps between the memories of a teacher that is trained too."""

    name = "smt"
    predictive_loss = "teacher_loss"

    def build_objective(self) -> SmtObjective:
        self.sync()
        if self.model.config.backbone == "gru":
            logger.warning(
                "`backbone` is 'gru'; memories collapse when a GRU is trained by SMT (SMT, section 3.3). Watch "
                "`uniformity` (near 0: collapsed), or use the Transformer or MLP backbone."
            )
        return SmtObjective.from_arguments(self.model, self.teacher, self.args)

    def sync(self) -> None:
        """Copy the teacher's decoder to the RNN's readout."""
        self.model.load_readout(self.teacher)

    finish = sync

    def settings(self) -> dict[str, Any]:
        objective = self.objective
        weights = dict(zip(("decoder_weight", "dynamics_weight", "uniformity_weight"), objective.weights, strict=True))
        own = {name: getattr(objective, name) for name in ("future_length", "detached", "uniformity_over")}
        return super().settings() | weights | own


class DmtMethod(MemoryMethod):
    """DAgger Memory Training: the RNN runs on its own memories, and learns to stay close to its teacher's."""

    name = "dmt"
    predictive_loss = "readout_loss"

    def build_objective(self) -> DmtObjective:
        return DmtObjective.from_arguments(self.model, self.teacher, self.args)

    def settings(self) -> dict[str, Any]:
        rollout = self.args.block_size - self.first_anchor
        return super().settings() | {"rollout_length": rollout, "gradient_steps": self.objective.gradient_steps}

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        return super().inputs(batch) | {"start": self.first_anchor}

    def choose_cuts(self, streams: np.ndarray, positions: np.ndarray, anchors: np.ndarray) -> np.ndarray:
        # The rollout begins where the episode does.
        start = np.full_like(anchors[:, :1], self.context_length)
        return choose_cuts(streams, positions, self.args.stream_seed, start, 1, self.args.start_share)
