"""Model cards: what was trained, on what, how well, on which machine, and how to load it.

A card states measured numbers only. Facts come from an explicit list of fields, never from a dump of the training
arguments or of the environment, so that no token, user name or local path reaches the Hub.
"""

import os
import platform
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel

TEMPLATE = "model_card_template.md"
REDACTED = "[redacted]"

_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|API_?KEY|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 12  # shorter values may be ordinary words of the text

# What a card says of the training arguments: attribute, the words for it. Everything else stays private.
_TRAINING_FACTS = {
    "learning_rate": "Learning rate",
    "lr_scheduler_type": "Schedule",
    "warmup_steps": "Warm-up steps",
    "optim": "Optimizer",
    "weight_decay": "Weight decay",
    "max_grad_norm": "Gradient clipping",
    "seed": "Seed",
}
_MODEL_FACTS = {
    "vocab_size": "Vocabulary (V)",
    "hidden_size": "Width (M)",
    "state_size": "State width (S)",
    "num_hidden_layers": "Layers (N)",
    "recurrent_unit": "Recurrent unit",
    "backbone": "Update of the memory",
    "num_memory_tokens": "Memory tokens",
}


def unnamed_repository(model: PreTrainedModel) -> str:
    """What a card calls its repository as long as there is none."""
    return f"your-name/{type(model).__name__}"


def create_model_card(
    model: PreTrainedModel,
    training_args: Any = None,
    corpus_name: str | None = None,
    metrics: Mapping[str, float] | None = None,
    *,
    repo_id: str | None = None,
    model_name: str | None = None,
    recipe: str | None = None,
    train_steps: int | None = None,
    comparisons: Mapping[str, float] | None = None,
    hardware: str | None = None,
    license: str = "apache-2.0",
    language: str | list[str] | None = None,
    tags: list[str] | None = None,
) -> ModelCard:
    """The card of a trained model, ready for `.save("README.md")` or `.push_to_hub(repo_id)`.

    Args:
        model: The model; its class, sizes, parameter count and bytes of state per stream are read from it.
        training_args: The `MultiStreamTrainingArguments` (or any `TrainingArguments`) of the run. A fixed list of
            fields is copied; the token, the paths and the names of runs in it are not.
        corpus_name: `Corpus.name` or the source of `load_corpus`: "python", "hub:owner/name" or a path, of which
            only the last part is shown.
        metrics: Measured on held-out episodes, with or without the Trainer's prefix "eval_": `bits_per_byte`, and
            where known `num_bytes`, `num_episodes`, `train_runtime` (seconds). Without `bits_per_byte` the card says
            that nothing was measured.
        repo_id: "owner/name" on the Hub, for the snippets.
        model_name: Title of the card; by default the name in `repo_id`, or the class of the model.
        recipe: Name or file of the recipe; only the file's name is shown.
        train_steps: Optimizer steps done, by default `training_args.max_steps` when that is positive.
        comparisons: Bits per byte of something else on the same bytes, as `{"xz": 1.9}`.
        hardware: By default this machine, when `training_args` are given.
        license: Identifier as the Hub writes it.
        language: ISO 639 code(s), or "code".
        tags: Added to the card's own.

    Raises:
        ValueError: `metrics["bits_per_byte"]` or a value of `comparisons` is not a finite number above 0.
    """
    recurrent = bool(getattr(model, "supports_recurrent_state", False))
    metrics = _without_prefix(metrics or {})
    bits_per_byte = _measured("metrics['bits_per_byte']", metrics.get("bits_per_byte"))
    comparisons = {name: _measured(f"comparisons[{name!r}]", value) for name, value in (comparisons or {}).items()}
    class_name = type(model).__name__
    model_name = model_name or (repo_id.rsplit("/", 1)[-1] if repo_id else class_name)
    data_name = _public_corpus_name(corpus_name)
    dataset_id = corpus_name.removeprefix("hub:") if corpus_name and corpus_name.startswith("hub:") else None
    if hardware is None and training_args is not None:
        hardware = describe_hardware(getattr(training_args, "world_size", 1))

    eval_results = None
    if bits_per_byte is not None:
        eval_results = [
            EvalResult(
                task_type="text-generation",
                dataset_type=dataset_id or (corpus_name and _last_part(corpus_name)) or "unnamed",
                dataset_name=data_name or "unnamed",
                dataset_split="validation",
                metric_type="bits_per_byte",
                metric_name="Bits per byte, whole held-out episodes" + (", state carried" if recurrent else ""),
                metric_value=round(bits_per_byte, 4),
            )
        ]
    if language is None and corpus_name == "python":
        language = "code"
    card_data = ModelCardData(
        license=license,
        language=language,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys(["hf_recurrent", "byte-level", *(["recurrent"] if recurrent else []), *(tags or [])])),
        datasets=[dataset_id] if dataset_id else None,
        metrics=["bits_per_byte"],
        model_name=model_name,
        eval_results=eval_results,
    )
    card = ModelCard.from_template(
        card_data,
        template_str=files("hf_recurrent.hub").joinpath(TEMPLATE).read_text(encoding="utf-8"),
        name=model_name,
        class_name=class_name,
        repository=repo_id or unnamed_repository(model),
        recurrent=recurrent,
        model_facts=_model_facts(model, recurrent),
        recipe=_last_part(recipe) if recipe else None,
        data_name=data_name,
        training_facts=_training_facts(training_args, train_steps, metrics),
        regime=getattr(training_args, "regime", None),
        block_size=getattr(training_args, "block_size", None),
        bits_per_byte=bits_per_byte,
        num_bytes=metrics.get("num_bytes"),
        num_episodes=metrics.get("num_episodes"),
        comparisons=comparisons,
        hardware=hardware,
        license_name=license,
    )
    return ModelCard(redact_secrets(card.content), ignore_metadata_errors=True)


