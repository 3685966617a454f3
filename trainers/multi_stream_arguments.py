"""Arguments of [`MultiStreamTrainer`]: TrainingArguments with the defaults and the few fields that streams need."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from transformers import TrainingArguments

Regime = Literal["multi_stream", "iid"]


@dataclass
class MultiStreamTrainingArguments(TrainingArguments):
    """`TrainingArguments` for training on continuous streams.

    Number of streams = `per_device_train_batch_size` × processes × `gradient_accumulation_steps`; an optimizer step
    reads `block_size` bytes of each. `max_steps`, where positive, wins over `train_bytes`, which wins over
    `num_train_epochs`.

    Own fields: `regime`, `block_size`, `train_bytes`, `eval_block_size`, `eval_carry_state`, `sample_every`,
    `sample_bytes`, `sample_prompts`.

    Defaults that differ from `TrainingArguments`:

    | argument | here | there | why |
    |---|---|---|---|
    | `learning_rate` | 3e-4 | 5e-5 | training from scratch, not fine-tuning |
    | `adam_beta2` | 0.95 | 0.999 | the usual value for language models from scratch |
    | `weight_decay` | 0.1 | 0.0 | the same |
    | `lr_scheduler_type` | cosine | linear | the same |
    | `warmup_steps` | 0.02 (of all steps) | 0 | a cold start at the full rate can diverge |
    | `num_train_epochs` | 1 | 3 | every byte once |
    | `logging_steps` | 10 | 500 | the progress bar shows what is logged |
    | `save_total_limit` | 2 | all | a checkpoint holds optimizer and states: three models' worth |
    | `use_cache` | True | False | the saved config keeps returning the state; training asks for it explicitly |
    | `remove_unused_columns` | False | True | the batches are ready as they come |
    | `label_names` | ["shift_labels"] | ["labels"] | the targets are already the next bytes |
    | `ignore_data_skip` | True | False | streams seek to their positions: skipping batches would skip data |
    | `ddp_find_unused_parameters` | False | None | every parameter is used in every block |

    Raises:
        ValueError: `regime` is unknown, or a number is below what it can be.
    """

    regime: str = field(
        default="multi_stream",
        metadata={
            "help": "multi_stream: every stream goes through its documents in order and the state is carried from "
            "block to block. iid: blocks at random starts, the state zero at each. Example: --regime iid",
            "choices": list(get_args(Regime)),
        },
    )
    block_size: int = field(
        default=256,
        metadata={"help": "T, bytes of each stream between two updates, 1 or more. Example: --block_size 64"},
    )
    train_bytes: float | None = field(
        default=None,
        metadata={
            "help": "Bytes to train on, over all streams; decides the number of steps when --max_steps is not given. "
            "Example: --train_bytes 20e6"
        },
    )
    eval_block_size: int = field(
        default=1024,
        metadata={
            "help": "T of evaluation: with the state carried it changes speed and memory only; for models without a "
            "state (Llama, Mamba2), and with --eval_carry_state false, it is the window that they see."
        },
    )
    eval_carry_state: bool = field(
        default=True,
        metadata={"help": "Carry the state over whole episodes in evaluation. False: zero at each block, as in iid."},
    )
    sample_every: int = field(
        default=0,
        metadata={"help": "Print samples every so many steps, 0 for never. Training is the same with and without."},
    )
    sample_bytes: int = field(default=200, metadata={"help": "Length of a sample in bytes."})
    sample_prompts: list[str] = field(
        default_factory=lambda: ["def ", "The "],
        metadata={"help": 'What samples begin with. Example: --sample_prompts "Once upon a time" "She said"'},
    )

    learning_rate: float = field(default=3e-4, metadata={"help": "Peak learning rate of AdamW. Example: 3e-3"})
    adam_beta2: float = field(default=0.95, metadata={"help": "AdamW's second decay rate."})
    weight_decay: float = field(
        default=0.1, metadata={"help": "AdamW's weight decay; not on biases, norms and the rates of recurrent units."}
    )
    lr_scheduler_type: str = field(
        default="cosine", metadata={"help": "Schedule after the warm-up: cosine, linear, constant_with_warmup, ..."}
    )
    warmup_steps: float = field(
        default=0.02, metadata={"help": "Linear warm-up: a number of steps, or below 1 a share of all steps."}
    )
    num_train_epochs: float = field(
        default=1.0, metadata={"help": "Passes over the corpus; decides only when nothing else gives the steps."}
    )
    logging_steps: float = field(default=10, metadata={"help": "Steps between two lines of the log."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints kept, the newest ones."})
    use_cache: bool = field(default=True, metadata={"help": "The `use_cache` of the saved configuration."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Batches are ready as they come."})
    label_names: list[str] | None = field(
        default_factory=lambda: ["shift_labels"], metadata={"help": "Where the targets are in a batch."}
    )
    ignore_data_skip: bool = field(default=True, metadata={"help": "Streams seek to their positions by themselves."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Every parameter is used in every block."}
    )

    def __post_init__(self):
        if self.regime not in get_args(Regime):
            raise ValueError(f"`regime` is {self.regime!r}; it must be one of {', '.join(get_args(Regime))}.")
        for name, least in (("block_size", 1), ("eval_block_size", 1), ("sample_every", 0), ("sample_bytes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be {least} or more.")
        if self.train_bytes is not None and not self.train_bytes > 0:
            raise ValueError(f"`train_bytes` is {self.train_bytes}; it must be more than 0.")
        if self.bf16 and not torch.accelerator.is_available():
            self.use_cpu = True  # Trainer asks for this flag where there is nothing else
        super().__post_init__()
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be 1 or more.")
        if self.label_smoothing_factor:
            raise ValueError(
                f"`label_smoothing_factor` is {self.label_smoothing_factor}; it must be 0, because bits per byte are "
                "measured with the true targets."
            )
        if self.auto_find_batch_size:
            raise ValueError("`auto_find_batch_size` must be off: another batch size would be another set of streams.")
        if self.fp16_full_eval or self.bf16_full_eval:
            raise ValueError("`fp16_full_eval` and `bf16_full_eval` must be off; evaluation runs as training does.")
        if self.deepspeed or self.fsdp:
            raise ValueError("`deepspeed` and `fsdp` are not supported; run one process per GPU (DDP) instead.")
