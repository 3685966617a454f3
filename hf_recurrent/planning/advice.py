"""Changes of a run that does not fit, each with the memory that it leaves."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hf_recurrent.learning_rules.rules import RULES
from hf_recurrent.planning.setting import BPTT, Setting
from hf_recurrent.planning.training_memory import MemoryCounter, TrainingMemory
from hf_recurrent.trainers.sharding import ShardingSettings

_WITHOUT_STATE = ("truncated", "spatial")  # rules that carry no sensitivities


@dataclass(frozen=True)
class Change:
    """Flags that change a run, and the memory with them."""

    flags: str
    memory: TrainingMemory


def changes(setting: Setting, counter: MemoryCounter) -> Iterator[Change]:
    """Single changes that need less memory than `setting`, the mildest first."""
    now = counter.count(setting).total
    for flags, changed in _candidates(setting, counter.can_checkpoint(setting)):
        memory = counter.count(changed)
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
    if setting.method == BPTT and setting.stride >= 8:
        half = setting.block_size // 2
        yield f"--block_size {half}", replace(setting, block_size=half, stride=half)
    elif setting.method in RULES and setting.stride >= 2:
        stride = setting.stride // 2
        if setting.block_size % stride == 0:
            yield f"--stride {stride}", replace(setting, stride=stride)
    if setting.method in RULES and setting.method not in _WITHOUT_STATE:
        yield "--method truncated", replace(setting, method="truncated")
    if setting.processes > 1 and setting.sharding is None:
        yield _launched("fsdp2.yaml", setting), replace(setting, sharding=ShardingSettings())
    if setting.sharding is not None and not setting.sharding.offload:
        offloaded = replace(setting.sharding, offload=True)
        yield _launched("fsdp2-offload.yaml", setting), replace(setting, sharding=offloaded)
    if setting.sharding is not None or setting.processes == 1:
        more = max(8, 2 * setting.processes)
        flags, sharding = f"--processes {more}", setting.sharding
        if sharding is None:
            flags, sharding = f"{_launched('fsdp2.yaml', setting)} {flags}", ShardingSettings()
        yield flags, replace(setting, processes=more, sharding=sharding)


def _launched(file: str, setting: Setting) -> str:
    """The flags of another launch configuration, with the precision and checkpointing of the present one."""
    flags = f"--config_file {file}"
    flags += " --bf16 true" if setting.bfloat16 else ""
    return flags + (" --gradient_checkpointing true" if setting.checkpointing else "")
