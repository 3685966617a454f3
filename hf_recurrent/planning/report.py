"""The report of a plan: a table of memory, the time of a run, and changes that make it fit."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hf_recurrent.export.c_footprint import Footprint
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


def describe(name: str, setting: Setting, memory: TrainingMemory, optimizer: str) -> str:
    """The table of a plan."""
    precision = "bfloat16 autocast" if setting.bfloat16 else "float32"
    head = f"{name}, {memory.num_parameters:,} parameters, {setting.method}, {precision}\n"
    head += (
        f"{setting.processes} x {setting.accumulation} x {setting.streams} streams (processes, accumulation, batch)"
    )
    head += f" of {setting.block_size} bytes: {setting.step_bytes:,} bytes per step"
    communication = "buckets of DDP" if setting.sharding is None else "gathered weights"
    rows = {
        "parameters": memory.parameters,
        "gradients at the peak": memory.gradients,
        f"optimizer ({optimizer})": memory.optimizer,
        communication: memory.communication,
        "carried state": memory.state,
        "sensitivities": memory.sensitivities,
        "activations": memory.activations,
        "total": memory.total,
        "host": memory.host,
    }
    width = max(map(len, rows))
    shown = {words: count for words, count in rows.items() if count}
    lines = [f"  {words:<{width}}  {size(count):>10}" for words, count in shown.items()]
    return "\n".join([head, "memory of one process:", *lines])


def describe_changes(total: int, available: int, changes: Sequence[Change]) -> str:
    """One sentence that says if a run fits; if it does not, the changes that need less memory."""
    if total <= available:
        return f"It fits: {size(total)} of {size(available)}."
    lines = [f"It does not fit: {size(total)} of {size(available)}. Changes:"]
    for change in changes:
        words = "fits" if change.memory.total <= available else "does not fit"
        lines.append(f"  {size(change.memory.total):>10}  {words:<12}  {change.flags}")
    if not any(change.memory.total <= available for change in changes):
        lines.append("None of them is enough by itself: combine them, or take a smaller model.")
    return "\n".join(lines)


def describe_time(rate: float, setting: Setting, total: float | None) -> str:
    """Rate and duration of a run of `total` bytes, from the bytes per second of one process."""
    words = f"measured here: {rate:,.0f} bytes per second of a process"
    if not total:
        return f"{words}; with --train_bytes or --max_steps, plan estimates the time"
    together = f" with {setting.processes} processes, if they lose nothing" if setting.processes > 1 else ""
    return f"{words}; {total:,.0f} bytes take {duration(total / (rate * setting.processes))}{together}"


def describe_footprints(
    name: str, num_parameters: int | None, footprints: Mapping[str, Footprint | str], available: int | None
) -> str:
    """The table of programs in C; a text in place of a footprint says why there is none."""
    of_model = name if num_parameters is None else f"{name}, {num_parameters:,} parameters"
    width = max(map(len, footprints))
    lines = [
        f"{of_model}, as C99; code for Thumb-2 at -Os, about, without libm",
        f"{'':{width}}{'code':>10} {'constants':>10} {'RAM':>9} {'stack':>9} {'together':>9}  operations a token",
    ]
    for program, found in footprints.items():
        if isinstance(found, str):
            lines.append(f"{program:<{width}}  {found}")
            continue
        sizes = (found.code, found.constants, found.ram, found.stack, found.total)
        row = " ".join(f"{size(count):>{space}}" for count, space in zip(sizes, (10, 10, 9, 9, 9), strict=True))
        words = ""
        if available is not None:
            words = "  fits" if found.total <= available else f"  does not fit in {size(available)}"
        lines.append(f"{program:<{width}}{row}  {found.operations:>18,}{words}")
    return "\n".join(lines)


def size(count: float) -> str:
    """A number of bytes with three digits: 1.15 GB."""
    power = min(max(int(math.log10(max(count, 1))) // 3, 1), 4)
    value = count / 1000**power
    return f"{value:.{max(2 - int(math.log10(max(value, 1))), 0)}f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def duration(seconds: float) -> str:
    """Seconds, minutes, hours or days."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"
