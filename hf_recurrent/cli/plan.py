"""`hf-recurrent plan`: memory and time of a training run, or of a server, before it starts."""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_recurrent.cli.imports import import_libraries
from hf_recurrent.cli.loading import add_loading_arguments, load_or_build
from hf_recurrent.cli.parsing import CommandParser, add_json_argument, check_at_least, run_command

if TYPE_CHECKING:
    from torch import nn

    from hf_recurrent.cli.pretrain_arguments import PretrainArguments

_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command; all others belong to `pretrain`."""
    parser = CommandParser(
        prog="hf-recurrent plan",
        usage="hf-recurrent plan [--config_file FILE] [--processes N] [...]",
        description="Count the memory of a training run before it starts, or of a model as exported\n"
        "C. Other arguments are passed to pretrain.",
        epilog="examples:\n"
        "  hf-recurrent plan --model memora-s8 --config_file fsdp2-bfloat16.yaml \\\n"
        "    --processes 8 --memory 80GB\n"
        "  hf-recurrent plan --model memora-s4 --method rtrl --block_size 1 --memory 24GB\n"
        "  hf-recurrent plan --recipe memora-s0 --train_bytes 1e9 --measure 3\n"
        "  hf-recurrent plan --target c --model runs/hawk --memory 256KB\n\n"
        "hf-recurrent plan serve MODEL counts the states and users of a server.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--config_file", metavar="FILE", help="of accelerate launch, or ddp.yaml, fsdp2.yaml, ... of "
        "hf_recurrent/recipes/accelerate; by default every process has a copy of the model"
    )  # fmt: skip
    add("--processes", type=int, help="number of processes, one per GPU; by default as in --config_file, else 1")
    memory = "of one process, or of flash and RAM with --target; says whether the run fits"
    add("--memory", type=parse_size, metavar="SIZE", help=memory)
    add("--target", choices=["c"], help="plan the programs of `export --format c` instead of training")
    add("--inputs", type=int, help="number of measurements of a learner, with --target c, as in `export`")
    add("--targets", type=int, help="with --inputs, values that are learned from them, as in `export`")
    add("--measure", type=int, metavar="STEPS", help="run a few steps here, and estimate the time")
    add_json_argument(parser)
    return parser


def build_serve_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-recurrent plan serve",
        description="Count the memory of a text of a server, and measure its steps on one core. MODEL may\n"
        "be the name of a preset.",
        epilog="example:\n  hf-recurrent plan serve memora-s0 --rows 64 --user_rate 20",
    )
    add_loading_arguments(parser, takes_presets=True, device="cpu")
    add = parser.add_argument
    add("--rows", type=int, default=64, help="texts that generate at a time (default: 64)")
    add("--user_rate", type=float, default=20.0, help="tokens per second of a user who waits (default: 20)")
    add("--seed", type=int, default=0, help="of a preset's weights (default: 0)")
    add_json_argument(parser)
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
    words = sys.argv[1:] if argv is None else argv
    if list(words[:1]) == ["serve"]:
        run_command(build_serve_parser(), words[1:], _plan_serve)
    elif not run_command(build_parser(), argv, _check_and_plan, passes_on=True):
        raise SystemExit(1)


def _plan_serve(arguments: argparse.Namespace) -> None:
    check_at_least(1, arguments, "rows")
    if not arguments.user_rate > 0:
        raise ValueError(f"`--user_rate` is {arguments.user_rate}; it must be more than 0.")
    model, _ = load_or_build(arguments)

    from hf_recurrent.planning.serving_capacity import describe, serving_capacity

    try:
        found = serving_capacity(model, arguments.rows, arguments.user_rate)
    except TypeError as error:
        raise ValueError(f"`MODEL` is {arguments.model!r}: {error}") from error
    print(json.dumps(found) if arguments.json else describe(arguments.model, found))


def _check_and_plan(arguments: argparse.Namespace, words: Sequence[str]) -> bool:
    """Print the plan of a run; False if it does not fit into `--memory`."""
    check_at_least(1, arguments, "processes", "measure", "inputs", "targets")
    if arguments.inputs is not None and arguments.target is None:
        raise ValueError("`--inputs` needs --target c.")
    if arguments.targets is not None and arguments.inputs is None:
        raise ValueError("`--targets` needs --inputs.")

    import_libraries("hf_recurrent.cli.pretrain_arguments", "hf_recurrent.planning.training_steps")
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return _plan(arguments, words)
    finally:
        logging.set_verbosity(before)


def _plan(arguments: argparse.Namespace, words: Sequence[str]) -> bool:
    from hf_recurrent.cli.data_arguments import episode_source, token_vocabulary
    from hf_recurrent.cli.pretrain_arguments import parse_arguments
    from hf_recurrent.planning.report import changes, describe, describe_changes, describe_time
    from hf_recurrent.planning.setting import setting_of
    from hf_recurrent.planning.training_memory import MemoryCounter
    from hf_recurrent.planning.training_steps import bytes_per_second

    run = parse_arguments(words)
    if arguments.target is not None:
        return _plan_c(arguments, run)
    training, vocab_size = run.training, token_vocabulary(run.data.corpus)
    setting = setting_of(training, episode_source(run.data.corpus), arguments.config_file, arguments.processes)
    counter = MemoryCounter(lambda: _build(run, vocab_size), training)
    memory = counter.count(setting)
    values = dataclasses.asdict(memory) | {"total": memory.total}
    lines = [describe(run.model.model, setting, memory, getattr(training.optim, "value", training.optim))]
    if run.teacher is not None and run.teacher.dmt_steps:
        lines.append("The DMT steps after it are not counted; --method dmt plans them.")
    if arguments.measure is not None:
        rate = bytes_per_second(_build(run, vocab_size), training, setting, arguments.measure)
        total = training.max_steps * setting.step_bytes if training.max_steps > 0 else training.train_bytes
        values |= {"bytes_per_second": rate, "seconds": total / (rate * setting.processes) if total else None}
        lines.append(describe_time(rate, setting, total))
    fits = arguments.memory is None or memory.total <= arguments.memory
    if arguments.memory is not None:
        found = [] if fits else list(changes(setting, counter))
        values |= {"fits": fits}
        lines.append(describe_changes(memory.total, arguments.memory, found))
    print(json.dumps(values) if arguments.json else "\n".join(lines))
    return fits


def _plan_c(arguments: argparse.Namespace, run: "PretrainArguments") -> bool:
    """Print the footprints of exported C; False if none of them fits into `--memory`."""
    from hf_recurrent.cli.data_arguments import token_vocabulary
    from hf_recurrent.cli.learn import OPTIMIZERS
    from hf_recurrent.cli.pretrain import build_model
    from hf_recurrent.planning.c_footprints import c_footprints
    from hf_recurrent.planning.report import describe_footprints

    for name in ("config_file", "processes", "measure"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"`--{name}` is of training; leave it out with --target c.")
    name, count, model = f"a new model of {arguments.inputs} measurements", None, None
    if arguments.inputs is None:
        model = build_model(run.model, token_vocabulary(run.data.corpus))[0].float().eval()
        name, count = run.model.model, model.num_parameters()
    found = dict(c_footprints(model, OPTIMIZERS, arguments.inputs, arguments.targets))
    counted = {name: one for name, one in found.items() if not isinstance(one, str)}
    fits = {name: arguments.memory is None or one.total <= arguments.memory for name, one in counted.items()}
    if arguments.json:
        values = {
            name: dataclasses.asdict(one) | {"total": one.total, "fits": fits[name]} for name, one in counted.items()
        }
        print(json.dumps(values | {name: {"refused": one} for name, one in found.items() if name not in counted}))
    else:
        print(describe_footprints(name, count, found, arguments.memory))
    return any(fits.values())


def _build(run: "PretrainArguments", vocab_size: int | None) -> "nn.Module":
    """The model of a run; of SMT and DMT, RNN and teacher, a new one unless the RNN is a saved model."""
    from hf_recurrent.cli.memory_phases import build_teacher
    from hf_recurrent.cli.pretrain import build_model
    from hf_recurrent.presets import preset_names
    from hf_recurrent.trainers.smt.smt_objective import DmtObjective, SmtObjective
    from hf_recurrent.trainers.smt_arguments import SmtTrainingArguments

    model = build_model(run.model, vocab_size)[0]
    if run.teacher is None:
        return model
    is_smt = isinstance(run.training, SmtTrainingArguments)
    teacher = build_teacher(run.teacher, model, run.model.model, is_smt or run.model.model in preset_names())
    return (SmtObjective if is_smt else DmtObjective).from_arguments(model, teacher, run.training)
