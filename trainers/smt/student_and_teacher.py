"""`StudentAndTeacher`: an RNN and its teacher as one module; encodes memories and runs the RNN on its own."""

from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from hf_recurrent.modeling.block.recurrent_state import state_dtype
from hf_recurrent.modeling.smt.modeling_smt_rnn import SmtRnnForCausalLM
from hf_recurrent.modeling.smt.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.trainers.smt.windows import episode_bounds, gather_contexts
from hf_recurrent.trainers.smt_arguments import MemoryTrainingArguments


class StudentAndTeacher(nn.Module):
    """An RNN and its teacher as one module, so that one forward pass covers all trained parameters.

    Raises:
        ValueError: the RNN has n-grams at the output.

    Shape letters: B batch, T steps, Z memory tokens, D width of a memory token, Tc context.
    """

    settings: ClassVar[tuple[str, ...]] = ()  # arguments of the constructor that training has too

    def __init__(self, student: SmtRnnForCausalLM, teacher: SmtTeacherModel):
        super().__init__()
        if student.config.ngram_output:
            raise ValueError(
                "`student` has `ngram_output`, but memories are trained through a readout that has no n-grams; it "
                "must be False."
            )
        self.student, self.teacher = student, teacher

    @classmethod
    def from_arguments(
        cls, student: SmtRnnForCausalLM, teacher: SmtTeacherModel, args: MemoryTrainingArguments
    ) -> Self:
        """The objective of a run; contexts and futures are no longer than its blocks."""
        values = {name: getattr(args, name) for name in cls.settings}
        lengths = {name: min(values[name], args.block_size) for name in values if name.endswith("_length")}
        return cls(student, teacher, **values | lengths)

    @property
    def config(self):
        """Configuration of the RNN."""
        return self.student.config

    @property
    def frozen_modules(self) -> list[nn.Module]:
        """Modules that are not trained."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return self.student.device

    def num_parameters(self, **options: bool) -> int:
        """Parameters of both; see `PreTrainedModel.num_parameters` for the options."""
        return self.student.num_parameters(**options) + self.teacher.num_parameters(**options)

    def parameters_without_weight_decay(self) -> set[str]:
        return {
            f"{part}.{name}"
            for part in ("student", "teacher")
            if hasattr(module := getattr(self, part), "parameters_without_weight_decay")
            for name in module.parameters_without_weight_decay()
        }

    def gradient_checkpointing_enable(self, *args, **kwargs) -> None:
        """Enable gradient checkpointing in both; the older name of [`activation_checkpointing_enable`]."""
        for module in (self.student, self.teacher):
            module.gradient_checkpointing_enable(*args, **kwargs)

    def activation_checkpointing_enable(self, *args, **kwargs) -> None:
        """Enable activation checkpointing in both."""
        for module in (self.student, self.teacher):
            module.activation_checkpointing_enable(*args, **kwargs)

    def encode(self, input_ids: Tensor, starts: Tensor, positions: Tensor, context_length: int) -> Tensor:
        """The teacher's memories (B, positions, Z, D) of `positions` (B, positions); zero before the block."""
        ids, mask = gather_contexts(input_ids, starts, positions, context_length)
        memory = self.teacher.encode(ids.flatten(0, 1), mask.flatten(0, 1)).unflatten(0, positions.shape)
        return memory.masked_fill(~mask.any(-1)[..., None, None], 0)

    def encode_with_previous(
        self, input_ids: Tensor, starts: Tensor, positions: Tensor, context_length: int
    ) -> tuple[Tensor, Tensor]:
        """The teacher's memories of `positions` and of the positions before, the latter zero at an episode's start."""
        if positions.shape[1] == input_ids.shape[1]:
            memory = self.encode(input_ids, starts, positions, context_length)
            previous = torch.cat([torch.zeros_like(memory[:, :1]), memory[:, :-1]], 1)
        else:
            both = torch.cat([positions, positions - 1], 1)
            memory, previous = self.encode(input_ids, starts, both, context_length).chunk(2, 1)
        begins = starts.gather(1, positions) == positions
        return memory, previous.masked_fill(begins[..., None, None], 0)

    def encode_before(self, input_ids: Tensor, starts: Tensor, start: int, context_length: int) -> Tensor:
        """The teacher's memories of position `start` - 1, (B, Z, D); zero for `start` = 0."""
        before = starts.new_full((len(starts), 1), start - 1)
        return self.encode(input_ids, starts, before, context_length)[:, 0]

    def update(self, previous: Tensor, input_ids: Tensor, starts: Tensor, positions: Tensor) -> Tensor:
        """The RNN's memories of `positions` (B, positions) from the positions before, all as one batch."""
        ngrams = self.ngrams_before(input_ids, starts, positions)
        ngrams = None if ngrams is None else ngrams.flatten(0, 1)
        return self.student.update(previous.flatten(0, 1), input_ids.gather(1, positions).flatten(), ngrams)

    def ngrams_before(self, input_ids: Tensor, starts: Tensor, positions: Tensor) -> Tensor | None:
        """The part `ngrams` (B, positions, …) of the RNN's states before `positions`; None where it has none."""
        orders = self.student.config.ngram_orders
        if not orders:
            return None
        before = positions.unsqueeze(-1) - torch.arange(orders[-1] - 1, 0, -1, device=positions.device)
        inside = before >= starts.gather(1, positions).unsqueeze(-1)
        ids = input_ids.gather(1, before.clamp(min=0).flatten(1)).view(before.shape)
        return ((ids + 1) * inside).to(state_dtype(self.student.dtype))

    def roll_out(
        self,
        memory: Tensor,
        input_ids: Tensor,
        reset_mask: Tensor,
        start: int = 0,
        gradient_steps: int | None = None,
    ) -> Tensor:
        """The RNN's own memories after each byte from `start` on, (B, T - start, Z, D), from `memory` (B, Z, D) on.

        Gradients flow back `gradient_steps`: 1 for none, None for all.
        """
        starts, _ = episode_bounds(reset_mask)
        size, memories = gradient_steps or input_ids.shape[1] - start, []
        for begin in range(start, input_ids.shape[1], size):
            ngrams = self.ngrams_before(input_ids, starts, starts.new_full((len(starts), 1), begin))
            ngrams = None if ngrams is None else ngrams[:, 0]
            block = (part[:, begin : begin + size] for part in (input_ids, reset_mask))
            memories.append(self.student.unroll(memory, *block, ngrams))
            memory = memories[-1][:, -1].detach()
        return torch.cat(memories, 1)
