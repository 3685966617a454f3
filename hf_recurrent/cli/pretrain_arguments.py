"""The arguments of `hf-recurrent pretrain`: dataclasses, recipes and the command line."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from transformers import HfArgumentParser

from hf_recurrent.argument_checks import argument, check_numbers
from hf_recurrent.cli import pretrain_help as texts
from hf_recurrent.cli.data_arguments import DataArguments
from hf_recurrent.cli.flags import check_recognized, did_you_mean, normalize, unrecognized
from hf_recurrent.cli.parsing import OneSentenceErrors, add_json_argument, check_at_least
from hf_recurrent.cli.pretrain_help import DEFAULT_METHOD, DMT, METHODS, SMT, chosen_recipe, recipe_help
from hf_recurrent.cli.recipes import recipe_flags
from hf_recurrent.cli.threads import add_threads_argument
from hf_recurrent.cli.user_code import import_user_code
from hf_recurrent.learning_rules.rules import RULES
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments
from hf_recurrent.trainers.online_arguments import OnlineTrainingArguments
from hf_recurrent.trainers.smt_arguments import DmtTrainingArguments, SmtTrainingArguments

_TRAINING_ARGUMENTS = {
    DEFAULT_METHOD: MultiStreamTrainingArguments,
    SMT: SmtTrainingArguments,
    DMT: DmtTrainingArguments,
} | dict.fromkeys(RULES, OnlineTrainingArguments)
# These belong to one run or one machine, and are left out of a saved recipe.
_NOT_IN_RECIPES = {"output_dir", "resume_from_checkpoint", "hub_token", "local_rank", "recipe"}


@dataclass
class ModelArguments:
    """The model to train."""

    model: str = argument(
        "memora-tiny",
        "A preset, trained from scratch (memora-s0, hawk-s0, llama-s0, mamba2-s0, ...), or the directory or Hub "
        "name of a model to train further. Example: --model runs/memora-tiny-python",
    )
    config_overrides: list[str] = argument(
        [],
        "Change a preset, in place of the changes of the recipe, which are also left out with another --model. "
        "Example: --config_overrides hidden_size=192 num_hidden_layers=4",
    )
    lora_rank: int | None = argument(
        None,
        "Freeze a saved --model and train an adapter of this rank (LoRA, with peft) on its linear maps; the adapter "
        "alone is saved. Example: --lora_rank 8",
    )
    tokenizer: str | None = argument(
        None, "byte, dna, or a directory; by default byte for presets, else the tokenizer of the model."
    )
    trust_remote_code: bool = argument(
        False, "Run the code in the repository of --model, needed only for user-defined classes and units."
    )


@dataclass
class PretrainDataArguments(DataArguments):
    """The training data, separate held-out data, and what is measured on it at the end."""

    validation_corpus: list[str] = argument(
        [],
        "Separate held-out documents, or a task; then all of --corpus is training data. Images with test files "
        "are validated on those by default.",
    )
    accounts: bool = argument(
        False,
        "End with a table of counts, network and both next to compressors that read the same bytes, if these are at "
        "most 32 MB of documents; it is also in _accounts.json.",
    )


@dataclass
class TeacherArguments:
    """The teacher of an RNN's memories, and the second phase (`--method smt` and `dmt`)."""

    teacher: str | None = argument(
        None,
        "A preset (smt-teacher-paper, ...), or the directory or Hub name of a teacher or of an RNN saved with "
        "one. By default a new one that matches --model; for dmt, the one saved in --model.",
    )
    teacher_overrides: list[str] = argument(
        [], "Change a new teacher. Example: --teacher_overrides num_encoder_layers=4"
    )
    dmt_steps: int = argument(0, "DMT steps after SMT (DAgger Memory Training); 0 for none.")
    dmt_learning_rate: float = argument(3e-5, "Learning rate of DMT.")
    dmt_batch_size: int | None = argument(None, "Blocks per DMT step; by default as in SMT.")
    dmt_rollout_length: int = argument(256, "Bytes that the RNN reads without its teacher in DMT.")

    def __post_init__(self):
        check_at_least(0, self, "dmt_steps", "dmt_learning_rate")
        check_at_least(1, self, "dmt_rollout_length")


class _Parser(OneSentenceErrors, HfArgumentParser):
    pass


