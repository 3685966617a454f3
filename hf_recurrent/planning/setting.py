"""`Setting`: the arguments of training, and of its launcher, that memory and time depend on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainingArguments

from hf_recurrent.data.episode_source import EpisodeSource
from hf_recurrent.trainers.sharding import ShardingSettings, requested_sharding
from hf_recurrent.trainers.smt_arguments import MemoryTrainingArguments, SmtTrainingArguments

BPTT, SMT, DMT = "bptt", "smt", "dmt"
RECIPES = Path(__file__).resolve().parents[1] / "recipes" / "accelerate"


@dataclass(frozen=True)
class Setting:
    """The arguments of training that memory and time depend on."""

    method: str = BPTT  # or the name of a learning rule, smt or dmt
    streams: int = 8  # B, of one process and micro-batch
    block_size: int = 256  # steps of an optimizer step
    stride: int = 256  # T, steps of a forward and backward pass
    accumulation: int = 1  # micro-batches per optimizer step
    anchors: int = 0  # of SMT and DMT, positions of a block with a loss
    first_anchor: int = 0  # of SMT and DMT, the first position that may be one
    bfloat16: bool = False  # autocast
    checkpointing: bool = False  # of gradients
    carries_state: bool = True  # from block to block, where the model has a state
    processes: int = 1
    sharding: ShardingSettings | None = None  # FSDP2; None for a copy of the model in every process (DDP)

    @property
    def step_bytes(self) -> int:
        """Bytes of an optimizer step of all processes."""
        return self.processes * self.accumulation * self.streams * self.block_size


def _launch_settings(name: str) -> dict[str, Any]:
    """Fields of a [`Setting`] in a configuration of accelerate: a path, or a name in `recipes/accelerate`."""
    path = Path(name)
    shipped = sorted(file.name for file in RECIPES.glob("*.yaml"))
    if not path.is_file():
        if name not in shipped:
            raise FileNotFoundError(
                f"`--config_file` is {name!r}; file not found. Or choose from {', '.join(shipped)}."
            )
        path = RECIPES / name
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"`--config_file` is {name!r}, which is not YAML: {error}") from error
    if not isinstance(content, dict) or "distributed_type" not in content:
        raise ValueError(f"`--config_file` is {name!r}, which has no `distributed_type`: not one of accelerate.")
    options = content.get("fsdp_config") or {}
    # As `accelerate launch` passes them on.
    environment = {str(key).upper(): str(value) for key, value in options.items()}
    kind = str(content["distributed_type"])
    environment |= {"ACCELERATE_USE_FSDP": str(kind == "FSDP"), "ACCELERATE_USE_DEEPSPEED": str(kind == "DEEPSPEED")}
    return {
        "processes": int(content.get("num_processes") or 1),
        "bfloat16": content.get("mixed_precision") == "bf16",
        "sharding": requested_sharding(environment),
    }


def setting_of(
    training: TrainingArguments,
    source: EpisodeSource | None,
    config_file: str | None = None,
    processes: int | None = None,
) -> Setting:
    """The setting of a run on the task `source`, or on documents.

    `config_file` is of its launcher, or the name of one in `recipes/accelerate`, and tells the number of processes
    unless `processes` does.

    Raises:
        FileNotFoundError: `config_file` does not exist.
        ValueError: it is not a configuration of accelerate, or does not ask for DDP or FSDP2.
    """
    launch = _launch_settings(config_file) if config_file is not None else {}
    sharding = launch.get("sharding")
    method, anchors, first_anchor = getattr(training, "method", BPTT), 0, 0
    if isinstance(training, MemoryTrainingArguments):
        method = SMT if isinstance(training, SmtTrainingArguments) else DMT
        if training.chooses_block_size and source is not None and source.episode_length is not None:
            training.block_size = source.episode_length
        context_length = min(training.context_length, training.block_size)
        first_anchor = context_length if source is None else source.first_anchor(context_length)
        anchors = training.num_anchors(first_anchor)
    return Setting(
        method=method,
        streams=training.per_device_train_batch_size,
        block_size=training.block_size,
        stride=getattr(training, "stride", None) or training.block_size,
        accumulation=training.gradient_accumulation_steps,
        anchors=anchors,
        first_anchor=first_anchor,
        bfloat16=training.bf16 or launch.get("bfloat16", False),
        checkpointing=training.gradient_checkpointing or (sharding is not None and sharding.activation_checkpointing),
        carries_state=training.regime == "multi_stream",
        processes=launch.get("processes", 1) if processes is None else processes,
        sharding=sharding,
    )
