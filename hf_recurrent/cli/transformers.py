"""`hf-recurrent transformers ...`: the command line of transformers, such as `serve` and `chat`, with our models.

`transformers serve` looks the class of a checkpoint up by its name in `transformers`, not among the Auto classes.
"""

import importlib
import sys
from collections.abc import Sequence

import hf_recurrent
from hf_recurrent.cli.imports import without_collection
from hf_recurrent.cli.parsing import CommandParser, run_command

_HELP = """usage: hf-recurrent transformers COMMAND [--help] ...

Run a command of transformers, such as serve and chat, with our model classes.
`COMMAND --help` lists its arguments, `transformers --help` all commands."""
_MODEL_SUFFIXES = ("Model", "ForCausalLM", "ForSequenceClassification")


def add_model_classes() -> None:
    """Make every model class of ours an attribute of `transformers`."""
    classes = {name: getattr(hf_recurrent, name) for name in hf_recurrent.__all__ if name.endswith(_MODEL_SUFFIXES)}
    # Looked up last: while its model code is loaded, transformers replaces its own module by a new one.
    library = importlib.import_module("transformers")
    for name, model_class in classes.items():
        setattr(library, name, model_class)


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(prog="hf-recurrent transformers", add_help=False, allow_abbrev=False)
    words = run_command(parser, argv, lambda arguments, words: words, passes_on=True)
    if not words or words[0] in ("-h", "--help"):  # without the imports of every command
        print(_HELP)
        return
    with without_collection():
        add_model_classes()
        from transformers.cli.transformers import app  # after it, so that this has the module with the classes

    try:
        app(words, prog_name="hf-recurrent transformers")
    except ImportError as error:
        print(f"hf-recurrent transformers: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