def build_parser(method: str = DEFAULT_METHOD) -> HfArgumentParser:
    """The arguments of training by `method`; each method has its own defaults, and all but bptt more arguments."""
    own = (TeacherArguments,) if method in (SMT, DMT) else ()
    parser = _Parser(
        (ModelArguments, PretrainDataArguments, _TRAINING_ARGUMENTS[method], *own),
        prog=texts.PROG,
        usage=texts.USAGE,
        description=texts.DESCRIPTION,
        epilog=texts.EXAMPLES,
    )
    parser.add_argument(
        "--recipe",
        default=texts.DEFAULT_RECIPES.get(method, texts.DEFAULT_RECIPE),
        help=f"{recipe_help()} (default: %(default)s)",
    )
    parser.add_argument("--help_all", action="help", help="show all arguments, including TrainingArguments")
    add_threads_argument(parser)
    add_json_argument(parser)
    if method not in RULES:  # their dataclass has the argument
        parser.add_argument("--method", default=method, choices=METHODS, help=texts.METHOD_HELP)
    return parser


@dataclass
class PretrainArguments:
    """All arguments of a run; `given` are those that differ from the defaults, as a recipe, without `--import`."""

    model: ModelArguments
    data: PretrainDataArguments
    training: MultiStreamTrainingArguments
    recipe: str
    given: dict[str, Any]
    names_output_dir: bool
    user_code: list[str]
    teacher: TeacherArguments | None = None
    threads: int | None = None


# Typed argument → the argument of which the recipe's value is for the recipe's own.
_DEPENDING = {"model": "config_overrides", "per_device_train_batch_size": "gradient_accumulation_steps"}


def parse_arguments(argv: Sequence[str] | None = None) -> PretrainArguments:
    """Arguments of recipe and command line; the command line takes precedence. Files of `--import` are imported."""
    argv = list(sys.argv[1:] if argv is None else argv)
    method, name, recipe = chosen_recipe(argv)
    typed = normalize(argv, None)[1]
    for own, depending in _DEPENDING.items():
        if own in typed:
            recipe = {key: value for key, value in recipe.items() if key != depending}
    parser = build_parser(method)
    check_recognized(parser, argv)
    fields = {f.name for part in parser.dataclass_types for f in dataclasses.fields(part) if f.init} | {"method"}
    if unknown := sorted(set(recipe) - fields):
        raise ValueError(f"The recipe {name!r} has the unknown key `{unknown[0]}`{did_you_mean(unknown[0], fields)}")
    defaults = vars(parser.parse_known_args([])[0])
    types_of = {key: kind for part in parser.dataclass_types for key, kind in get_type_hints(part).items()}
    flags, own_defaults = recipe_flags(name, recipe, types_of)
    parser.set_defaults(**own_defaults)
    namespace, remaining = parser.parse_known_args([*flags, *argv])
    if remaining:
        raise unrecognized(remaining[0], parser._option_string_actions)
    user_code = namespace.user_code
    import_user_code(user_code)
    values = {key: value for key, value in vars(namespace).items() if key in fields}
    check_numbers(values | {"threads": namespace.threads}, "--")
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
    except ValueError as error:
        # `TrainingArguments` does not name the argument of a wrong choice.
        name = next((key for key, value in values.items() if str(error).startswith(f"{value} is not a valid ")), None)
        raise (error if name is None else ValueError(f"argument --{name}: {error}")) from error
    check_integrations(training.report_to)
    return PretrainArguments(
        model, data, training, name, given, names_output_dir, user_code, *teacher, threads=namespace.threads
    )


def check_integrations(names: Sequence[str]) -> None:
    """Raise a ValueError if logs cannot be reported to one of the integrations `names`."""
    from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            hint = did_you_mean(name, [*INTEGRATION_TO_CALLBACK, "all", "none"], otherwise="; use none.")
            raise ValueError(f"`--report_to` is {name!r}, not an integration of transformers{hint}")
        if name not in get_available_reporting_integrations():
            raise ValueError(f"`--report_to` is {name!r}, whose package is not installed.")


def _run_name(model: str, corpus: list[str]) -> str:
    first = Path(corpus[0].split(",")[0].rpartition(":")[2]).name.split(".")[0].strip("*") or "corpus"
    return f"{Path(model).name}-{first}"
