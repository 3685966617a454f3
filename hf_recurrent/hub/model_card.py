"""Model cards: model, data, training, results, hardware, and how to load it.

A card states measured numbers only. Its facts are a fixed list of fields, never a dump of the training arguments or of
the environment, so that no token, user name or local path reaches the Hub.
"""

import os
import platform
import re
from collections.abc import Mapping
from importlib.resources import files

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel, TrainingArguments

from hf_recurrent.hub.local_paths import find_local_path
from hf_recurrent.stock_models.stock_model import StockModelWithState

REDACTED = "[redacted]"

_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|API_?KEY|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 12  # a shorter value may be an ordinary word

# Attributes that a card shows, and their labels. All other training arguments stay private.
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
    """Placeholder for the name of a repository that does not exist yet."""
    return f"your-name/{type(model).__name__}"


def create_model_card(
    model: PreTrainedModel,
    training_args: TrainingArguments | None = None,
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
    """Create the card of a trained model, ready for `.save("README.md")` or `.push_to_hub(repo_id)`.

    Args:
        model: gives class, sizes, number of parameters and bytes of state per stream.
        training_args: the arguments of the run. A fixed list of fields is copied, no token, path or run name.
        corpus_name: `Corpus.name` or the source of `load_corpus`: "python", "hub:owner/name" or a path, of which
            only the last part is shown.
        metrics: results on held-out episodes, with or without the Trainer's prefix "eval_": `bits_per_byte`, and
            optionally `num_bytes`, `num_episodes`, `train_runtime` (seconds). Without `bits_per_byte` the card says
            that nothing was measured.
        repo_id: "owner/name" on the Hub, for the code example.
        model_name: title of the card; by default the name in `repo_id`, or the class of the model.
        recipe: name or file of the recipe; only the file's name is shown.
        train_steps: optimizer steps done; by default `training_args.max_steps` if that is positive.
        comparisons: bits per byte of other methods on the same bytes, such as `{"xz": 1.9}`.
        hardware: by default this machine if `training_args` is given.
        license: the Hub's identifier.
        language: ISO 639 code(s), or "code".
        tags: further tags.

    Raises:
        ValueError: `metrics["bits_per_byte"]` or a value of `comparisons` is not a finite number above 0, or another
            of the metrics is not a finite number from 0 on.
    """
    recurrent = bool(getattr(model, "supports_recurrent_state", False))
    task = "text-classification" if type(model).__name__.endswith("ForSequenceClassification") else "text-generation"
    metrics = {name.removeprefix("eval_"): value for name, value in (metrics or {}).items()}
    if (bits_per_byte := metrics.get("bits_per_byte")) is not None:
        _check_measured("metrics['bits_per_byte']", bits_per_byte)
    for name in ("num_bytes", "num_episodes", "train_runtime"):
        if (number := metrics.get(name)) is not None and not _is_finite(number):
            raise ValueError(f"`metrics[{name!r}]` is {number!r}; it must be a finite number from 0 on.")
    for name, value in (comparisons or {}).items():
        _check_measured(f"comparisons[{name!r}]", value)
    class_name = type(model).__name__
    model_name = model_name or (repo_id.rsplit("/", 1)[-1] if repo_id else class_name)
    data_name = _public_corpus_name(corpus_name)
    dataset_id = _hub_dataset(corpus_name)
    if hardware is None and training_args is not None:
        hardware = describe_hardware(training_args.world_size)

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
                metric_value=round(float(bits_per_byte), 4),
            )
        ]
    card_data = ModelCardData(
        license=license,
        language="code" if language is None and corpus_name == "python" else language,
        library_name="transformers",
        pipeline_tag=task,
        tags=list(dict.fromkeys(["hf_recurrent", "byte-level", *["recurrent"] * recurrent, *(tags or [])])),
        datasets=[dataset_id] if dataset_id else None,
        metrics=["bits_per_byte"] if task == "text-generation" else None,
        model_name=model_name,
        eval_results=eval_results,
    )
    card = ModelCard.from_template(
        card_data,
        template_str=files("hf_recurrent.hub").joinpath("model_card_template.md").read_text(encoding="utf-8"),
        name=model_name,
        class_name=class_name,
        repository=repo_id or unnamed_repository(model),
        recurrent=recurrent,
        classifies=task == "text-classification",
        stock=isinstance(model, StockModelWithState),
        model_facts=_model_facts(model, recurrent),
        recipe=_last_part(recipe) if recipe else None,
        data_name=data_name,
        training_facts=_training_facts(training_args, train_steps, metrics),
        regime=getattr(training_args, "regime", None),
        bits_per_byte=bits_per_byte,
        num_bytes=metrics.get("num_bytes"),
        num_episodes=metrics.get("num_episodes"),
        comparisons=comparisons or {},
        hardware=hardware,
    )
    return ModelCard(redact_secrets(card.content), ignore_metadata_errors=True)


