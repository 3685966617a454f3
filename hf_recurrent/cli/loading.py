"""A model and its tokenizer from a directory or the Hub, with one sentence when that fails."""

import argparse
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every command with a finished model has."""
    parser.add_argument("model", metavar="MODEL", help="directory of a checkpoint, or owner/name on the Hub")
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="run the code that comes with MODEL; Memora and Hawk do not need it",
    )
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float64"])
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ...; the first GPU by default, without one the CPU")


def load_model_and_tokenizer(arguments: argparse.Namespace) -> "tuple[PreTrainedModel, Any]":
    """The model in evaluation mode on its device, and its tokenizer.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: the checkpoint cannot be loaded, or the device does not exist.
    """
    name = arguments.model
    local = os.path.isdir(name)
    if local and not os.path.isfile(os.path.join(name, "config.json")):
        raise FileNotFoundError(f"MODEL is `{name}`, where no checkpoint is: it has no `config.json`.")
    if not local and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise FileNotFoundError(f"MODEL is `{name}`, which is no directory.")

    # Loading torch takes seconds, so it comes after what can go wrong at once.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import hf_recurrent  # noqa: F401 (registers our classes)

    logging.disable_progress_bar()  # a byte-level model loads in a blink
    options = {"trust_remote_code": arguments.trust_remote_code}
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=arguments.dtype, **options)
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # each library below raises kinds of its own for a damaged or missing file
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"MODEL `{name}` cannot be loaded: {reason[0]}") from error
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device is `{device}`, which cannot be used: {str(error).splitlines()[0]}") from error
    return model.eval(), tokenizer
