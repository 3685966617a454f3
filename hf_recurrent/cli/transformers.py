"""`hf-recurrent transformers ...`: the command line of transformers, such as `serve` and `chat`, with our models.

`transformers serve` looks the class of a checkpoint up by its name in `transformers`, not among the Auto classes.
"""

import sys
from collections.abc import Sequence

import transformers

import hf_recurrent

_MODEL_SUFFIXES = ("Model", "ForCausalLM", "ForSequenceClassification")


def add_model_classes() -> None:
    """Make every model class of ours an attribute of `transformers`."""
    for name in hf_recurrent.__all__:
        if name.endswith(_MODEL_SUFFIXES):
            setattr(transformers, name, getattr(hf_recurrent, name))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command of transformers at the beginning of `argv`, by default the arguments of the process."""
    from transformers.cli.transformers import app

    add_model_classes()
    try:
        app(list(sys.argv[1:] if argv is None else argv), prog_name="hf-recurrent transformers")
    except ImportError as error:
        print(f"hf-recurrent transformers: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
