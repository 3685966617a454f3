"""Arguments of [`OnlineTrainer`]: the stream trainer's, with defaults for online learning."""

from dataclasses import dataclass

from hf_recurrent.argument_checks import argument
from hf_recurrent.learning_rules.optimizers import RMSPROP_ALPHA
from hf_recurrent.learning_rules.rules import RULES
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments


@dataclass
class OnlineTrainingArguments(MultiStreamTrainingArguments):
    """[`MultiStreamTrainingArguments`] for online learning: by default, an update after every byte.

    Own fields: `method`, `stride`.

    Defaults that differ from [`MultiStreamTrainingArguments`]; `block_size` and `learning_rate` are the
    paper's for updates after every byte (Memora, appendix F.5):

    | argument | here | there | why |
    |---|---|---|---|
    | `block_size` | 1 | 256 | an update after every byte of every stream |
    | `learning_rate` | 3e-5 | 3e-4 | many more updates, each from fewer bytes |
    | `lr_scheduler_type` | constant | cosine | a stream may have no end |
    | `warmup_steps` | 0 | 0.02 | the same |
    | `logging_steps` | 100 | 10 | steps are short |
    | `save_steps` | 10,000 | 500 | steps are short, and sensitivities are large |

    With `optim="rmsprop"`, `optim_args` defaults to "alpha=0.9999".

    Raises:
        ValueError: `method` is unknown, `stride` does not divide `block_size`, or an argument is incompatible with
            online learning.
    """

    method: str = argument(
        "rtrl",
        "rtrl: exact gradients of each recurrent layer through its whole past. snap1: approximate RTRL (SnAp-1) for "
        "units that mix channels (gru, dense_linear). truncated: backpropagation inside the stride only. spatial: "
        "no gradients through time. Example: --method truncated",
        choices=RULES,
    )
    stride: int | None = argument(
        None,
        "T, steps per forward and backward pass; must divide --block_size, after which the weights are updated. "
        "Default: the whole block. Example: --block_size 8 --stride 1",
    )
    block_size: int = argument(1, "Bytes of each stream between two updates, 1 or more. Example: 8")
    learning_rate: float = argument(3e-5, "Learning rate. Example: 3e-4")
    lr_scheduler_type: str = argument("constant", "constant, cosine, linear, ...")
    warmup_steps: float = argument(0, "Linear warm-up: number of steps, or a fraction of all steps if below 1.")
    logging_steps: float = argument(100, "Steps between two log entries.")
    save_steps: float = argument(10_000, "Steps between two checkpoints.")

    def __post_init__(self):
        self._check_choice("method", RULES)
        self._check_choice("regime", ("multi_stream",))
        if self.stride is None:
            self.stride = self.block_size
        if self.stride < 1 or self.block_size % self.stride:
            raise ValueError(f"`stride` is {self.stride}; it must divide `block_size`, which is {self.block_size}.")
        if self.optim == "rmsprop" and self.optim_args is None:
            self.optim_args = f"alpha={RMSPROP_ALPHA}"
        super().__post_init__()
        for name in ("gradient_checkpointing", "torch_compile"):
            if getattr(self, name):
                raise ValueError(f"`{name}` must be off: `method` {self.method!r} hooks into the forward pass.")
