"""Run every command with hostile arguments, each in a forked child.

    python tests/faults/fuzz_commands.py --cases 2000 --seed 0

A command ends with status 0, or with 1 or 2 and one sentence: never with a traceback, a signal or without an end, and
nothing in a file is executed. `--only NUMBER` repeats one case and shows its output.
"""

import argparse
import itertools
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from command_files import SMT_TINY, TINY, TRAIN, make_files
from damages import accidents, attacks
from forked import Outcome, run_forked
from tqdm import tqdm

from hf_recurrent.cli import (
    env,
    evaluate,
    generate,
    learn,
    main,
    pretrain,
    pretrain_arguments,
    push_to_hub,
    reproduce,
)

SECONDS = 60.0
_MEMORY = 4 << 30  # bytes of address space in addition to this program's
_MOST_LINES = 12

NUMBERS = [
    "0", "1", "2", "7", "-1", "-0", "+5", " 3", "1.5", "1e0", "0.5", "1e-45", "1e-320", "1e308", "-1e308", "1e999",
    "inf", "-inf", "nan", "Infinity", "9" * 19, "9" * 30, "9" * 400, "9" * 5000, "2147483648", "4294967296",
    "9223372036854775807", "9223372036854775808", "0x10", "1_000", "1,000", "\uff11\uff12", "\u0663", "", "abc",
    "true", "None", "--1",
]  # fmt: skip
WORDS = [
    "", " ", "-", "--", "@", "@good.yaml", "~", ".", "..", "nan", "None", "null", "true", "0", "-1", "x" * 5000,
    "/dev/null", "/dev/null/x", "/proc/1/x", "../../../../etc/passwd", "%s%n{}", "$(touch executed)", "\udcff",
    "\U0001f389", "a\nb", "\x1b[31mred", "{}", "[]", '{"a": 1}', '{"a": {"b": [1]}}', '{"a": ', "[[[[", "{" * 3000,
    "[" * 3000, "!!python/object/apply:os.system [touch executed]", "a/b", "a/b/c", "http://example.org/a",
    "task:", "task:parity", "task:parity,length=-1", "task:parity,length=inf", "task:copying,length=3,no=1",
    "task:retrieval,length=9,num_validation_examples=0", "hub:", "hub:a/b", "mnist:", "mnist:notes", "images:notes",
    "tcp://127.0.0.1:99999", "tcp://127.0.0.1:1", "tcp://[::1", "cpu", "cuda", "cuda:99", "meta", "python:",
    "memora-tiny", "llama-tiny", "lru-scifar", "mgrade-smnist", "smt-teacher-tiny", "rtrl", "adamw", "byte", "dna",
    "me/model", "a" * 200 + "/b", "constant", "no", "epoch", "best",
]  # fmt: skip
KEYS = [
    "hidden_size", "state_size", "num_hidden_layers", "vocab_size", "intermediate_size", "recurrent_unit", "norm_eps",
    "tie_word_embeddings", "use_cache", "eos_token_id", "pad_token_id", "pooling", "conv_kernel", "dropout", "spacing",
    "num_attention_heads", "num_memory_tokens", "backbone", "memory_norm", "num_labels", "id2label", "dtype",
    "to_dict", "__class__", "_name_or_path", "auto_map", "attn_implementation", "a", "", "a b", "steps", "length",
    "allow_negative_eigenvalues", "initializer_range", "rope_theta", "hidden_act", "input_size", "label",
]  # fmt: skip
VALUES = [
    "!!python/object/apply:os.system [touch executed]", "!foo 1", "!!int ''", "!!timestamp x", "2020-01-01", "[", "{",
    "'", "null", "true", "no", ".inf", ".nan", "NaN", "1e9", "1e-3", "-1", "0", "3", "8", "16", "999999999",
    "9" * 30, "abc", "''", "[8]", "{a: 1}", "&a [*a]", "glru", "mingru", "gelu", "gru", "[" * 3000, "\udcff",
]  # fmt: skip
# Large values that are allowed take their time or fill the machine with processes: only small and impossible ones.
_COSTLY = {
    "max_steps", "num_train_epochs", "train_bytes", "max_new_tokens", "num_beams", "sample_bytes", "dmt_steps",
    "gradient_accumulation_steps", "dataloader_num_workers", "processes", "threads", "timeout", "dmt_batch_size",
    "eval_accumulation_steps", "timesteps", "dataloader_prefetch_factor",
}  # fmt: skip
_MAPPINGS = ("kwargs", "config", "optim_args", "fsdp", "deepspeed")
# Compilation takes minutes.
_LEFT_OUT = {"help", "torch_compile", "torch_compile_backend", "torch_compile_mode"}
_WRITTEN = {"output_dir", "output", "save_state", "page"}


@dataclass
class Command:
    """A command with good arguments, which the drawn ones follow."""

    name: str
    run: Callable[[list[str]], None]
    parser: argparse.ArgumentParser
    begin: list[list[str]]
    weight: int


