"""The arguments of `hf-recurrent pretrain`: dataclasses, recipes and the command line."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from transformers import HfArgumentParser
from transformers.hf_argparser import HfArg

from hf_recurrent.argument_checks import check_numbers
from hf_recurrent.cli.data_arguments import DataArguments
from hf_recurrent.cli.parsing import (
    CommandParser,
    OneSentenceErrors,
    check_at_least,
    check_recognized,
    did_you_mean,
)
from hf_recurrent.cli.recipes import load_recipe, recipe_flags, recipe_names
from hf_recurrent.learning_rules.rules import RULES
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments
from hf_recurrent.trainers.online_arguments import OnlineTrainingArguments
from hf_recurrent.trainers.smt_arguments import DmtTrainingArguments, SmtTrainingArguments

_PROG = "hf-recurrent pretrain"
DEFAULT_RECIPE = "default"
# Truncated backpropagation through each block; RULES are the methods of the online trainer.
DEFAULT_METHOD = "bptt"
SMT, DMT = "smt", "dmt"
METHODS = (DEFAULT_METHOD, *RULES, SMT, DMT)
_TRAINING_ARGUMENTS = {
    DEFAULT_METHOD: MultiStreamTrainingArguments,
    SMT: SmtTrainingArguments,
    DMT: DmtTrainingArguments,
} | dict.fromkeys(RULES, OnlineTrainingArguments)
# Default recipes of methods that do not train a Memora.
_DEFAULT_RECIPES = {SMT: "smt", DMT: "dmt"}
# These belong to one run or one machine, and are left out of a saved recipe.
_NOT_IN_RECIPES = {"output_dir", "resume_from_checkpoint", "hub_token", "local_rank", "recipe"}


@dataclass
class ModelArguments:
    """The model to train."""

    model: str = HfArg(
        default="memora-tiny",
        help="A preset, trained from scratch (memora-s0, hawk-s0, llama-s0, mamba2-s0, ...), or the directory or Hub "
        "name of a model to train further. Example: --model runs/memora-tiny-python",
    )
    config_overrides: list[str] = HfArg(  # noqa: RUF009 (a field)
        default_factory=list, help="Change a preset. Example: --config_overrides hidden_size=192 num_hidden_layers=4"
    )
    tokenizer: str | None = HfArg(
        default=None, help="byte, dna, or a directory; by default byte for presets, else the tokenizer of the model."
    )
    trust_remote_code: bool = HfArg(
        default=False, help="Run the code in the repository of --model; models of this package do not need it."
    )


@dataclass
class PretrainDataArguments(DataArguments):
    """The training data, and separate held-out data."""

    validation_corpus: list[str] = HfArg(  # noqa: RUF009 (a field)
        default_factory=list,
        help="Separate held-out documents, or a task; then all of --corpus is training data. Images with test files "
        "are validated on those by default.",
    )


@dataclass
class TeacherArguments:
    """The teacher of an RNN's memories, and the second phase (`--method smt` and `dmt`)."""

    teacher: str | None = HfArg(
        default=None,
        help="A preset (smt-teacher-paper, ...), or the directory or Hub name of a teacher or of an RNN saved with "
        "one. By default a new one that matches --model; for dmt, the one saved in --model.",
    )
    teacher_overrides: list[str] = HfArg(  # noqa: RUF009 (a field)
        default_factory=list, help="Change a new teacher. Example: --teacher_overrides num_encoder_layers=4"
    )
    dmt_steps: int = HfArg(default=0, help="DMT steps after SMT (DAgger Memory Training); 0 for none.")
    dmt_learning_rate: float = HfArg(default=3e-5, help="Learning rate of DMT.")
    dmt_batch_size: int | None = HfArg(default=None, help="Blocks per DMT step; by default as in SMT.")
    dmt_rollout_length: int = HfArg(default=256, help="Bytes that the RNN reads without its teacher in DMT.")

    def __post_init__(self):
        check_numbers(vars(self), "--")
        check_at_least(0, self, "dmt_steps", "dmt_learning_rate")
        check_at_least(1, self, "dmt_rollout_length")


