"""`hf-recurrent plan`: memory and time of a training run, before it starts."""

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Sequence

from hf_recurrent.cli.parsing import CommandParser, check_at_least, run_command

_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command; all others are those of `pretrain`."""
    parser = CommandParser(
        prog="hf-recurrent plan",
        usage="hf-recurrent plan [--config_file FILE] [--processes N] [...]",
        description="Count the memory of a training run before it starts. All other arguments are\nthose of pretrain.",
        epilog="examples:\n"
        "  hf-recurrent plan --model memora-s8 --config_file fsdp2-bfloat16.yaml \\\n"
        "    --processes 8 --memory 80GB\n"
        "  hf-recurrent plan --model memora-s4 --method rtrl --block_size 1 --memory 24GB\n"
        "  hf-recurrent plan --recipe memora-s0 --train_bytes 1e9 --measure 3",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config_file", metavar="FILE", help="of accelerate launch, or ddp.yaml, fsdp2.yaml, ... of "
        "hf_recurrent/recipes/accelerate; by default every process has a copy of the model"
    )  # fmt: skip
    parser.add_argument(
        "--processes", type=int, help="number of processes, one per GPU; by default that of --config_file, else 1"
    )
    parser.add_argument("--memory", type=parse_size, metavar="SIZE", help="of one process; says whether the run fits")
    parser.add_argument("--measure", type=int, metavar="STEPS", help="run a few steps here, and estimate the time")
    parser.add_argument("--json", action="store_true", help="print numbers as JSON")
    return parser


def parse_size(text: str) -> int:
    """Bytes of "80GB", "24 GiB" or "1e9"."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?) *([KMGT]I?B)?", text.strip().upper().replace("E", "e"))
    try:
        return int(float(match[1]) * _UNITS.get(match[2], 1))
    except (TypeError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 80GB, 24GiB or 500MB") from None


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with `argv`, by default the arguments of the process; status 1 if the run does not fit."""
    if not run_command(build_parser(), argv, _check_and_plan, passes_on=True):
        raise SystemExit(1)


def _check_and_plan(arguments: argparse.Namespace, words: Sequence[str]) -> bool:
    """Print the plan of a run; False if it does not fit into `--memory`."""
    for name in ("processes", "measure"):
        if getattr(arguments, name) is not None:
            check_at_least(1, arguments, name)

    # After the checks, because importing torch takes seconds.
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return _plan(arguments, words)
    finally:
        logging.set_verbosity(before)


def _plan(arguments: argparse.Namespace, words: Sequence[str]) -> bool:
    from hf_recurrent.cli.data_arguments import token_vocabulary
    from hf_recurrent.cli.pretrain_arguments import parse_arguments
    from hf_recurrent.planning.advice import changes
    from hf_recurrent.planning.training_memory import distributed, undistributed

    run = parse_arguments(words)
    setting = setting_of(run, arguments)
    vocab_size = token_vocabulary(run.data.corpus)
    counted = {}

    def single(changed):
        key = dataclasses.replace(changed, processes=1, sharding=None)
        if key not in counted:
            counted[key] = undistributed(lambda: _build(run, vocab_size), run.training, key)
        return counted[key]

    def count(changed):
        return distributed(single(changed), changed)

    memory = count(setting)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(memory) | {"total": memory.total}))
    else:
        print(describe(run.model.model, setting, memory, run.training.optim))
    if run.teacher is not None and run.teacher.dmt_steps and not arguments.json:
        print("The DMT steps after it are not counted; --method dmt plans them.")
    if arguments.measure is not None:
        print(_describe_time(_build(run, vocab_size), run, setting, arguments.measure))
    if arguments.memory is None:
        return True
    if memory.total <= arguments.memory:
        print(f"It fits: {size(memory.total)} of {size(arguments.memory)}.")
        return True
    print(f"It does not fit: {size(memory.total)} of {size(arguments.memory)}. Changes:")
    found = list(changes(setting, count, can_checkpoint=single(setting).can_checkpoint))
    for change in found:
        words = "fits" if change.memory.total <= arguments.memory else "does not fit"
        print(f"  {size(change.memory.total):>10}  {words:<12}  {change.flags}")
    if not any(change.memory.total <= arguments.memory for change in found):
        print("None of them is enough by itself: combine them, or take a smaller model.")
    return False


def _build(run, vocab_size: int | None):
    """The model of a run; of SMT and DMT, RNN and teacher, a new one unless the RNN is a saved model."""
    from hf_recurrent.cli.memory_phases import build_teacher
    from hf_recurrent.cli.pretrain import build_model
    from hf_recurrent.presets import preset_names
    from hf_recurrent.trainers.smt.dmt_objective import DmtObjective
    from hf_recurrent.trainers.smt.smt_objective import SmtObjective
    from hf_recurrent.trainers.smt_arguments import SmtTrainingArguments

    model = build_model(run.model, vocab_size)[0]
    if run.teacher is None:
        return model
    is_smt = isinstance(run.training, SmtTrainingArguments)
    teacher = build_teacher(run.teacher, model, run.model.model, is_smt or run.model.model in preset_names())
    return (SmtObjective if is_smt else DmtObjective).from_arguments(model, teacher, run.training)


def setting_of(run, arguments: argparse.Namespace):
    """The setting that the memory of a run depends on.

    Raises:
        FileNotFoundError, ValueError: see [`read_launch_configuration`].
    """
    from hf_recurrent.cli.data_arguments import episode_source
    from hf_recurrent.cli.pretrain_texts import DMT, SMT
    from hf_recurrent.planning.launch_configuration import LaunchConfiguration, read_launch_configuration
    from hf_recurrent.planning.setting import BPTT, Setting
    from hf_recurrent.trainers.smt_arguments import MemoryTrainingArguments, SmtTrainingArguments

    name, training = arguments.config_file, run.training
    launch = LaunchConfiguration() if name is None else read_launch_configuration(name)
    method, anchors, first_anchor = getattr(training, "method", BPTT), 0, 0
    if isinstance(training, MemoryTrainingArguments):
        method = SMT if isinstance(training, SmtTrainingArguments) else DMT
        source = episode_source(run.data.corpus)
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
        bfloat16=training.bf16 or launch.bfloat16,
        checkpointing=training.gradient_checkpointing
        or (launch.sharding is not None and launch.sharding.activation_checkpointing),
        carries_state=training.regime == "multi_stream",
        processes=launch.processes if arguments.processes is None else arguments.processes,
        sharding=launch.sharding,
    )


def describe(name: str, setting, memory, optimizer) -> str:
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
        f"optimizer ({getattr(optimizer, 'value', optimizer)})": memory.optimizer,
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


def _describe_time(model, run, setting, steps: int) -> str:
    from hf_recurrent.planning.throughput import bytes_per_second

    rate = bytes_per_second(model, run.training, setting, steps) * setting.processes
    words = f"measured here: {rate / setting.processes:,.0f} bytes per second of a process"
    total = run.training.max_steps * setting.step_bytes if run.training.max_steps > 0 else run.training.train_bytes
    if not total:
        return f"{words}; with --train_bytes or --max_steps, plan estimates the time"
    together = f" with {setting.processes} processes, if they lose nothing" if setting.processes > 1 else ""
    return f"{words}; {total:,.0f} bytes take {duration(total / rate)}{together}"


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