def commands() -> list[Command]:
    loaded = ["--device", "cpu"]
    found = [
        Command(
            "generate",
            generate.main,
            generate.build_parser(),
            [[model, "--prompt", "abc", "--max_new_tokens", "2", *loaded] for model in ("memora", "llama")]
            + [["memora", "--state", "good.safetensors", "--max_new_tokens", "2", *loaded]],
            20,
        ),
        Command(
            "evaluate",
            evaluate.main,
            evaluate.build_parser(),
            [[model, "--corpus", "notes", "--block_size", "16", "--quiet", *loaded] for model in ("memora", "llama")],
            15,
        ),
        Command(
            "learn",
            learn.main,
            learn.build_parser(),
            [
                ["memora", "--source", "log.txt", "--timeout", "0.2", "--stride", "16", *loaded],
                ["memora", "--source", "log.txt", "--output_dir", "learned", "--resume", "--stride", "16", *loaded],
            ],
            15,
        ),
        Command(
            "push_to_hub", push_to_hub.main, push_to_hub.build_parser(), [["memora", "me/model", "--dry_run"]], 10
        ),
        Command(
            "reproduce",
            reproduce.main,
            reproduce.build_parser(),
            [["parity", "--only", "none of them"], ["parity", "--only", "GLRU", "--override", "steps=none"]],
            5,
        ),
        Command("env", env.main, env.build_parser(), [[]], 1),
    ]
    resumed = [*TRAIN, "--config_overrides", *TINY, "--output_dir", "run", "--resume_from_checkpoint", "true"]
    smt = ["--context_length", "4", "--eval_windows", "2", "--block_size", "12"]
    both = ["--future_length", "3", "--dmt_steps", "1", "--dmt_rollout_length", "3"]
    begins = {
        "bptt": [[*TRAIN, "--config_overrides", *TINY], [*TRAIN, "--model", "memora"], resumed],
        "rtrl": [[*TRAIN, "--config_overrides", *TINY]],
        "smt": [[*TRAIN, *smt, *both, "--config_overrides", *SMT_TINY]],
        "dmt": [[*TRAIN, *smt, "--rollout_length", "3", "--model", "rnn"]],
    }
    for method, begin in begins.items():
        begin = [["--method", method, *arguments] for arguments in begin]
        weight = 30 if method == "bptt" else 8
        found.append(Command("pretrain", pretrain.main, pretrain_arguments.build_parser(method), begin, weight))
    return found


def draw_arguments(command: Command, draw: random.Random, files: list[str]) -> list[str]:
    """Good arguments, and between one and three hostile ones before, after or in place of them."""
    arguments = list(draw.choice(command.begin))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        kind = draw.random()
        if kind < 0.85:
            hostile = _draw_flag(command.parser, draw, files)
            if draw.random() < 0.9:
                arguments += hostile
            else:
                arguments = hostile + arguments
        elif kind < 0.89 and arguments:  # a missing or doubled word
            del arguments[draw.randrange(len(arguments))]
        elif kind < 0.93 and arguments:  # another word
            place = draw.randrange(len(arguments))
            if arguments[place] != "notes" or arguments[max(place - 1, 0)] != "--output_dir":
                arguments[place] = draw.choice([*files, *WORDS])
        else:
            arguments.insert(
                draw.randrange(len(arguments) + 1), draw.choice([*WORDS, "--no_such_flag", "--max", "-x"])
            )
    return arguments


def _draw_flag(parser: argparse.ArgumentParser, draw: random.Random, files: list[str]) -> list[str]:
    actions = [action for action in parser._actions if action.dest not in _LEFT_OUT]
    if not actions:
        return [draw.choice(WORDS)]
    action = draw.choice(actions)
    count = draw.choice((1, 1, 2, 3)) if action.nargs == "+" else draw.choice((1, 1, 1, 1, 1, 0))
    values = [_draw_value(action, draw, files) for _ in range(count)]
    if action.nargs == 0:
        values = values[:1] if draw.random() < 0.1 else []
    if not action.option_strings:
        return values
    flag = draw.choice(action.option_strings)
    if len(values) == 1 and draw.random() < 0.7:
        return [f"{flag}={values[0]}"]  # else some are read as flags
    return [flag, *values]


def _draw_value(action: argparse.Action, draw: random.Random, files: list[str]) -> str:
    name = action.dest
    if name.endswith(("overrides", "override")) and draw.random() < 0.9:
        return f"{draw.choice(KEYS)}={draw.choice(VALUES)}"
    if action.choices and draw.random() < 0.6:
        return str(draw.choice(list(action.choices)))
    numeric = action.type is not None and action.type is not str and _accepts(action.type, "1")
    if numeric and draw.random() < 0.3:
        return draw.choice(["1", "2", "3", "8", "16", "0.5"])
    if numeric and draw.random() < 0.9:
        return draw.choice([number for number in NUMBERS if name not in _COSTLY or not _is_large(number)])
    if any(part in name for part in _MAPPINGS) and draw.random() < 0.6:
        return draw.choice([word for word in WORDS if word.startswith(("{", "["))])
    if name in _WRITTEN:
        return draw.choice(["new", "new/deep", *files, *(word for word in WORDS if not word.startswith(".."))])
    if draw.random() < 0.5:
        return draw.choice(files)
    return draw.choice(WORDS)


