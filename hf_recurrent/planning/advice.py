"""Changes of a run that does not fit, each with the memory that it leaves."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hf_recurrent.planning.training_memory import REPLICATED, SHARDED, Setting, TrainingMemory


@dataclass(frozen=True)
class Change:
    """Flags that change a run, and the memory with them."""

    flags: str
    memory: TrainingMemory


def changes(
    setting: Setting,
    count: Callable[[Setting], TrainingMemory],
    *,
    can_checkpoint: bool,
) -> Iterator[Change]:
    """Single changes that need less memory than `setting`, the mildest first.

    Args:
        count: the memory of a setting.
        can_checkpoint: whether the model and the method support gradient checkpointing.
    """
    now = count(setting).total
    for flags, changed in _candidates(setting, can_checkpoint):
        memory = count(changed)
        if memory.total < now:
            yield Change(flags, memory)


def _candidates(setting: Setting, can_checkpoint: bool) -> Iterator[tuple[str, Setting]]:
    if not setting.bfloat16:
        yield "--bf16 true", replace(setting, bfloat16=True)
    if can_checkpoint and not setting.checkpointing:
        yield "--gradient_checkpointing true", replace(setting, checkpointing=True)
    for divisor in (2, 8):
        if setting.streams % divisor == 0 and setting.streams >= divisor:
            streams, accumulation = setting.streams // divisor, setting.accumulation * divisor
            flags = f"--per_device_train_batch_size {streams} --gradient_accumulation_steps {accumulation}"
            yield flags, replace(setting, streams=streams, accumulation=accumulation)
    if setting.stride >= 8 and setting.method == "bptt":
        half = setting.block_size // 2
        yield f"--block_size {half}", replace(setting, block_size=half, stride=half)
    elif setting.stride >= 2:
        stride = setting.stride // 2
        if setting.block_size % stride == 0:
            yield f"--stride {stride}", replace(setting, stride=stride)
    if setting.method not in ("bptt", "truncated", "spatial"):
        yield "--method truncated", replace(setting, method="truncated")
    if setting.processes > 1 and setting.sharding == REPLICATED and setting.method == "bptt":
        yield "--sharding fsdp2", replace(setting, sharding=SHARDED)
    if setting.sharding == SHARDED and not setting.offload:
        yield "--offload", replace(setting, offload=True)
    if setting.sharding == SHARDED or setting.processes == 1:
        more = max(8, 2 * setting.processes)
        flags = f"--processes {more}" + (" --sharding fsdp2" if setting.sharding == REPLICATED else "")
        if setting.method == "bptt":
            yield flags, replace(setting, processes=more, sharding=SHARDED)
