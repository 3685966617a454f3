"""Arguments of [`OnlineTrainer`]: those of the stream trainer with the defaults of learning while reading."""

from dataclasses import dataclass, field

from hf_recurrent.learning_rules.optimizers import RMSPROP_ALPHA
from hf_recurrent.learning_rules.rules import RULES
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments

RMSPROP_ARGUMENTS = f"alpha={RMSPROP_ALPHA}"


@dataclass
class OnlineTrainingArguments(MultiStreamTrainingArguments):
    """[`MultiStreamTrainingArguments`] for learning while reading: by default, an update after every byte.

    Own fields: `method`, `stride`.

    Defaults that differ from those of [`MultiStreamTrainingArguments`], the paper's for one byte at a time unless
    another reason is given:

    | argument | here | there | why |
    |---|---|---|---|
    | `block_size` | 1 | 256 | an update after every byte of every stream |
    | `learning_rate` | 3e-5 | 3e-4 | many more updates, each from less |
    | `lr_scheduler_type` | constant | cosine | a stream need not end |
    | `warmup_steps` | 0 | 0.02 | the same |
    | `logging_steps` | 100 | 10 | steps are short |
    | `save_steps` | 10,000 | 500 | steps are short, and sensitivities large |

    With `optim="rmsprop"`, `optim_args` are "alpha=0.9999" unless they are given.

    Raises:
        ValueError: `method` is unknown, `stride` does not divide `block_size`, or an argument does not go with online
            learning.
    """

    method: str = field(
        default="rtrl",
        metadata={
            "help": "rtrl: exact credit inside each recurrent layer for all of the past. snap1: the same, approximate "
            "where a recurrence mixes channels (gru, dense_linear). truncated: backpropagation inside the stride "
            "only. spatial: no credit through time at all. Example: --method truncated",
            "choices": list(RULES),
        },
    )
    stride: int | None = field(
        default=None,
        metadata={
            "help": "T, steps that are read and backpropagated through at once; several strides make a block, after "
            "which the weights are updated. The whole block by default. Example: --block_size 8 --stride 1"
        },
    )
    block_size: int = field(default=1, metadata={"help": "Bytes of each stream between two updates, 1 or more."})
    learning_rate: float = field(default=3e-5, metadata={"help": "Learning rate. Example: 3e-4"})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "constant, cosine, linear, ..."})
    warmup_steps: float = field(default=0, metadata={"help": "Linear warm-up: steps, or below 1 a share of all."})
    logging_steps: float = field(default=100, metadata={"help": "Steps between two lines of the log."})
    save_steps: float = field(default=10_000, metadata={"help": "Steps between two checkpoints."})

    def __post_init__(self):
        if self.method not in RULES:
            raise ValueError(f"`method` is {self.method!r}; it must be one of {', '.join(RULES)}.")
        if self.stride is None:
            self.stride = self.block_size
        if self.stride < 1 or self.block_size % self.stride:
            raise ValueError(f"`stride` is {self.stride}; it must divide `block_size`, which is {self.block_size}.")
        if self.optim == "rmsprop" and self.optim_args is None:
            self.optim_args = RMSPROP_ARGUMENTS
        super().__post_init__()
        if self.regime != "multi_stream":
            raise ValueError(f"`regime` is {self.regime!r}; learning while reading needs multi_stream.")
        for name in ("gradient_checkpointing", "torch_compile"):
            if getattr(self, name):
                raise ValueError(f"`{name}` must be off: `method` {self.method!r} looks into the forward pass.")
