"""Arguments of [`SmtTrainer`] and [`DmtTrainer`]: the stream trainer's, with the defaults of the SMT paper."""

from dataclasses import dataclass
from typing import ClassVar

from hf_recurrent.argument_checks import argument
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments


@dataclass
class MemoryTrainingArguments(MultiStreamTrainingArguments):
    """Arguments of both phases: independent blocks, with losses at some positions of each.

    Own fields: `context_length`, `timesteps`, `start_share`, `eval_windows`.

    Defaults that differ from [`MultiStreamTrainingArguments`]:

    | argument | here | there | why |
    |---|---|---|---|
    | `regime` | iid | multi_stream | no state is carried; the only choice |
    | `block_size` | None | 256 | computed: the sum of the lengths, or the length of a task's examples |
    | `adam_beta2` | 0.999 | 0.95 | AdamW's default; the paper gives no other |
    | `weight_decay` | 0.01 | 0.1 | the paper's |
    | `per_device_train_batch_size` | 32 | 8 | each block has losses at `timesteps` positions only |

    Raises:
        ValueError: a number is out of its range, `regime` is not iid, or `neftune_noise_alpha` is set.
    """

    context_length: int = argument(256, "Tc, maximum number of bytes that the teacher encodes into a memory.")
    timesteps: int = argument(1, "Maximum number of positions used per block, chosen at random; 0 for all.")
    start_share: float = argument(
        0.25,
        "Fraction of the blocks of a corpus in which an episode is made to begin, so that the RNN learns to start "
        "from a zero memory. Has no effect on tasks. Example: 0.5",
    )
    eval_windows: int = argument(64, "Number of held-out blocks to measure drift and teacher loss on; 0 for none.")

    regime: str = argument("iid", "Only iid: blocks at random starts.", choices=["iid"])
    block_size: int | None = argument(
        None, "T of a block. Default: the minimum; for a task, the length of its examples. Example: 512"
    )
    adam_beta2: float = argument(0.999, "Second decay rate (beta2) of AdamW.")
    weight_decay: float = argument(0.01, "Weight decay of AdamW.")
    per_device_train_batch_size: int = argument(32, "Blocks per step and device.")

    # Fields whose sum is the minimum T of the blocks of a corpus.
    block_parts: ClassVar[tuple[str, ...]] = ("context_length",)

    @property
    def shortest_block(self) -> int:
        """Minimum T of the blocks of a corpus."""
        return sum(getattr(self, name) for name in self.block_parts)

    def last_anchor(self, first: int) -> int:
        """The last position of a block that may have a loss, if the first is `first`."""
        return self.block_size - 1

    def num_anchors(self, first: int) -> int:
        """Number of positions of a block that have a loss."""
        possible = self.last_anchor(first) - first + 1
        return min(self.timesteps or possible, possible)

    def __post_init__(self):
        self._check_minimum(1, "context_length")
        self._check_minimum(0, "timesteps", "eval_windows")
        if not 0 <= self.start_share <= 1:
            raise ValueError(f"`start_share` is {self.start_share}; it must be from 0 to 1.")
        self._check_choice("regime", ("iid",))  # no state is carried
        if self.neftune_noise_alpha is not None:
            raise ValueError(
                f"`neftune_noise_alpha` is {self.neftune_noise_alpha}; it must be None: training on memories adds "
                "no noise to embeddings."
            )
        self.chooses_block_size = self.block_size is None
        if self.chooses_block_size:
            self.block_size = self.shortest_block
        super().__post_init__()


@dataclass
class SmtTrainingArguments(MemoryTrainingArguments):
    """[`MemoryTrainingArguments`] of Supervised Memory Training, with the paper's defaults.

    Own fields: `future_length`, `decoder_weight`, `dynamics_weight`, `uniformity_weight`, `detached`,
    `uniformity_over`.

    Raises:
        ValueError: see [`MemoryTrainingArguments`]; or a length is below 1, a weight below 0, or the batch too small.
    """

    future_length: int = argument(64, "Tf, number of bytes that a memory predicts.")
    decoder_weight: float = argument(1.0, "λ_dec, weight of the decoder loss.")
    dynamics_weight: float = argument(0.1, "λ_dyn, weight of the RNN's dynamics loss.")
    uniformity_weight: float = argument(
        0.001, "λ_unif, weight of the uniformity loss, which keeps memories from collapsing."
    )
    detached: bool = argument(False, "Stop the gradient of the dynamics loss at the teacher's memories.")
    uniformity_over: str = argument(
        "tokens",
        "Vectors that the uniformity loss spreads: the tokens of a memory (tokens) or whole memories (states).",
        choices=["tokens", "states"],
    )

    block_parts: ClassVar[tuple[str, ...]] = ("context_length", "future_length")

    def last_anchor(self, first: int) -> int:
        # In a block that is a whole episode, every position has its whole future.
        return self.block_size - (self.future_length if first else 1)

    def __post_init__(self):
        self._check_minimum(1, "future_length")
        self._check_minimum(0, "decoder_weight", "dynamics_weight", "uniformity_weight")
        self._check_choice("uniformity_over", ("tokens", "states"))
        super().__post_init__()
        if self.uniformity_weight and self.per_device_train_batch_size < 2:
            raise ValueError(
                "`per_device_train_batch_size` is 1; it must be 2 or more, because uniformity compares sequences, or "
                "`uniformity_weight` must be 0."
            )


@dataclass
class DmtTrainingArguments(MemoryTrainingArguments):
    """[`MemoryTrainingArguments`] of DAgger Memory Training, with the paper's defaults.

    Own fields: `rollout_length`, `gradient_steps`.

    Defaults that differ from [`MemoryTrainingArguments`]:

    | argument | here | there | why |
    |---|---|---|---|
    | `learning_rate` | 3e-5 | 3e-4 | a short phase that corrects a trained RNN |
    | `timesteps` | 16 | 1 | one rollout gives a memory at every position |

    Raises:
        ValueError: see [`MemoryTrainingArguments`]; or a length is below 1.
    """

    rollout_length: int = argument(256, "Bytes that the RNN reads on its own memories; for a task, the whole example.")
    gradient_steps: int | None = argument(
        None, "Steps that gradients flow back through the rollout, 1 or more. Default: all. Example: 32"
    )

    learning_rate: float = argument(3e-5, "Peak learning rate of AdamW. Example: 1e-5")
    timesteps: int = argument(16, "Maximum number of labelled positions per rollout, chosen at random; 0 for all.")

    block_parts: ClassVar[tuple[str, ...]] = ("context_length", "rollout_length")

    def __post_init__(self):
        self._check_minimum(1, "rollout_length", "gradient_steps")
        super().__post_init__()