def redact_secrets(text: str) -> str:
    """`text` without Hub tokens and without the value of any environment variable that is named like a secret."""
    secrets = {
        value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET
    }
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return _HUB_TOKEN.sub(REDACTED, text)


def describe_hardware(num_processes: int = 1) -> str:
    """The machine in a few words, as "2 x NVIDIA A100" or "x86_64 processor, 1 process with 2 threads"."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        return f"{num_processes} x {name}" if num_processes > 1 else name
    processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
    threads = torch.get_num_threads()
    return f"{platform.machine()} processor, {processes} with {threads} thread{'s' if threads > 1 else ''}"


def _without_prefix(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix("eval_"): value for name, value in metrics.items()}


def _measured(argument: str, value: float | None) -> float | None:
    if value is None:
        return None
    if not 0 < value < float("inf"):  # false for NaN too
        raise ValueError(f"`{argument}` is {value}; a card states measured bits per byte, a finite number above 0.")
    return float(value)


def _last_part(path: str) -> str:
    return re.split(r"[\\/]", str(path).rstrip("\\/"))[-1]


def _public_corpus_name(corpus_name: str | None) -> str | None:
    if corpus_name == "python":
        return f"the Python {platform.python_version()} standard library's source, one file an episode"
    if corpus_name and corpus_name.startswith("hub:"):
        dataset_id = corpus_name.removeprefix("hub:")
        return f"[{dataset_id}](https://huggingface.co/datasets/{dataset_id})"
    return _last_part(corpus_name) if corpus_name else None


def _model_facts(model: PreTrainedModel, recurrent: bool) -> dict[str, str]:
    facts = {"Parameters": f"{model.num_parameters():,}"}
    for attribute, words in _MODEL_FACTS.items():
        if (value := getattr(model.config, attribute, None)) is not None:
            facts[words] = str(value)
    if recurrent:
        state = model.init_state(1)
        facts["State per stream"] = f"{sum(part.numel() * part.element_size() for part in state.values()):,} bytes"
    return facts


def _training_facts(training_args: Any, train_steps: int | None, metrics: Mapping[str, float]) -> dict[str, str]:
    facts: dict[str, str] = {}
    if training_args is not None:
        streams = (
            training_args.per_device_train_batch_size
            * max(1, getattr(training_args, "world_size", 1))
            * training_args.gradient_accumulation_steps
        )
        block_size = getattr(training_args, "block_size", None)
        facts["Streams (B)"] = str(streams)
        if block_size is not None:
            facts["Bytes per stream and update (T)"] = f"{block_size:,}"
        if train_steps is None and training_args.max_steps > 0:
            train_steps = training_args.max_steps
        if train_steps is not None:
            facts["Updates"] = f"{train_steps:,}"
            if block_size is not None:
                facts["Bytes read"] = f"{train_steps * streams * block_size:,}"
        for attribute, words in _TRAINING_FACTS.items():
            if (value := getattr(training_args, attribute, None)) is not None:
                facts[words] = str(getattr(value, "value", value))
        betas = (getattr(training_args, "adam_beta1", None), getattr(training_args, "adam_beta2", None))
        if None not in betas:
            facts["Adam β₁, β₂"] = f"{betas[0]}, {betas[1]}"
        precision = [name for name in ("bf16", "fp16") if getattr(training_args, name, False)]
        facts["Precision"] = f"{precision[0]} autocast" if precision else "float32"
    if (seconds := metrics.get("train_runtime")) is not None:
        facts["Training time"] = f"{seconds:,.0f} s"
    return facts
