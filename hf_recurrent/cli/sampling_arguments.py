"""`--temperature`, `--top_k`, `--top_p` and `--seed`, with the defaults that a checkpoint gives."""

import argparse
from typing import Any

from hf_recurrent.argument_checks import check_sampling, is_number

# Where neither the command line nor `generation_config.json` has a value; the temperature of training's samples.
DEFAULTS = {"temperature": 0.8, "top_k": 0, "top_p": 1.0}


def add_sampling_arguments(parser: Any) -> None:
    """Add the arguments; those that are not given are None."""
    default = f"as in generation_config.json, else {DEFAULTS['temperature']}"
    parser.add_argument("--temperature", type=float, help=f"divides the logits (default: {default})")
    parser.add_argument("--top_k", type=int, help="sample only from the k most likely tokens; 0 for all")
    parser.add_argument("--top_p", type=float, help="sample only from the most likely tokens of this probability")
    parser.add_argument("--seed", type=int, help="make sampling reproducible")


def given_sampling(arguments: argparse.Namespace) -> dict[str, float]:
    return {name: value for name in DEFAULTS if (value := getattr(arguments, name)) is not None}


def sampling_of(model: Any) -> dict[str, float]:
    """The settings of a model's `generation_config`, and [`DEFAULTS`]."""
    config = model.generation_config
    own = {name: value for name in DEFAULTS if (value := getattr(config, name, None)) is not None}
    for name, value in own.items():
        if not is_number(value):
            raise ValueError(f"`{name}` in generation_config.json is {value!r}; it must be a number.")
    check_sampling(**own, prefix="generation_config.")
    return DEFAULTS | own