def redact_secrets(text: str) -> str:
    """Replace Hub tokens, and the value of every environment variable that is named like a secret."""
    secrets = {
        value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET
    }
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return _HUB_TOKEN.sub(REDACTED, text)


def describe_hardware(num_processes: int = 1) -> str:
    """Describe this machine: "2 x NVIDIA A100", or "x86_64 processor, 1 process with 2 threads"."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        return f"{num_processes} x {name}" if num_processes > 1 else name
    processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
    threads = torch.get_num_threads()
    return f"{platform.machine()} processor, {processes} with {threads} thread{'s' if threads > 1 else ''}"


def _check_measured(argument: str, value: float) -> None:
    if not _is_finite(value) or not value:
        raise ValueError(f"`{argument}` is {value!r}; it must be a finite number above 0 (measured bits per byte).")


def _is_finite(value: object) -> bool:
    """True for a number that is not negative, NaN or infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _last_part(path: str) -> str:
    return re.split(r"[\\/]", str(path).rstrip("\\/"))[-1]


def _hub_dataset(corpus_name: str | None) -> str | None:
    name = corpus_name.removeprefix("hub:") if corpus_name and corpus_name.startswith("hub:") else None
    # "hub:" may also name a local folder.
    return None if name is None or find_local_path(name) or os.path.exists(name) else name


def _public_corpus_name(corpus_name: str | None) -> str | None:
    if corpus_name == "python":
        return f"the Python {platform.python_version()} standard library's source, one file per episode"
    if dataset_id := _hub_dataset(corpus_name):
        return f"[{dataset_id}](https://huggingface.co/datasets/{dataset_id})"
    return _last_part(corpus_name) if corpus_name else None


def _model_facts(model: PreTrainedModel, recurrent: bool) -> dict[str, str]:
    facts = {"Parameters": f"{model.num_parameters():,}"}
    for attribute, label in _MODEL_FACTS.items():
        if (value := getattr(model.config, attribute, None)) is not None:
            facts[label] = str(value)
    if recurrent:
        holder = model if hasattr(model, "init_state") else model.base_model  # a classifier has none of its own
        state = holder.init_state(1)
        facts["State per stream"] = f"{sum(part.numel() * part.element_size() for part in state.values()):,} bytes"
    return facts


def _training_facts(
    training_args: TrainingArguments | None, train_steps: int | None, metrics: Mapping[str, float]
) -> dict[str, str]:
    facts: dict[str, str] = {}
    if training_args is not None:
        streams = (
            training_args.per_device_train_batch_size
            * max(1, training_args.world_size)
            * training_args.gradient_accumulation_steps
        )
        facts["Streams (B)"] = str(streams)
        if (block_size := getattr(training_args, "block_size", None)) is not None:
            facts["Bytes per stream and update (T)"] = f"{block_size:,}"
        if train_steps is None and training_args.max_steps > 0:
            train_steps = training_args.max_steps
        if train_steps is not None:
            facts["Updates"] = f"{train_steps:,}"
            if block_size is not None:
                facts["Bytes read"] = f"{train_steps * streams * block_size:,}"
        for attribute, label in _TRAINING_FACTS.items():
            value = getattr(training_args, attribute)
            facts[label] = str(getattr(value, "value", value))  # of an enumeration, its value
        facts["Adam β₁, β₂"] = f"{training_args.adam_beta1}, {training_args.adam_beta2}"
        precision = [name for name in ("bf16", "fp16") if getattr(training_args, name)]
        facts["Precision"] = f"{precision[0]} autocast" if precision else "float32"
    if (seconds := metrics.get("train_runtime")) is not None:
        facts["Training time"] = f"{seconds:,.0f} s"
    return facts
