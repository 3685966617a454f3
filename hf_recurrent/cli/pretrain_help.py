"""`hf-recurrent pretrain --help`: our arguments in groups, read from the source of their dataclasses.

Importing the dataclasses imports torch and takes seconds; `--help-all`, which lists every argument, does.
"""

import ast
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hf_recurrent
from hf_recurrent.cli.learn import METHODS as RULES
from hf_recurrent.cli.parsing import JSON_HELP, CommandParser
from hf_recurrent.cli.recipes import load_recipe, recipe_names
from hf_recurrent.cli.threads import HELP as THREADS_HELP
from hf_recurrent.cli.user_code import IMPORT_HELP

PROG = "hf-recurrent pretrain"
USAGE = "hf-recurrent pretrain [--model MODEL] [--ARGUMENT VALUE ...]"
DESCRIPTION = (
    "Train a byte-level model on continuous streams, evaluate it on held-out documents and save it. The default "
    "recipe trains a small Memora on the Python standard library in a few minutes."
)
EXAMPLES = """Examples:
  hf-recurrent pretrain
  hf-recurrent pretrain --recipe memora-s0 --corpus my_files/ --train_bytes 50e6
  hf-recurrent pretrain --model llama-s0 --regime iid --block_size 512
  hf-recurrent pretrain --method rtrl --block_size 1 --learning_rate 1e-3
  hf-recurrent pretrain --method smt --dmt_steps 300
  hf-recurrent pretrain --output_dir runs/one --resume_from_checkpoint true
  torchrun --nproc_per_node 2 scripts/pretrain.py --use_cpu"""
DEFAULT_RECIPE = "default"
# Truncated backpropagation through each block.
DEFAULT_METHOD = "bptt"
SMT, DMT = "smt", "dmt"
# Default recipes of methods that do not train a Memora.
DEFAULT_RECIPES = {SMT: "smt", DMT: "dmt"}
METHODS = (DEFAULT_METHOD, *RULES, SMT, DMT)
METHOD_HELP = (
    "bptt: backpropagation through each block. rtrl: real-time recurrent learning, exact gradients within each "
    "recurrent layer over the whole past. snap1: approximate RTRL (SnAp-1), for units that mix channels. truncated, "
    "spatial: baselines of rtrl. smt: an RNN learns single steps between memories of a teacher, without unrolling. "
    "dmt: the same on its own memories, after smt. `--method NAME --help` lists the arguments of each. (default: bptt)"
)
_ARGUMENTS, _DATA = "cli/pretrain_arguments.py", "cli/data_arguments.py"
_STREAMS, _ONLINE, _SMT = (f"trainers/{name}_arguments.py" for name in ("multi_stream", "online", "smt"))
_WIDTH = 79
# Name, default and help of fields that only `TrainingArguments` defines.
_OTHERS = (
    ("per_device_train_batch_size", 8, "Streams per device."),
    ("max_steps", -1, "Number of steps; takes precedence over --train_bytes."),
    ("save_steps", 500, "Steps between two checkpoints."),
    ("seed", 42, "Seed of the weights and the order of documents."),
    ("bf16", False, "Train in bfloat16."),
    ("output_dir", None, "Directory of the checkpoints and the model. Default: runs/MODEL-CORPUS."),
    ("resume_from_checkpoint", None, "A checkpoint to resume, or true for the last one in --output_dir."),
)


class Argument(NamedTuple):
    name: str
    default: Any
    help: str


def recipe_help() -> str:
    return (
        f"Name ({', '.join(recipe_names())}) or YAML file of a recipe, or `none` for the defaults of the code; "
        "command-line flags take precedence."
    )


def is_help(words: Sequence[str]) -> bool:
    """True if a command line of `pretrain` asks for the short help."""
    before = words[: words.index("--")] if "--" in words else words
    return bool({"-h", "--help"}.intersection(before))


