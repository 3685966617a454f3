"""The hyperparameters that an experiment or a recipe really trains with, read from the arguments that it builds.

`python tests/papers/effective_settings.py NAME` prints them as rows of docs/reference/paper_settings.md.
"""

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

from transformers import PreTrainedModel, TrainingArguments

from hf_recurrent import SmtRnnConfig, SmtTrainingArguments, config_from_preset
from hf_recurrent.cli.pretrain_arguments import parse_arguments
from hf_recurrent.cli.reproduce import load_papers

PAPERS = load_papers()
_IMAGES = {"mnist": 60_000, "cifar": 50_000}
_EXAMPLES = {"pixels": 50_000, "texts": 25_000, "list_ops": 96_000}
_CORPUS = SimpleNamespace(vocab_size=256, num_bytes=10**9)
_OPTIMIZERS = {"adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "rmsprop": "RMSProp"}
# Settings of a row that describe its data, without its name.
_DATA = {
    "levels": "MNIST, {:,} grey levels",
    "num_tokens": "{:,} tokens",
    "length": "T {:,}",
    "max_length": "strings of up to {:,}",
    "num_examples": "{:,} examples",
    "num_trajectories": "{:,}",
}
_SIZES = {"hidden_size": "M", "state_size": "S", "num_hidden_layers": "N", "num_memory_tokens": "Z"}

# Settings that make no other kind of training.
_UNTOLD = ("label", "rule", "dt", "x", "candidates")


class _Stop(Exception):
    """The arguments of the last phase of a row are known."""


def effective_settings(name: str, size: str) -> dict[str, str]:
    """Hyperparameter → its value in all rows of an experiment, different values joined by " / "; empty without rows
    that train."""
    experiment = PAPERS.load_experiment(name)
    values: dict[str, list[str]] = {}
    for row in distinct(experiment.rows(size)):
        phases, configs = arguments_of(experiment, {**row, "seed": 0})
        for arguments in phases:
            described = describe(arguments) | {"length of training": length_of(arguments, row)}
            described |= {"sizes": "; ".join(dict.fromkeys(map(sizes_of, configs))), "data": data_of(row)}
            for key, value in described.items():
                if value not in values.setdefault(key, []):
                    values[key].append(value)
    if not values:
        return {}
    return {key: " / ".join(value) for key, value in values.items()} | {
        "seeds": str(len(experiment.default_seeds(size)))
    }


def recipe_settings(name: str) -> dict[str, str]:
    """Hyperparameter → its value in a recipe."""
    parsed = parse_arguments(["--recipe", name, "--use_cpu"])
    arguments, epochs = parsed.training, {"epochs": parsed.training.num_train_epochs}
    row = {"bytes": arguments.train_bytes} if arguments.train_bytes else epochs
    return describe(arguments) | {
        "length of training": length_of(arguments, row),
        "sizes": sizes_of(config_from_preset(parsed.model.model)),
        "data": ", ".join(parsed.data.corpus),
        "seeds": "1",
    }


def distinct(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each kind of model, task and training."""
    kinds: dict[str, dict[str, Any]] = {}
    for chosen in (row | candidate for row in rows for candidate in row.get("candidates", [{}])):
        others = {key: value for key, value in chosen.items() if key not in _UNTOLD}
        kinds.setdefault(repr(others), chosen)
    return list(kinds.values())


# Functions of the experiments that would read data, train, or build models.
_REPLACED = {
    "split_corpus": lambda settings: (_CORPUS, _CORPUS),
    # BPTT has as many steps as the other methods have operations for: here one.
    "smt_dmt_operations": lambda *models, **options: 1,
    "step_operations": lambda *models, **options: 1,
    "load_images": lambda dataset, folder, *options: (range(_IMAGES[dataset]), None, ""),
    "average_pooled": lambda data, factor: data,
    "padded": lambda data, width: data,
    "CopiedBits": lambda *options: None,
    "load_sequences": lambda settings: (range(_EXAMPLES[settings["task"]]), None),
    "RuleClassifier": lambda model, rule: model,
    "freeze_convolutions": lambda model: None,
    "layer_cosines": lambda *options: [],
    "LorenzTrajectories": lambda count, *options, **others: range(count),
    "DigitPixels": lambda **options: SimpleNamespace(vocab_size=options["levels"] + 1, length=784),
}


def arguments_of(experiment: Any, row: dict[str, Any]) -> tuple[list[TrainingArguments], list[Any]]:
    """Arguments of the phases of training that a row would run, and the configurations of its models."""
    from papers.engine.training import training_arguments

    phases: list[TrainingArguments] = []
    configs: list[Any] = []

    def record(build, arguments_class, *, steps, measure=None, **arguments):
        phases.append(training_arguments(arguments_class, "unused", steps, arguments))
        if arguments_class is not SmtTrainingArguments or not row.get("dmt_steps", 1):
            raise _Stop
        return {"measured": {}, "seconds": 0.0}

    def note_new_model(auto_class, config, seed):
        configs.append(config)
        return SimpleNamespace(config=config)

    def note_pair(sizes, vocab_size, seed):
        configs.append(SmtRnnConfig(vocab_size=vocab_size, **sizes))
        return None, None

    initialise = PreTrainedModel.__init__

    def note_config(self, config, *args, **options):
        configs.append(config)
        initialise(self, config, *args, **options)

    noted = {"run_trainer": record, "new_model": note_new_model, "build_pair": note_pair}
    with mock.patch.object(PreTrainedModel, "__init__", note_config):
        patches = [
            mock.patch.object(module, attribute, replacement)
            for path, module in list(sys.modules.items())
            if path.startswith("papers.")
            for attribute, replacement in (noted | _REPLACED).items()
            if hasattr(module, attribute)
        ]
        for patch in patches:
            patch.start()
        try:
            experiment.run(row)
        except _Stop:
            pass
        finally:
            for patch in patches:
                patch.stop()
    return phases, configs


def describe(arguments: TrainingArguments) -> dict[str, str]:
    """Hyperparameter → value, as docs/reference/paper_settings.md writes it."""
    schedule, options = str(getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type)), ""
    if arguments.lr_scheduler_kwargs:
        options = f" to {arguments.lr_scheduler_kwargs['min_lr']:g}"
    warmup = arguments.warmup_steps
    if arguments.optim == "rmsprop":
        optimizer = f"RMSProp, {arguments.optim_args}"
    else:
        optimizer = f"{_OPTIMIZERS[arguments.optim]}, {arguments.adam_beta1:g}, {arguments.adam_beta2:g}"
    streams = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    block = getattr(arguments, "block_size", None)
    return {
        "learning rate": f"{arguments.learning_rate:g}",
        "schedule": schedule.removesuffix("_with_min_lr") + options,
        "warm-up": "none" if not warmup else f"{warmup:.0%}" if warmup < 1 else f"{warmup:,} steps",
        "optimizer": optimizer,
        "weight decay": f"{arguments.weight_decay:g}",
        "clipping": f"{arguments.max_grad_norm:g}" if arguments.max_grad_norm else "none",
        "streams or batch": f"{streams:,}",
        "block T": "whole sequences" if block is None else f"{block:,}",
    }


def length_of(arguments: TrainingArguments, row: dict[str, Any]) -> str:
    """Epochs, bytes or steps of the training."""
    if "epochs" in row:
        return f"{row['epochs']:g} epochs"
    if arguments.max_steps == 1:
        return "as many sequential operations"
    if "bytes" in row:
        millions = row["bytes"] / 1e6
        return f"{millions:,.0f} MB" if millions >= 10 else f"{millions:.2g} MB"
    return f"{arguments.max_steps:,} steps"


def sizes_of(config: Any) -> str:
    """Widths and layers of a model, by their letters."""
    sizes = {letter: getattr(config, name, None) for name, letter in _SIZES.items()}
    return ", ".join(f"{letter} {size}" for letter, size in sizes.items() if size is not None)


def data_of(row: dict[str, Any]) -> str:
    """The data of a row."""
    names = [row[key] for key in ("corpus", "task", "dataset") if key in row]
    return ", ".join(names + [text.format(row[key]) for key, text in _DATA.items() if key in row])


if __name__ == "__main__":
    for name in sys.argv[1:] or PAPERS.EXPERIMENTS:
        print(f"## {name}\n")
        if name not in PAPERS.EXPERIMENTS:
            settings = {key: [value] for key, value in recipe_settings(name).items()}
        else:
            paper, small = (effective_settings(name, size) for size in ("paper", "small"))
            settings = {key: [value, small[key]] for key, value in paper.items()}
        for key, ours in settings.items():
            print(f"| {key} | - | - | {' | '.join(ours)} | |")
        print()