class _Parser(OneSentenceErrors, HfArgumentParser):
    pass


def build_parser(method: str = DEFAULT_METHOD) -> HfArgumentParser:
    """The arguments of training by `method`; each method has its own defaults, and all but bptt more arguments."""
    own = (TeacherArguments,) if method in (SMT, DMT) else ()
    parser = _Parser(
        (ModelArguments, PretrainDataArguments, _TRAINING_ARGUMENTS[method], *own),
        prog=_PROG,
        usage="hf-recurrent pretrain [--recipe RECIPE] [--model MODEL] [--corpus CORPUS ...] [--ARGUMENT VALUE ...]",
        description="Train a byte-level model on continuous streams, evaluate it on held-out documents and save it. "
        "The default recipe trains a small Memora on the Python standard library in a few minutes.",
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
        help=f"Name ({', '.join(recipe_names())}) or YAML file of a recipe, or `none` for the defaults below; "
        "command-line flags take precedence. (default: %(default)s)",
    )
    if method not in RULES:  # their dataclass has the argument
        parser.add_argument(
            "--method",
            default=method,
            choices=METHODS,
            help="bptt: backpropagation through each block. rtrl: real-time recurrent learning, exact gradients "
            "within each recurrent layer over the whole past. snap1: approximate RTRL (SnAp-1), for units that mix "
            "channels. truncated, spatial: baselines of rtrl. smt: an RNN learns single steps between memories of a "
            "teacher, without unrolling. dmt: the same on its own memories, after smt. `--method NAME --help` lists "
            "the arguments of each. (default: bptt)",
        )
    return parser


@dataclass
class PretrainArguments:
    """All arguments of a run; `given` are those that differ from the defaults, as a recipe."""

    model: ModelArguments
    data: PretrainDataArguments
    training: MultiStreamTrainingArguments
    recipe: str
    given: dict[str, Any]
    names_output_dir: bool
    teacher: TeacherArguments | None = None


def parse_arguments(argv: Sequence[str] | None = None) -> PretrainArguments:
    """Arguments of recipe and command line; the command line takes precedence.

    Raises:
        FileNotFoundError: the recipe does not exist.
        ValueError: an argument or a key of the recipe is unknown, or a value is not allowed.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    finder = CommandParser(prog=_PROG, add_help=False, allow_abbrev=False)
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
        raise ValueError(f"The recipe {name!r} has the unknown key `{unknown[0]}`{did_you_mean(unknown[0], fields)}")
    defaults = vars(parser.parse_known_args([])[0])
    types_of = {key: kind for part in parser.dataclass_types for key, kind in get_type_hints(part).items()}
    flags, own_defaults = recipe_flags(name, recipe, types_of)
    parser.set_defaults(**own_defaults)
    namespace, remaining = parser.parse_known_args([*flags, *argv])
    check_recognized(parser, remaining)
    values = {key: value for key, value in vars(namespace).items() if key in fields}
    check_numbers(values, "--")
    given = {key: value for key, value in values.items() if value != defaults[key] and key not in _NOT_IN_RECIPES}
    names_output_dir = values["output_dir"] is not None
    if not names_output_dir:
        values["output_dir"] = os.path.join("runs", _run_name(values["model"], values["corpus"]))
    if method not in RULES:
        del values["method"]
    if method != DEFAULT_METHOD:
        given["method"] = method  # a default of this parser, but not of recipes
    try:
        model, data, training, *teacher = parser.parse_dict(values)
    except TypeError as error:  # an unknown key in one of the mappings of `TrainingArguments`
        raise ValueError(f"an argument that is a mapping has a wrong key or value: {error}") from error
    return PretrainArguments(model, data, training, name, given, names_output_dir, *teacher)


def _run_name(model: str, corpus: list[str]) -> str:
    first = Path(corpus[0].split(",")[0].rpartition(":")[2]).name.split(".")[0].strip("*") or "corpus"
    return f"{Path(model).name}-{first}"