def print_help(words: Sequence[str]) -> None:
    """Print our arguments of the method and recipe of a command line of `pretrain`."""
    try:
        text = short_help(*chosen_recipe(words))
    except (OSError, ValueError) as error:
        CommandParser(prog=PROG).error(str(error))
    print(text)


def chosen_recipe(words: Sequence[str]) -> tuple[str, str, dict[str, Any]]:
    """Method, name of the recipe, and recipe of a command line of `pretrain`."""
    finder = CommandParser(prog=PROG, add_help=False, allow_abbrev=False)
    finder.add_argument("--recipe")
    finder.add_argument("--method")
    found = finder.parse_known_args(words)[0]
    name = found.recipe or DEFAULT_RECIPES.get(found.method, DEFAULT_RECIPE)
    recipe = load_recipe(name)
    method = found.method or recipe.get("method", DEFAULT_METHOD)
    if method not in METHODS:
        raise ValueError(f"`--method` is {method!r}; it must be one of {', '.join(METHODS)}.")
    return method, name, recipe


def short_help(method: str, name: str, recipe: Mapping[str, Any]) -> str:
    """Our arguments of a method of training, with their defaults or the values of the recipe `name`."""
    choices = [Argument("recipe", name, recipe_help()), Argument("method", method, METHOD_HELP)]
    choices += [Argument("threads", None, THREADS_HELP), Argument("import", None, IMPORT_HELP)]
    choices += [Argument("json", None, f"{JSON_HELP}.")]
    parts = [f"usage: {USAGE}", textwrap.fill(DESCRIPTION, _WIDTH)]
    for title, arguments in {"run": choices, **groups(method)}.items():
        parts.append(f"{title}:\n" + "\n".join(_entry(argument, recipe) for argument in arguments))
    end = "All other arguments of TrainingArguments are accepted too: --help-all lists them. Hyphens and underscores"
    parts += [textwrap.fill(f"{end} are the same in all flags.", _WIDTH), EXAMPLES]
    return "\n\n".join(parts)


def groups(method: str) -> dict[str, list[Argument]]:
    """Title of a group → its arguments."""
    found = {
        "model": own_fields(_ARGUMENTS, "ModelArguments"),
        "data": own_fields(_DATA, "DataArguments") + own_fields(_ARGUMENTS, "PretrainDataArguments"),
    }
    sources = [(_STREAMS, "MultiStreamTrainingArguments")]
    if method in (SMT, DMT):
        found["teacher"] = own_fields(_ARGUMENTS, "TeacherArguments")
        sources += [(_SMT, "MemoryTrainingArguments"), (_SMT, f"{method.capitalize()}TrainingArguments")]
    elif method != DEFAULT_METHOD:
        sources.append((_ONLINE, "OnlineTrainingArguments"))
    training: dict[str, Argument] = {}
    for file, name in sources:
        training |= {argument.name: argument for argument in own_fields(file, name)}  # a subclass changes defaults
    others = [Argument(*one) for one in _OTHERS if one[0] not in training]
    shown = [one for one in training.values() if one.name != "method" and not one.help.startswith("Keep ")]
    found["training"] = shown + others
    return found


def own_fields(file: str, class_name: str) -> list[Argument]:
    """The fields with a help text of a dataclass in a file of this package."""
    path = next(path for folder in hf_recurrent.__path__ if (path := Path(folder, file)).is_file())
    classes = (node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef))
    body = next(node for node in classes if node.name == class_name).body
    calls = (node for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call))
    return [Argument(node.target.id, *map(ast.literal_eval, node.value.args[:2])) for node in calls]


def _entry(argument: Argument, recipe: Mapping[str, Any]) -> str:
    value, shown = recipe.get(argument.name, argument.default), ""
    if argument.name in recipe:
        shown = f" (recipe: {_shown(value)})"
    elif value not in (None, []) and "efault:" not in argument.help:
        shown = f" (default: {_shown(value)})"
    words = textwrap.fill(argument.help + shown, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  --{argument.name}\n{words}"


def _shown(value: Any) -> str:
    return shlex.join(map(str, value)) if isinstance(value, list) else str(value)
