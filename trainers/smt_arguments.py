"""Arguments of [`SmtTrainer`] and [`DmtTrainer`]: those of the stream trainer with the paper's defaults."""

from dataclasses import dataclass, field
from typing import ClassVar

from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments


@dataclass
class MemoryTrainingArguments(MultiStreamTrainingArguments):
    """What both phases have: blocks that stand for themselves, some positions of which are used.

    Own fields: `context_length`, `timesteps`, `start_share`, `eval_windows`.
    """

    context_length: int = field(
        default=256, metadata={"help": "Tc, bytes that a memory of the teacher is made from at most."}
    )
    timesteps: int = field(
        default=1, metadata={"help": "Positions of each block that are used, at most, chosen at random; 0 for all."}
    )
    start_share: float = field(
        default=0.25,
        metadata={
            "help": "Share of the blocks of a corpus in which an episode is taken to begin, so that the RNN learns to "
            "start from a zero memory. Examples of tasks begin anyway."
        },
    )
    eval_windows: int = field(
        default=64,
        metadata={"help": "Held-out blocks that drift and the teacher's loss are measured on, 0 for none."},
    )

    regime: str = field(default="iid", metadata={"help": "Blocks at random starts; nothing else.", "choices": ["iid"]})
    block_size: int | None = field(
        default=None, metadata={"help": "T of a block; by default as short as it can be, of a task its examples."}
    )
    adam_beta2: float = field(default=0.999, metadata={"help": "AdamW's second decay rate."})
    weight_decay: float = field(default=0.01, metadata={"help": "AdamW's weight decay."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Blocks of one step on one device."})

    # Fields whose sum is the least T of blocks of a corpus.
    block_parts: ClassVar[tuple[str, ...]] = ("context_length",)

    @property
    def shortest_block(self) -> int:
        """The least T of blocks of a corpus."""
        return sum(getattr(self, name) for name in self.block_parts)

    def __post_init__(self):
        for name, least in (("context_length", 1), ("timesteps", 0), ("eval_windows", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be {least} or more.")
        if not 0 <= self.start_share <= 1:
            raise ValueError(f"`start_share` is {self.start_share}; it must be from 0 to 1.")
        if self.regime != "iid":
            raise ValueError(f"`regime` is {self.regime!r}; training on memories needs iid.")
        self.chooses_block_size = self.block_size is None
        if self.chooses_block_size:
            self.block_size = self.shortest_block
        super().__post_init__()


@dataclass
class SmtTrainingArguments(MemoryTrainingArguments):
    """[`MemoryTrainingArguments`] of Supervised Memory Training, by default the paper's.

    Own fields: `future_length`, `decoder_weight`, `dynamics_weight`, `uniformity_weight`, `detached`,
    `uniformity_over`.

    Raises:
        ValueError: a length below 1, a weight below 0, or a block too short for context and future.
    """

    future_length: int = field(default=64, metadata={"help": "Tf, bytes that a memory has to predict."})
    decoder_weight: float = field(default=1.0, metadata={"help": "λ_dec, of the prediction of the future."})
    dynamics_weight: float = field(default=0.1, metadata={"help": "λ_dyn, of the RNN's step between memories."})
    uniformity_weight: float = field(default=0.001, metadata={"help": "λ_unif, against a collapse of the memories."})
    detached: bool = field(
        default=False, metadata={"help": "The RNN learns from the memories without shaping them (the joint way does)."}
    )
    uniformity_over: str = field(
        default="tokens",
        metadata={"help": "What is spread: each token of the memory, or the state.", "choices": ["tokens", "states"]},
    )

    block_parts: ClassVar[tuple[str, ...]] = ("context_length", "future_length")

    def __post_init__(self):
        if self.future_length < 1:
            raise ValueError(f"`future_length` is {self.future_length}; it must be 1 or more.")
        for name in ("decoder_weight", "dynamics_weight", "uniformity_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be 0 or more.")
        if self.uniformity_over not in ("tokens", "states"):
            raise ValueError(f"`uniformity_over` is {self.uniformity_over!r}; it must be tokens or states.")
        super().__post_init__()
        if self.uniformity_weight and self.per_device_train_batch_size < 2:
            raise ValueError(
                "`per_device_train_batch_size` is 1; uniformity compares sequences: give 2 or more, or "
                "`uniformity_weight` 0."
            )


@dataclass
class DmtTrainingArguments(MemoryTrainingArguments):
    """[`MemoryTrainingArguments`] of DAgger Memory Training, by default the paper's.

    Own fields: `rollout_length`, `gradient_steps`.

    Raises:
        ValueError: a length below 1, or a block too short for context and rollout.
    """

    rollout_length: int = field(
        default=256, metadata={"help": "Bytes that the RNN reads on its own memories; of a task, all."}
    )
    gradient_steps: int | None = field(
        default=None,
        metadata={"help": "Steps that gradients reach back through the rollout: 1 for none, all by default."},
    )

    learning_rate: float = field(default=3e-5, metadata={"help": "Peak learning rate of AdamW."})
    timesteps: int = field(
        default=16,
        metadata={"help": "Positions of each rollout that have a label, at most, chosen at random; 0 for all."},
    )

    block_parts: ClassVar[tuple[str, ...]] = ("context_length", "rollout_length")

    def __post_init__(self):
        if self.rollout_length < 1:
            raise ValueError(f"`rollout_length` is {self.rollout_length}; it must be 1 or more.")
        if self.gradient_steps is not None and self.gradient_steps < 1:
            raise ValueError(f"`gradient_steps` is {self.gradient_steps}; it must be 1 or more.")
        super().__post_init__()
