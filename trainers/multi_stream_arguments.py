"""Arguments of [`MultiStreamTrainer`]: `TrainingArguments` with other defaults and the fields that streams need."""

from dataclasses import dataclass

import torch
from transformers import TrainingArguments

from hf_recurrent.argument_checks import argument
from hf_recurrent.learning_rules.joint_optimizer import MATRIX_OPTIMIZERS
from hf_recurrent.trainers.sharding import is_sharding_requested, requested_sharding

REGIMES = ("multi_stream", "iid")
DIVERGENCE_ACTIONS = ("stop", "rollback")
_SHARDING = "weights are sharded (FSDP2) by `accelerate launch --config_file`"
_PRECISION = "evaluation uses the precision of training"
# Arguments that have to stay off, and why.
_UNSUPPORTED = {
    "deepspeed": _SHARDING,
    "fsdp": _SHARDING,
    "label_smoothing_factor": "bits per byte are measured with the true targets",
    "auto_find_batch_size": "the batch size sets the streams",
    "fp16_full_eval": _PRECISION,
    "bf16_full_eval": _PRECISION,
    "logging_nan_inf_filter": "a NaN loss is never logged as another",
}


@dataclass
class MultiStreamTrainingArguments(TrainingArguments):
    """`TrainingArguments` for training on continuous streams.

    Number of streams = `per_device_train_batch_size` × processes × `gradient_accumulation_steps`; an optimizer step
    reads `block_size` bytes of each. With `streams`, micro-batches and accumulation follow from it. A positive
    `max_steps` takes precedence over `train_bytes`, and `train_bytes` over `num_train_epochs`.

    Own fields: `regime`, `streams`, `block_size`, `train_bytes`, `eval_block_size`, `eval_carry_state`,
    `sample_every`, `sample_bytes`, `sample_prompts`, `bf16_products`, `cuda_graphs`, `on_divergence`,
    `save_on_signal`, `matrix_optimizer`, `matrix_learning_rate`, `table_learning_rate`, `count_discount`,
    `count_bytes`.

    The schedule multiplies all three learning rates.

    Defaults that differ from `TrainingArguments`:

    | argument | here | there | why |
    |---|---|---|---|
    | `learning_rate` | 3e-4 | 5e-5 | training from scratch, not fine-tuning |
    | `adam_beta2` | 0.95 | 0.999 | the usual value for language models from scratch |
    | `weight_decay` | 0.1 | 0.0 | the same |
    | `lr_scheduler_type` | cosine | linear | the same |
    | `warmup_steps` | 0.02 (of all steps) | 0 | training can diverge without warm-up |
    | `num_train_epochs` | 1 | 3 | every byte once |
    | `logging_steps` | 10 | 500 | the progress bar shows the logged values |
    | `logging_nan_inf_filter` | False | True | a NaN loss ends the run, see `on_divergence` |
    | `save_total_limit` | 2 | all | with optimizer and states, a checkpoint is three times as large as the model |
    | `use_cache` | True | False | the saved config keeps returning the state; training sets it explicitly |
    | `remove_unused_columns` | False | True | the data set yields complete batches |
    | `label_names` | ["shift_labels"] | ["labels"] | the targets are already shifted |
    | `ignore_data_skip` | True | False | streams seek to their positions; skipping batches would skip data |
    | `ddp_find_unused_parameters` | False | None | every parameter is used in every block |

    Raises:
        ValueError: `regime` is unknown, a number is below its minimum, or an option is not supported.
    """

    regime: str = argument(
        "multi_stream",
        "multi_stream: each stream reads its documents in order, and the state is carried from block to block. iid: "
        "blocks at random starts, each from a zero state. Example: --regime iid",
        choices=REGIMES,
    )
    streams: int | None = argument(
        None,
        "Number of streams of the whole run. Each process takes its share, in micro-batches of at most "
        "--per_device_train_batch_size; so a run continues with another number of processes. Default: "
        "--per_device_train_batch_size times processes times --gradient_accumulation_steps. Example: --streams 24",
    )
    block_size: int = argument(256, "T, bytes of each stream between two updates, 1 or more. Example: --block_size 64")
    train_bytes: float | None = argument(
        None,
        "Number of bytes to train on, over all streams; sets the number of steps unless --max_steps is given. "
        "Example: --train_bytes 20e6",
    )
    eval_block_size: int = argument(
        1024,
        "T in evaluation. With a carried state it changes speed and memory only. It is the context window of models "
        "without a state (Llama, Mamba2), and of all models with --eval_carry_state false.",
    )
    eval_carry_state: bool = argument(
        True, "Carry the state over whole episodes in evaluation. False: zero at each block, as in iid."
    )
    sample_every: int = argument(0, "Print samples every N steps; 0 for never. Does not affect training.")
    sample_bytes: int = argument(200, "Length of a sample in bytes. Example: 500")
    sample_prompts: list[str] = argument(
        ["def ", "The "], 'Prompts of the samples. Example: --sample_prompts "Once upon a time" "She said"'
    )

    bf16_products: bool = argument(
        False,
        "In training on a CPU with fast AVX512-BF16 (AMD, since Zen 4), round the inputs of matrix products to "
        "bfloat16; sums and all else stay float32. Without effect elsewhere.",
    )
    cuda_graphs: bool = argument(
        True,
        "On an NVIDIA GPU, launch the layers of a block as two CUDA graphs, forward and backward: the same numbers, "
        "several times as fast where kernels are small. False if memory is short: graphs keep a block's activations.",
    )
    on_divergence: str = argument(
        "stop",
        "After a NaN or infinite loss, gradient or weight: stop with an error, or rollback to the last checkpoint and "
        "continue with half the learning rate. Example: --on_divergence rollback",
        choices=DIVERGENCE_ACTIONS,
    )
    save_on_signal: bool = argument(
        True, "On Ctrl-C and SIGTERM, save a checkpoint after the current step and end. False: end at once."
    )

    matrix_optimizer: str = argument(
        "adamw",
        "Optimizer of the matrices in layers. adamw: the same as for all other weights (--optim). muon: Muon, while "
        "embeddings, output head, norms and vectors stay with --optim. Example: --matrix_optimizer muon",
        choices=MATRIX_OPTIMIZERS,
    )
    matrix_learning_rate: float = argument(0.02, "Peak learning rate of --matrix_optimizer muon.")
    table_learning_rate: float = argument(
        0.02, "Peak learning rate of n-gram tables, which row-wise Adagrad updates, without weight decay or clipping."
    )

    count_discount: float = argument(
        0.0,
        "With a count memory: in the loss of the network, a byte to which counts alone give probability p has weight "
        "1 - this x p, so that the network learns what counts do not know; 0 to 1. Example: 0.7",
    )

    count_bytes: float = argument(
        0.0,
        "With a count memory: whole documents that the streams of a corpus will not reach, up to this many bytes, "
        "are counted before training, 2 MB a second. So counts have more text than the network. Without effect for "
        "other data. Example: --count_bytes 20e6",
    )

    learning_rate: float = argument(3e-4, "Peak learning rate of AdamW. Example: 3e-3")
    adam_beta2: float = argument(0.95, "Second decay rate (beta2) of AdamW.")
    weight_decay: float = argument(
        0.1, "Weight decay of AdamW; not applied to biases, norms and rates of recurrent units."
    )
    lr_scheduler_type: str = argument(
        "cosine", "Schedule after the warm-up: cosine, linear, constant_with_warmup, ..."
    )
    warmup_steps: float = argument(0.02, "Linear warm-up: number of steps, or a fraction of all steps if below 1.")
    num_train_epochs: float = argument(
        1.0, "Passes over the corpus; used when neither --max_steps nor --train_bytes is given."
    )
    logging_steps: float = argument(10, "Steps between two log entries.")
    logging_nan_inf_filter: bool = argument(False, "Keep False: a loss that is not finite ends the run.")
    save_total_limit: int | None = argument(2, "Number of most recent checkpoints to keep.")
    use_cache: bool = argument(True, "`use_cache` of the saved configuration.")
    remove_unused_columns: bool = argument(False, "Keep False: batches are complete.")
    label_names: list[str] | None = argument(["shift_labels"], "Keys of the targets in a batch.")
    ignore_data_skip: bool = argument(True, "Keep True: streams resume at their positions.")
    ddp_find_unused_parameters: bool | None = argument(False, "Keep False: every parameter is used in every block.")

    @property
    def num_streams(self) -> int:
        """Streams, or rows of the batches of one optimizer step, over all processes and accumulation steps."""
        return self.per_device_train_batch_size * self.world_size * self.gradient_accumulation_steps

    @property
    def step_bytes(self) -> int:
        """Bytes read by one optimizer step."""
        return self.num_streams * self.block_size

    @property
    def stream_seed(self) -> int:
        """Seed of the order of episodes: `data_seed`, by default `seed`."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def place_model_on_device(self) -> bool | None:
        """False if the model is sharded: it is moved layer by layer then."""
        return False if is_sharding_requested() else super().place_model_on_device

    def _check_minimum(self, least: float, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"`{name}` is {value}; it must be {least} or more.")

    def _divide_streams(self) -> None:
        """Set micro-batch and accumulation so that all processes together have `streams` streams."""
        share, rest = divmod(self.streams, self.world_size)
        if rest:
            raise ValueError(
                f"`streams` is {self.streams}; it must be divisible by the number of processes, which is "
                f"{self.world_size}."
            )
        most = min(share, self.per_device_train_batch_size)
        self.per_device_train_batch_size = next(size for size in range(most, 0, -1) if share % size == 0)
        self.gradient_accumulation_steps = share // self.per_device_train_batch_size

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            allowed = f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
            raise ValueError(f"`{name}` is {getattr(self, name)!r}; it must be {allowed}.")

    def __post_init__(self):
        self._check_choice("regime", REGIMES)
        self._check_choice("on_divergence", DIVERGENCE_ACTIONS)
        self._check_choice("matrix_optimizer", MATRIX_OPTIMIZERS)
        for name, reason in _UNSUPPORTED.items():
            if getattr(self, name):
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; it must be off: {reason}.")
        requested_sharding()  # before accelerate acts on it
        self._check_minimum(1, "block_size", "eval_block_size", "sample_bytes", "streams")
        self._check_minimum(
            0, "count_bytes", "count_discount", "sample_every", "matrix_learning_rate", "table_learning_rate"
        )
        if self.count_discount > 1:
            raise ValueError(f"`count_discount` is {self.count_discount}; it must be 1 or less.")
        if self.train_bytes is not None and not self.train_bytes > 0:
            raise ValueError(f"`train_bytes` is {self.train_bytes}; it must be more than 0.")
        if self.bf16 and not torch.accelerator.is_available():
            self.use_cpu = True  # `TrainingArguments` requires this flag for bfloat16 without an accelerator
        super().__post_init__()
        self._check_minimum(
            1, "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"
        )
        for name in ("lr_scheduler_kwargs", "gradient_checkpointing_kwargs"):
            if not isinstance(getattr(self, name) or {}, dict):  # any text that is not a JSON object
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; it must be a mapping.")
        if self.streams is not None:
            self._divide_streams()


@dataclass
class RollingWindowTrainingArguments(MultiStreamTrainingArguments):
    """[`MultiStreamTrainingArguments`] for windows that overlap: `block_size` is the stride S, the new bytes of an
    update.

    Own fields: `window`.

    Raises:
        ValueError: `window` is not a multiple of `block_size`, or the regime is "iid".
    """

    window: int = argument(
        512, "T, bytes of each stream that an update learns from; a multiple of --block_size, which are the new ones."
    )

    def __post_init__(self):
        if self.window < self.block_size or self.window % self.block_size:
            raise ValueError(
                f"`window` is {self.window}; it must be a multiple of `block_size`, which is {self.block_size}."
            )
        self._check_choice("regime", ("multi_stream",))
        super().__post_init__()
        if self.count_discount:
            raise ValueError(
                f"`count_discount` is {self.count_discount}; windows that overlap have no weights of targets."
            )