def _accepts(convert: Callable[[str], object], text: str) -> bool:
    try:
        return not isinstance(convert(text), str | bool | Path)
    except (TypeError, ValueError):
        return False


def _is_large(text: str) -> bool:
    try:
        return 32 < float(text) < 2**63
    except ValueError:
        return False


def damage_something(folder: Path, draw: random.Random) -> str | None:
    """Damage one file of a model, a run or a learner in a way that keeps its manifest consistent or not."""
    if draw.random() < 0.75:
        return None
    place = draw.choice(["memora", "llama", "rnn", "rnn/teacher", "run", "run/checkpoint-1", "learned"])
    found = sorted(path for path in (folder / place).rglob("*") if path.is_file())
    path = draw.choice(found)
    kind = attacks if path.suffix in (".json", ".safetensors") and draw.random() < 0.7 else accidents
    name, damage = next(itertools.islice(kind(path, draw), draw.randrange(9), None))
    if path.stat().st_size or kind is attacks:
        damage(path)
    return f"{path.relative_to(folder)}: {name}"


def run_case(
    case: int, options: argparse.Namespace, folder: Path, found: list[Command]
) -> tuple[str, Outcome, str | None]:
    """Run one case in a copy of the files; return its command line, its outcome and its fault."""
    draw = random.Random(f"{options.seed}-{case}")
    work = folder / f"case-{case}"
    shutil.copytree(folder / "files", work, symlinks=True)
    try:
        files = sorted(os.listdir(work))
        damaged = damage_something(work, draw)
        command = draw.choices(found, [command.weight for command in found])[0]
        arguments = draw_arguments(command, draw, files)
        call, words = command.run, arguments
        if draw.random() < 0.05:  # through the entry point, sometimes with a wrong command
            name = draw.choice([command.name, command.name.replace("_", "-"), *WORDS[:12], "pretrain.main"])
            call, words = main.main, [name, *arguments]
        outcome = run_forked(lambda: _run_here(call, words, work), SECONDS, _vm_size() + _MEMORY)
        line = shlex.join([command.name, *words]) + (f"   (damaged: {damaged})" if damaged else "")
        return line, outcome, _fault(outcome, work)
    finally:
        shutil.rmtree(work)


def _run_here(call: Callable[[list[str]], None], words: list[str], work: Path) -> None:
    import huggingface_hub.constants

    os.chdir(work)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    huggingface_hub.constants.HF_HOME = os.fspath(work / "home")
    call(words)


def _vm_size() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _fault(outcome: Outcome, work: Path) -> str | None:
    if list(work.rglob("executed")):
        return "executed something"
    if outcome.timed_out:
        return "no end"
    if outcome.crashed:
        return f"signal {-outcome.status}"
    if outcome.has_traceback:
        return "traceback"
    if outcome.status not in (0, 1, 2):
        return f"status {outcome.status}"
    if outcome.status:
        lines = [line for line in outcome.err.splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("hf-recurrent")]
        if not ours or ": error: " not in ours[-1]:
            return "no sentence"
        if len(lines) > _MOST_LINES:
            return "too many lines"
    return None


def run_all(options: argparse.Namespace, folder: Path) -> Counter:
    """Run the cases; the counter has their ends by command, and each fault under its own words."""
    (folder / "files").mkdir()
    os.chdir(folder / "files")
    make_files(folder / "files")
    os.chdir(folder)
    found, count = commands(), Counter()
    chosen = [options.only] if options.only is not None else range(options.first, options.first + options.cases)
    for case in tqdm(chosen, unit="case", disable=not sys.stderr.isatty()):
        begin = time.monotonic()
        line, outcome, fault = run_case(case, options, folder, found)
        count["cases"] += 1
        count[f"faults: {fault}" if fault else f"status {outcome.status}"] += 1
        if fault or options.only is not None:
            shown = outcome.out[-2000:] + outcome.err[-3000:] if options.only is not None else outcome.err[-1200:]
            repeat = f"python tests/faults/fuzz_commands.py --seed {options.seed} --only {case}"
            seconds = time.monotonic() - begin
            print(f"--- {fault}, {seconds:.1f} s: {repeat}\n{line[:1500]}\n{shown}", flush=True)
    return count


def main_program() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="run only this case, and show its output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        count = run_all(options, Path(folder))
        os.chdir("/")
    for name, value in sorted(count.items()):
        print(f"{value:6,}  {name}")
    sys.exit(any(name.startswith("faults") for name in count))


if __name__ == "__main__":
    main_program()
