"""`hf-recurrent export CHECKPOINT`: one step of a model as a program for another runtime."""

import argparse
import json
import sys
from pathlib import Path

from hf_recurrent.cli.imports import import_libraries
from hf_recurrent.cli.learn import OPTIMIZERS
from hf_recurrent.cli.loading import add_loading_arguments, check_byte_tokenizer, load_or_build, move_to_device
from hf_recurrent.cli.parsing import (
    CommandParser,
    add_json_argument,
    check_model_name,
    check_parent,
    command,
    parse_pairs,
)
from hf_recurrent.export.formats import FORMATS, NUMBERS
from hf_recurrent.presets import preset_names

_NEW_RATE = 1e-3  # learning rate of new weights


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-recurrent export",
        description="Write one step of a model as a program: token ids and state in, logits and\n"
        "state out. The folder has the program, the tokenizer, a specification of the\n"
        "state, a card and checksums.",
        epilog="examples:\n"
        "  hf-recurrent export runs/hawk --format onnx --quantize int8\n"
        "  hf-recurrent export runs/mgrade --format c --output_dir firmware/step\n"
        "  hf-recurrent export runs/hawk --format c --learn --output_dir learner\n"
        "  hf-recurrent export --format c --learn --inputs 3 --output_dir sensor\n"
        "  hf upload you/hawk-step hawk-onnx\n\n"
        'In Python, hf_recurrent.ExportedStep("hawk-onnx") runs the folder, and\n'
        'ExportedStep("you/hawk-step") a repository on the Hub.\n',
    )
    optional = "with --learn, also a preset with new weights, or nothing with --inputs"
    add_loading_arguments(parser, takes_presets=True, device="cpu", optional=optional)
    formats = "torch.export (default), aoti (AOTInductor, for this machine), onnx, executorch, or c (one file)"
    parser.add_argument("--format", default="torch", choices=FORMATS, help=formats)
    types = "type that large weights are stored in (default: as in the model; in C always int8)"
    parser.add_argument("--quantize", choices=["bfloat16", "int8"], help=types)
    binary = "with --format c, write the weights to a binary file, model.weights"
    parser.add_argument("--weights_file", action="store_true", help=binary)
    _add_learning_arguments(parser)
    parser.add_argument("--output_dir", type=Path, help="new folder (default: MODEL-FORMAT in the current folder)")
    add_json_argument(parser)
    return parser


def _add_learning_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("a learner").add_argument
    add(
        "--learn",
        action="store_true",
        help="with --format c, write a program that predicts and learns from every byte of a stream, as `learn` does, "
        "or from every vector",
    )
    add("--inputs", type=int, metavar="N", help="learn vectors of N measurements; MODEL is new and left out")
    targets = "learn N values that are given with every vector, a regression, instead of the next vector"
    add("--targets", type=int, metavar="N", help=targets)
    add("--optim", choices=OPTIMIZERS, help="optimizer (default: adamw)")
    add("--learning_rate", type=float, help="may be changed in C (default: 3e-5; with new weights 1e-3)")
    add(
        "--numbers",
        choices=NUMBERS,
        help="type of moments and sensitivities: float32 (default), or bfloat16 with stochastic rounding, which takes "
        "less memory; int16: matrices in fixed point too",
    )
    add("--binary", action="store_true", default=None, help="byte 0 is data and does not end an episode")
    add("--config_overrides", nargs="+", metavar="NAME=VALUE", help="fields of the configuration of a new model")
    add("--seed", type=int, help="seed of new weights (default: 0)")


def _export(arguments: argparse.Namespace) -> None:
    name = arguments.model
    _check_learning(arguments)
    if not arguments.learn:
        check_model_name("MODEL", name)
    folder = arguments.output_dir or Path(f"{Path(name or 'sensor').name}-{arguments.format}")
    check_parent("--output_dir", folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"`--output_dir` is {str(folder)!r}, which exists; it must be a new or empty folder.")
    if arguments.weights_file and arguments.format != "c":
        raise ValueError(f"`--weights_file` needs --format c; --format is {arguments.format}.")
    if arguments.learn:
        _export_learner(arguments, folder)
        return

    import_libraries()
    from transformers.utils import logging

    from hf_recurrent.export.exported_step import save_exported_step
    from hf_recurrent.hub.loading import auto_class_of, load_model, load_tokenizer

    logging.disable_progress_bar()
    options = {"argument": "MODEL", "trust_remote_code": arguments.trust_remote_code}
    model = load_model(auto_class_of(name), name, dtype=arguments.dtype, **options)
    reads_tokens = getattr(model.config, "input_size", None) is None
    settings = {"runtime": arguments.format, "weights": arguments.quantize, "weights_file": arguments.weights_file}
    settings["tokenizer"] = load_tokenizer(name, **options) if reads_tokens else None
    move_to_device(model, arguments)
    _report(folder, save_exported_step(model.eval(), folder, **settings).program, arguments)


