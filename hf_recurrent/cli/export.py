"""`hf-recurrent export CHECKPOINT`: one step of a model as a program for another runtime."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hf_recurrent.cli.imports import import_libraries
from hf_recurrent.cli.learn import OPTIMIZERS
from hf_recurrent.cli.loading import add_loading_arguments, move_to_device
from hf_recurrent.cli.parsing import CommandParser, add_json_argument, check_model_name, check_parent, command
from hf_recurrent.export.formats import FORMATS


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = CommandParser(
        prog="hf-recurrent export",
        description="Write one step of a model as a program: token ids and state in, logits and\n"
        "state out. The folder has the program, the tokenizer, a specification of the\n"
        "state, a card and checksums.",
        epilog="examples:\n"
        "  hf-recurrent export runs/hawk --format onnx --quantize int8\n"
        "  hf-recurrent export runs/mgrade --format c --output_dir firmware/step\n"
        "  hf-recurrent export runs/hawk --format c --learn --output_dir learner\n"
        "  hf upload you/hawk-step hawk-onnx\n\n"
        'In Python, hf_recurrent.ExportedStep("hawk-onnx") runs the folder, and\n'
        'ExportedStep("you/hawk-step") a repository on the Hub.\n',
    )
    add_loading_arguments(parser, device="cpu")
    parser.add_argument(
        "--format",
        default="torch",
        choices=FORMATS,
        help="torch.export (default), aoti (AOTInductor, for this machine), onnx, executorch, or c (one file)",
    )
    parser.add_argument(
        "--quantize",
        choices=["bfloat16", "int8"],
        help="type that large weights are stored in (default: as in the model; in C always int8)",
    )
    parser.add_argument(
        "--weights_file",
        action="store_true",
        help="with --format c, write the weights to a binary file, model.weights",
    )
    learning = parser.add_argument_group("a learner")
    learning.add_argument(
        "--learn",
        action="store_true",
        help="with --format c, write a program that predicts and learns from every byte of a stream, as `learn` does",
    )
    learning.add_argument("--optim", choices=OPTIMIZERS, help="optimizer (default: adamw)")
    learning.add_argument("--learning_rate", type=float, help="may be changed in C (default: 3e-5)")
    learning.add_argument(
        "--binary", action="store_true", default=None, help="byte 0 is data and does not end an episode"
    )
    parser.add_argument("--output_dir", type=Path, help="new folder (default: MODEL-FORMAT in the current folder)")
    add_json_argument(parser)
    return parser


def _export(arguments: argparse.Namespace) -> None:
    name = arguments.model
    check_model_name("MODEL", name)
    folder = arguments.output_dir or Path(f"{Path(name).name}-{arguments.format}")
    check_parent("--output_dir", folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"`--output_dir` is {str(folder)!r}, which exists; it must be a new or empty folder.")
    if arguments.weights_file and arguments.format != "c":
        raise ValueError(f"`--weights_file` needs --format c; --format is {arguments.format}.")
    _check_learning(arguments)

    import_libraries()
    from transformers.utils import logging

    from hf_recurrent.export.exported_learner import save_c_learner
    from hf_recurrent.export.exported_step import save_exported_step
    from hf_recurrent.hub.loading import auto_class_of, load_model, load_tokenizer

    logging.disable_progress_bar()
    options = {"argument": "MODEL", "trust_remote_code": arguments.trust_remote_code}
    model = load_model(auto_class_of(name), name, dtype=arguments.dtype, **options)
    tokenizer = None
    if getattr(model.config, "input_size", None) is None:
        tokenizer = load_tokenizer(name, **options)
    move_to_device(model, arguments)
    if arguments.learn:
        model = model.float().eval()
        save_c_learner(model, folder, _learner_setting(model, tokenizer, arguments), tokenizer=tokenizer)
        _report(folder, "model.c", arguments)
        return
    specification = save_exported_step(
        model.eval(),
        folder,
        runtime=arguments.format,
        tokenizer=tokenizer,
        weights=arguments.quantize,
        weights_file=arguments.weights_file,
    )
    _report(folder, specification.program, arguments)


def _report(folder: Path, program: str, arguments: argparse.Namespace) -> None:
    """Print what was written."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    if arguments.json:
        print(json.dumps({"output_dir": str(folder), "program": program, "bytes": dict(sorted(files.items()))}))
    else:
        print(f"{folder}: {program}, {sum(files.values()):,} bytes in all", file=sys.stderr)


def _check_learning(arguments: argparse.Namespace) -> None:
    """Raise a ValueError for flags that have no effect."""
    if not arguments.learn:
        for name in ("optim", "learning_rate", "binary"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"`--{name}` needs --learn.")
        return
    if arguments.format != "c":
        raise ValueError(f"`--learn` needs --format c; --format is {arguments.format}.")
    if arguments.quantize or arguments.weights_file:
        raise ValueError("`--learn` writes float32 weights to model.weights; leave out --quantize and --weights_file.")


def _learner_setting(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> Any:
    from hf_recurrent.export.c_learner import LearnerSetting
    from hf_recurrent.learning_rules.optimizers import apply_learning_rate_factors
    from hf_recurrent.online.settings import LearnerSettings

    given = {"optimizer": arguments.optim, "learning_rate": arguments.learning_rate}
    settings = LearnerSettings(**{name: value for name, value in given.items() if value is not None})
    parameters = dict(model.named_parameters())
    optimizer = settings.build_optimizer(parameters.values())
    apply_learning_rate_factors(optimizer, model, parameters)
    end = None if arguments.binary or tokenizer is None else tokenizer.eos_token_id
    return LearnerSetting(optimizer, settings.max_grad_norm, end)


main = command(build_parser, _export)
