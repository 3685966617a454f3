"""Loading a model and its tokenizer from a directory or the Hub."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent.cli.parsing import check_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of all commands that read a trained model."""
    parser.add_argument("model", metavar="MODEL", help="directory of a checkpoint, or owner/name on the Hub")
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="run the code in the repository of MODEL; models of this package do not need it",
    )
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float64"])
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: the first GPU, or the CPU without one)")


def load_model_and_tokenizer(arguments: argparse.Namespace) -> "tuple[PreTrainedModel, Any]":
    """The model in evaluation mode on its device, and its tokenizer.

    Raises:
        FileNotFoundError: the directory does not exist or is not a checkpoint.
        ValueError: the checkpoint cannot be loaded, or the device does not exist.
    """
    name = arguments.model
    if os.path.isdir(name) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        check_checkpoint("MODEL", Path(name))

    # After the checks, because importing torch takes seconds.
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import hf_recurrent  # noqa: F401 (registers our classes)

    logging.disable_progress_bar()
    options = {"trust_remote_code": arguments.trust_remote_code}
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=arguments.dtype, **options)
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # for damaged or missing files, each library raises its own types
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"`MODEL` is {name!r}; it cannot be loaded: {reason[0]}") from error
    device = choose_device(arguments)
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"`--device` is {device!r}; it cannot be used: {str(error).splitlines()[0]}") from error
    return model.eval(), tokenizer


def choose_device(arguments: argparse.Namespace) -> str:
    """`--device`, by default the first GPU, or the CPU without one."""
    import torch

    return arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
