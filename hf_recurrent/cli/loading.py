"""Loading a model and its tokenizer from a directory or the Hub."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_recurrent.cli.imports import import_libraries
from hf_recurrent.cli.parsing import check_model_name, is_out_of_memory, one_line, parse_pairs
from hf_recurrent.presets import config_from_preset, preset_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_loading_arguments(
    parser: argparse.ArgumentParser,
    takes_presets: bool = False,
    device: str | None = None,
    optional: str | None = None,
) -> None:
    """Add the arguments of all commands that read a trained model, or also build a preset.

    Args:
        takes_presets: MODEL may be the name of a preset.
        device: the default; None for the first GPU, or the CPU without one.
        optional: the help says when MODEL may be left out; None if it is required.
    """
    parser.set_defaults(takes_presets=takes_presets)
    text = "directory of a checkpoint, or owner/name on the Hub"
    if optional is None:
        parser.add_argument("model", metavar="MODEL", help=text)
    else:
        parser.add_argument("model", metavar="MODEL", nargs="?", help=f"{text}; {optional}")
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="run the code in the repository of MODEL, needed only for user-defined classes and units",
    )
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float64"])
    default = device or "the first GPU, or the CPU without one"
    parser.add_argument("--device", default=device, help=f"cpu, cuda, cuda:1, ... (default: {default})")


def load_model_and_tokenizer(arguments: argparse.Namespace, argument: str = "MODEL") -> "tuple[PreTrainedModel, Any]":
    """The model in evaluation mode on its device, and its tokenizer; `argument` holds the name, for messages."""
    name = arguments.model
    check_model_name(argument, name, preset_names() if arguments.takes_presets else ())

    import_libraries()
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from hf_recurrent.hub.loading import load_model, load_tokenizer

    logging.disable_progress_bar()
    options = {"argument": argument, "trust_remote_code": arguments.trust_remote_code}
    model = load_model(AutoModelForCausalLM, name, dtype=arguments.dtype, **options)
    tokenizer = load_tokenizer(name, **options)
    move_to_device(model, arguments)
    return model.eval(), tokenizer


def load_recurrent_model(arguments: argparse.Namespace, hint: str = ".") -> "tuple[PreTrainedModel, Any]":
    """As [`load_model_and_tokenizer`]; a ValueError, which ends with a hint, without a state or a byte tokenizer."""
    model, tokenizer = load_model_and_tokenizer(arguments)

    from hf_recurrent.modeling.block.recurrent_state import supports_recurrent_state
    from hf_recurrent.stock_models.with_state import with_state

    check_byte_tokenizer("MODEL", arguments.model, tokenizer)
    if not supports_recurrent_state(with_state(model)):
        problem = f"a {type(model).__name__} without a recurrent state"
        raise ValueError(f"`MODEL` is {arguments.model!r}, {problem}{hint}")
    return model, tokenizer


def load_or_build(arguments: argparse.Namespace) -> "tuple[PreTrainedModel, Any]":
    """As [`load_model_and_tokenizer`]; for the name of a preset, its model with new weights of `--seed`."""
    if arguments.model not in preset_names():
        return load_model_and_tokenizer(arguments)
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    from hf_recurrent.modeling.tokenizer.tokenization_byte import ByteTokenizer

    set_seed(arguments.seed)
    overrides = getattr(arguments, "config_overrides", ())
    flag = "--config_overrides" if overrides else "MODEL"
    model = build_new_model(AutoModelForCausalLM, arguments.model, flag, overrides)
    model.to(torch.float32 if arguments.dtype == "auto" else getattr(torch, arguments.dtype))
    move_to_device(model, arguments)
    return model.eval(), ByteTokenizer()


def move_to_device(model: "PreTrainedModel", arguments: argparse.Namespace) -> None:
    """Move a model to `--device`, by default the first GPU, or raise a ValueError."""
    import torch

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"`--device` is {device!r}; it cannot be used: {str(error).splitlines()[0]}") from error


def check_byte_tokenizer(argument: str, name: str, tokenizer: Any, hint: str = "") -> None:
    """Raise a ValueError that names `argument`, and ends with a hint, if a tokenizer has other tokens than bytes."""
    if not hasattr(tokenizer, "encode_bytes"):
        kind = type(tokenizer).__name__
        raise ValueError(f"`{argument}` is {name!r}, which has a {kind}; it must have a byte tokenizer.{hint}")


def build_new_model(
    auto_class: Any, preset: str, flag: str, overrides: Sequence[str] = (), **fields: Any
) -> "PreTrainedModel":
    """A model of a preset with new weights; `overrides`, NAME=VALUE of `flag`, take precedence over `fields`."""
    pairs = parse_pairs(flag, overrides)
    try:
        return auto_class.from_config(config_from_preset(preset, **fields | pairs))
    except Exception as error:  # the layers of other libraries raise types of their own for wrong sizes
        reason = "there is not enough memory" if is_out_of_memory(error) else one_line(str(error))
        if isinstance(error, ValueError) or not overrides:
            raise ValueError(reason) from error
        raise ValueError(f"`{flag}` is {' '.join(overrides)}; the model cannot be built: {reason}") from error
