"""The arguments of `hf-recurrent pretrain`: dataclasses, recipes, and how the two meet the command line."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from hf_recurrent.cli.data_arguments import DataArguments
from hf_recurrent.learning_rules.rules import RULES
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments
from hf_recurrent.trainers.online_arguments import OnlineTrainingArguments
from hf_recurrent.trainers.smt_arguments import DmtTrainingArguments, SmtTrainingArguments

DEFAULT_RECIPE = "default"
# Backpropagation inside each block, by the stream trainer; RULES are those of the online trainer.
DEFAULT_METHOD = "bptt"
SMT, DMT = "smt", "dmt"
METHODS = (DEFAULT_METHOD, *RULES, SMT, DMT)
_TRAINING_ARGUMENTS = {
    DEFAULT_METHOD: MultiStreamTrainingArguments,
    SMT: SmtTrainingArguments,
    DMT: DmtTrainingArguments,
} | dict.fromkeys(RULES, OnlineTrainingArguments)
# The recipe where none is named; the default one is a Memora's.
_DEFAULT_RECIPES = {SMT: "smt", DMT: "dmt"}
# Belong to one run or one machine: a recipe that is written down again leaves them out.
_NOT_IN_RECIPES = {"output_dir", "resume_from_checkpoint", "hub_token", "local_rank", "recipe"}


@dataclass
class ModelArguments:
    """What is trained."""

    model: str = field(
        default="memora-tiny",
        metadata={
            "help": "A preset, trained from scratch (memora-s0, hawk-s0, llama-s0, mamba2-s0, ...), or the "
            "directory or Hub name of a model to go on with. Example: --model runs/memora-tiny-python"
        },
    )
    config_overrides: list[str] = field(
        default_factory=list,
        metadata={"help": "Change a preset. Example: --config_overrides hidden_size=192 num_hidden_layers=4"},
    )
    tokenizer: str | None = field(
        default=None,
        metadata={"help": "byte, dna, or a directory; by default byte for presets and the model's own for others."},
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run the code that comes with --model; Memora and Hawk do not need it."}
    )


@dataclass
class PretrainDataArguments(DataArguments):
    """The data that a model is trained on, and held-out data of its own."""

    validation_corpus: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Held-out documents, or a task, of their own; then nothing of --corpus is held out. Images with "
            "test files are validated on those anyway."
        },
    )


@dataclass
class TeacherArguments:
    """The teacher of an RNN's memories, and the second phase (`--method smt` and `dmt`)."""

    teacher: str | None = field(
        default=None,
        metadata={
            "help": "A preset (smt-teacher-paper, ...), or the directory or Hub name of a teacher or of an RNN that "
            "has one. By default a new one that fits --model, and for dmt the one that lies in --model."
        },
    )
    teacher_overrides: list[str] = field(
        default_factory=list,
        metadata={"help": "Change a new teacher. Example: --teacher_overrides num_encoder_layers=4"},
    )
    dmt_steps: int = field(
        default=0, metadata={"help": "Steps of DAgger Memory Training behind SMT, in the same command; 0 for none."}
    )
    dmt_learning_rate: float = field(default=3e-5, metadata={"help": "Learning rate of that phase."})
    dmt_batch_size: int | None = field(default=None, metadata={"help": "Blocks of its steps; by default as in SMT."})
    dmt_rollout_length: int = field(default=256, metadata={"help": "Bytes that the RNN reads by itself there."})

    def __post_init__(self):
        for name, least in (("dmt_steps", 0), ("dmt_rollout_length", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be {least} or more.")


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        # Without argparse's usage, which would be a page of training arguments.
        self.exit(2, f"{self.prog}: error: {message}\n")


def build_parser(method: str = DEFAULT_METHOD) -> HfArgumentParser:
    """The arguments of training by `method`; all but bptt have a few more, and defaults of their own."""
    own = (TeacherArguments,) if method in (SMT, DMT) else ()
    parser = _Parser(
        (ModelArguments, PretrainDataArguments, _TRAINING_ARGUMENTS[method], *own),
        prog="hf-recurrent pretrain",
        usage="hf-recurrent pretrain [--recipe RECIPE] [--model MODEL] [--corpus CORPUS ...] [--ARGUMENT VALUE ...]",
        description="Train a byte-level model on continuous streams, evaluate it on held-out documents and save it. "
        "Without arguments: the default recipe, a small Memora on the Python standard library, a few minutes.",
        epilog="Examples:\n"
        "  hf-recurrent pretrain\n"
        "  hf-recurrent pretrain --recipe memora-s0 --corpus my_files/ --train_bytes 50e6\n"
        "  hf-recurrent pretrain --model llama-s0 --regime iid --block_size 512\n"
        "  hf-recurrent pretrain --method rtrl --block_size 1 --learning_rate 1e-3\n"
        "  hf-recurrent pretrain --method smt --dmt_steps 300\n"
        "  hf-recurrent pretrain --recipe memora-s0 --output_dir runs/one --resume_from_checkpoint true\n"
        "  torchrun --nproc_per_node 2 scripts/pretrain.py --use_cpu",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--recipe",
        default=_DEFAULT_RECIPES.get(method, DEFAULT_RECIPE),
        help=f"Name ({', '.join(recipe_names())}) or YAML file of a recipe, `none` for the defaults below; "
        "what stands on the command line wins. (default: %(default)s)",
    )
    if method not in RULES:  # whose arguments have it
        parser.add_argument(
            "--method",
            default=method,
            choices=METHODS,
            help="bptt: backpropagation inside each block. rtrl: learning while reading, with exact credit inside "
            "each recurrent layer for all of the past. snap1: an approximation for units that mix channels. "
            "truncated, spatial: what rtrl is compared with. smt: an RNN learns steps between a teacher's memories, "
            "without unrolling; dmt: then on its own memories. `--method NAME --help` lists what each has more. "
            "(default: bptt)",
        )
    return parser


@dataclass
class PretrainArguments:
    """Everything that one run was asked for; `given` is what differs from the defaults, as a recipe."""

    model: ModelArguments
    data: PretrainDataArguments
    training: MultiStreamTrainingArguments
    recipe: str
    given: dict[str, Any]
    names_output_dir: bool
    teacher: TeacherArguments | None = None


def parse_arguments(argv: Sequence[str] | None = None) -> PretrainArguments:
    """Recipe and command line, the latter winning.

    Raises:
        FileNotFoundError: there is no such recipe.
        ValueError: an argument or a key of the recipe is unknown, or a value is not allowed.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--recipe")
    finder.add_argument("--method")
    found = finder.parse_known_args(argv)[0]
    name = found.recipe or _DEFAULT_RECIPES.get(found.method, DEFAULT_RECIPE)
    recipe = load_recipe(name)
    method = found.method or recipe.get("method", DEFAULT_METHOD)
    if method not in METHODS:
        raise ValueError(f"`--method` is {method!r}; it must be one of {', '.join(METHODS)}.")
    parser = build_parser(method)
    fields = {f.name for part in parser.dataclass_types for f in dataclasses.fields(part) if f.init} | {"method"}
    if unknown := sorted(set(recipe) - fields):
        raise ValueError(f"The recipe {name!r} sets `{unknown[0]}`, which is no argument; --help lists them.")
    defaults = vars(parser.parse_known_args([])[0])
    parser.set_defaults(**recipe)
    namespace, remaining = parser.parse_known_args(argv)
    if remaining:
        raise ValueError(f"`{remaining[0]}` is no argument; --help lists them.")
    values = {key: value for key, value in vars(namespace).items() if key in fields}
    given = {key: value for key, value in values.items() if value != defaults[key] and key not in _NOT_IN_RECIPES}
    names_output_dir = values["output_dir"] is not None
    if not names_output_dir:
        values["output_dir"] = os.path.join("runs", _run_name(values["model"], values["corpus"]))
    if method not in RULES:
        del values["method"]
    if method != DEFAULT_METHOD:
        given["method"] = method  # a default of these arguments, but not of a recipe
    model, data, training, *teacher = parser.parse_dict(values)
    return PretrainArguments(model, data, training, name, given, names_output_dir, *teacher)


def _run_name(model: str, corpus: list[str]) -> str:
    first = Path(corpus[0].split(",")[0].rpartition(":")[2]).name.split(".")[0].strip("*") or "corpus"
    return f"{Path(model).name}-{first}"


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    folder = files("hf_recurrent").joinpath("recipes")
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_recipe(name: str) -> dict[str, Any]:
    """A recipe's arguments by its name, or from a YAML file; `none` has none.

    Raises:
        FileNotFoundError: there is neither a recipe nor a file of this name.
        ValueError: the file is not YAML, or no mapping of arguments to values.
    """
    if name == "none":
        return {}
    if name in recipe_names():
        text = files("hf_recurrent").joinpath("recipes", f"{name}.yaml").read_text(encoding="utf-8")
    elif os.path.isfile(name):
        text = Path(name).read_text(encoding="utf-8")
    else:
        raise FileNotFoundError(
            f"`--recipe` is {name!r}; it must be a YAML file, none, or one of {', '.join(recipe_names())}."
        )
    try:
        recipe = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"The recipe {name!r} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"The recipe {name!r} must map arguments to values, but it is a {type(recipe).__name__}.")
    return recipe


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """["hidden_size=64", "a=true"] → {"hidden_size": 64, "a": True}; ValueError for anything else."""
    overrides = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"`--config_overrides` holds {pair!r}; each must be name=value.")
        overrides[key] = yaml.safe_load(value)
    return overrides