def _report(folder: Path, program: str, arguments: argparse.Namespace) -> None:
    files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    if arguments.json:
        print(json.dumps({"output_dir": str(folder), "program": program, "bytes": dict(sorted(files.items()))}))
    else:
        print(f"{folder}: {program}, {sum(files.values()):,} bytes in all", file=sys.stderr)


def _check_learning(arguments: argparse.Namespace) -> None:
    """Raise a ValueError for flags that have no effect, and for a missing MODEL."""
    name = arguments.model
    if not arguments.learn:
        for flag in ("inputs", "targets", "optim", "learning_rate", "numbers", "binary", "config_overrides", "seed"):
            if getattr(arguments, flag) is not None:
                raise ValueError(f"`--{flag}` needs --learn.")
    elif arguments.format != "c":
        raise ValueError(f"`--learn` needs --format c; --format is {arguments.format}.")
    elif arguments.quantize or arguments.weights_file:
        raise ValueError("`--learn` writes float32 weights to model.weights; leave out --quantize and --weights_file.")
    if arguments.inputs is None and name is None:
        needed = "a checkpoint, a preset, or --inputs for measurements" if arguments.learn else "a checkpoint"
        raise ValueError(f"`MODEL` is missing; give {needed}.")
    if arguments.inputs is not None and (name is not None or arguments.binary):
        other = "--binary" if name is None else f"MODEL {name!r}"
        raise ValueError(f"`--inputs` makes a new model of measurements; leave out {other}.")
    is_new = arguments.inputs is not None or name in preset_names()
    for flag in ("config_overrides", "seed"):
        if getattr(arguments, flag) is not None and not is_new:
            raise ValueError(f"`--{flag}` needs a new model: --inputs, or a preset as MODEL.")


def _export_learner(arguments: argparse.Namespace, folder: Path) -> None:
    import_libraries()
    from transformers import AutoModelForSequenceClassification

    from hf_recurrent.export.exported_learner import save_c_learner
    from hf_recurrent.hub.loading import auto_class_of, load_model
    from hf_recurrent.online.learner import OnlineLearner
    from hf_recurrent.online.vector_learner import VectorLearner

    names = {"optimizer": arguments.optim, "learning_rate": arguments.learning_rate, "binary": arguments.binary}
    given = {name: value for name, value in names.items() if value is not None}
    overrides, seed = arguments.config_overrides or (), arguments.seed or 0
    if arguments.inputs is not None:
        config = parse_pairs("--config_overrides", overrides)
        learner = VectorLearner.new(arguments.inputs, num_targets=arguments.targets, seed=seed, config=config, **given)
    elif (name := arguments.model) not in preset_names() and auto_class_of(name) is AutoModelForSequenceClassification:
        options = {"argument": "MODEL", "trust_remote_code": arguments.trust_remote_code}
        model = load_model(AutoModelForSequenceClassification, name, **options).float()
        if arguments.targets not in (None, model.config.num_labels):
            raise ValueError(f"`--targets` is {arguments.targets}; {name} gives {model.config.num_labels} values.")
        learner = VectorLearner(model, targets=arguments.targets is not None, **given)
    else:
        if arguments.targets is not None:
            raise ValueError(f"`--targets` needs --inputs or a model of vectors; {name} reads bytes.")
        if name in preset_names():
            given = {"learning_rate": _NEW_RATE} | given
        arguments.config_overrides, arguments.seed = overrides, seed
        model, tokenizer = load_or_build(arguments)
        check_byte_tokenizer("MODEL", name, tokenizer)
        learner = OnlineLearner(model.float(), tokenizer, **given)
    found = save_c_learner(learner, folder, numbers=arguments.numbers or NUMBERS[0])
    _report(folder, "model.c", arguments)
    stack = f" and {found.stack:,} on the stack" * bool(found.stack)
    flash = f"flash {found.constants:,} bytes and the code, about {found.code:,}"
    print(f"RAM {found.ram:,} bytes{stack}; {flash}", file=sys.stderr)


main = command(build_parser, _export)
