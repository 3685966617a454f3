"""Model cards: model, training, results, a sample, and how to load it.

A card is made from the provenance that was recorded while the weights were trained ([`find_provenance`]), and says so
where there is none. Its facts are a fixed list of fields, never a dump of the training arguments or of the
environment, so that no token, user name or local path reaches the Hub.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel, TrainingArguments

from hf_recurrent.checkpoints.environment import describe_hardware
from hf_recurrent.checkpoints.fingerprints import adapter_weights
from hf_recurrent.checkpoints.privacy import hub_name, last_part, public_data_name, redact_secrets
from hf_recurrent.checkpoints.provenance_files import find_provenance
from hf_recurrent.checkpoints.records import Data, Provenance, Result
from hf_recurrent.hub.model_card_citations import citations
from hf_recurrent.hub.model_card_phases import (
    data_label,
    describe_measured,
    describe_phase,
    hub_base,
    hub_datasets,
    metric_label,
    result_rows,
    shown_metrics,
    split_of,
)
from hf_recurrent.hub.model_card_plot import CURVE_FILE, plot_training_curve
from hf_recurrent.stock_models.stock_model import StockModelWithState

# Attributes of given training arguments that a card shows, and their labels. All others stay private.
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
_OWN_LICENSE = "apache-2.0"


def unnamed_repository(model: PreTrainedModel) -> str:
    """Placeholder for the name of a repository that does not exist yet."""
    return f"your-name/{_class_name(model)}"


def create_model_card(
    model: PreTrainedModel,
    training_args: TrainingArguments | None = None,
    corpus_name: str | None = None,
    metrics: Mapping[str, float] | None = None,
    *,
    provenance: Provenance | None = None,
    repo_id: str | None = None,
    model_name: str | None = None,
    recipe: str | None = None,
    train_steps: int | None = None,
    comparisons: Mapping[str, float] | None = None,
    hardware: str | None = None,
    license: str | None = None,
    language: str | list[str] | None = None,
    base_model: str | None = None,
    tags: list[str] | None = None,
    curve: bool = False,
) -> ModelCard:
    """Create the card of a trained model, ready for `.save("README.md")` or `.push_to_hub(repo_id)`.

    Training, data and results come from the recorded provenance. Without one, the card says that nothing was recorded,
    and lists `training_args`, `corpus_name`, `train_steps`, `recipe` and `hardware` as stated by the author.

    Args:
        model: gives class, sizes, number of parameters and bytes of state per stream.
        training_args: arguments of your own training. A fixed list of fields is copied, no token, path or run name.
        corpus_name: data of your own training: "python", "hub:owner/name" or a path, of which only the last part is
            shown.
        metrics: your own results on held-out episodes, with or without the Trainer's prefix "eval_": `bits_per_byte`,
            and `num_bytes`, `num_episodes`, `train_runtime` (seconds). They take the place of recorded ones, and the
            card says that they are yours.
        provenance: by default that of the model ([`find_provenance`]).
        repo_id: "owner/name" on the Hub, for the code example.
        model_name: title of the card; by default the name in `repo_id`, or the class of the model.
        recipe: name or file of the recipe; only the file's name is shown.
        train_steps: optimizer steps done; by default `training_args.max_steps` if that is positive.
        comparisons: bits per byte of other methods on the same bytes, such as `{"xz": 1.9}`.
        hardware: by default this machine if `training_args` is given.
        license: the Hub's identifier; by default that of the base model, and "apache-2.0" for new weights.
        language: ISO 639 code(s), or "code".
        base_model: name of the base model on the Hub, for one that was loaded from a directory.
        tags: further tags.
        curve: refer to the training curve in `training_curve.png` ([`save_model_card`] draws it).

    Raises:
        ValueError: `metrics["bits_per_byte"]` or a value of `comparisons` is not a finite number above 0, or another
            of the metrics is not a finite number from 0 on.
    """
    metrics = _checked_metrics(metrics, comparisons)
    found = find_provenance(model) if provenance is None else provenance
    is_recorded = bool(found.phases)
    corpus_name, training_args = (None, None) if is_recorded else (corpus_name, training_args)
    recurrent = bool(getattr(model, "supports_recurrent_state", False))
    classifies = type(model).__name__.endswith("ForSequenceClassification")
    unit = found.phases[-1].data[0].unit if is_recorded and found.phases[-1].data else "byte"
    adapter = adapter_weights(model) is not None
    stated_data = _stated_data(corpus_name)
    results = [_given_result(corpus_name, found, metrics)] if "bits_per_byte" in metrics else found.current_results()
    repository = hub_name(repo_id) and repo_id
    base_model = base_model or hub_base(found)
    license = license or _license_of(found, base_model)
    model_name = model_name or (repo_id.rsplit("/", 1)[-1] if repo_id else _class_name(model))
    names = [data.name for phase in found.phases for data in phase.data] or [corpus_name]
    sample = found.sample if found.sample and found.sample.weights == found.weights else None
    datasets = list(dict.fromkeys([*hub_datasets(found), *filter(None, [_hub_dataset(corpus_name)])]))
    card_data = ModelCardData(
        license=license,
        language="code" if language is None and set(names) == {"python"} else language,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-classification" if classifies else "text-generation",
        tags=list(dict.fromkeys(["hf_recurrent", f"{unit}-level", *["recurrent"] * recurrent, *(tags or [])])),
        datasets=datasets or None,
        metrics=None if classifies else list(dict.fromkeys(n for r in results for n in shown_metrics(r))) or None,
        model_name=model_name,
        base_model=base_model,
        eval_results=_eval_results(results) or None,
        **({"base_model_relation": "adapter" if adapter else "finetune"} if base_model else {}),
    )
    rows = [
        (f"{metric_label(name, result)}, {describe_measured(result)}", f"{value:.4f}")
        for result in results
        for name, value in shown_metrics(result).items()
    ]
    earlier = [result for result in found.results if result.weights != found.weights]
    if hardware is None and training_args is not None:
        hardware = describe_hardware(training_args.world_size)
    card = ModelCard.from_template(
        card_data,
        template_str=files("hf_recurrent.hub").joinpath("model_card_template.md").read_text(encoding="utf-8"),
        name=model_name,
        class_name=_class_name(model),
        repository=repository or unnamed_repository(model),
        recurrent=recurrent,
        classifies=classifies,
        adapter=adapter,
        unit=unit,
        stock=isinstance(model, StockModelWithState),
        prompt=json.dumps(sample.prompt if sample else "Your text", ensure_ascii=False),
        sample=sample,
        fence=_fence(f"{sample.prompt}{sample.text}") if sample else "",
        model_facts=describe_model(model),
        phases=[describe_phase(phase) for phase in found.phases],
        gaps=found.gaps,
        curve=CURVE_FILE if curve else None,
        stated=_training_facts(training_args, train_steps, metrics) if not is_recorded else {},
        stated_data=stated_data,
        stated_hardware=None if is_recorded else hardware,
        recipe=last_part(recipe) if recipe and not is_recorded else None,
        rows=rows,
        bits=any(name.startswith("bits_per") for result in results for name in result.metrics),
        carried=all(result.settings.get("state_carried", recurrent) for result in results),
        by_author="bits_per_byte" in metrics,
        earlier_rows=result_rows(earlier),
        comparisons=comparisons or {},
        license=license,
        has_base=base_model is not None or any(phase.base is not None for phase in found.phases),
        citations=_citations(model, found, training_args),
    )
    return ModelCard(redact_secrets(card.content), ignore_metadata_errors=True)


def save_model_card(
    model: PreTrainedModel, directory: str | os.PathLike, provenance: Provenance, **options: Any
) -> ModelCard:
    """Write README.md, and the training curve if matplotlib is installed; `options` of [`create_model_card`]."""
    has_curve = plot_training_curve(provenance, Path(directory, CURVE_FILE))
    card = create_model_card(model, provenance=provenance, curve=has_curve, **options)
    card.save(os.path.join(directory, "README.md"))
    return card


def _checked_metrics(metrics: Mapping[str, float] | None, comparisons: Mapping[str, float] | None) -> dict[str, float]:
    """The metrics without the prefix "eval_"."""
    metrics = {name.removeprefix("eval_"): value for name, value in (metrics or {}).items()}
    if (bits_per_byte := metrics.get("bits_per_byte")) is not None:
        _check_measured("metrics['bits_per_byte']", bits_per_byte)
    for name in ("num_bytes", "num_episodes", "train_runtime"):
        if (number := metrics.get(name)) is not None and not _is_finite(number):
            raise ValueError(f"`metrics[{name!r}]` is {number!r}; it must be a finite number from 0 on.")
    for name, value in (comparisons or {}).items():
        _check_measured(f"comparisons[{name!r}]", value)
    return {name: value for name, value in metrics.items() if value is not None}


def _given_result(corpus_name: str | None, provenance: Provenance, metrics: dict[str, float]) -> Result:
    """Results that the author gives, on held-out data of the corpus."""
    measured = {name: metrics[name] for name in ("bits_per_byte", "num_bytes", "num_episodes") if name in metrics}
    data = provenance.phases[-1].data[0] if provenance.phases else Data(_stated_name(corpus_name), "")
    return Result(len(provenance.phases), 0, provenance.weights or "", replace(data), measured)


def _eval_results(results: list[Result]) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=_dataset_type(result.data.name),
            dataset_name=result.data.name,
            dataset_split="train" if split_of(result) == "stream" else split_of(result),
            metric_type=name,
            metric_name=metric_label(name, result),
            metric_value=round(float(value), 4),
        )
        for result in results
        for name, value in shown_metrics(result).items()
    ]


def _dataset_type(name: str) -> str:
    """The name on the Hub, or an identifier in its alphabet."""
    return re.sub(r"[^\w./-]+", "-", name.removeprefix("hub:")).strip("-") or "unnamed"


def _license_of(provenance: Provenance, base_model: str | None) -> str | None:
    """That of the first saved model from which training went on; None if it had none on its card."""
    bases = [phase.base for phase in provenance.phases if phase.base is not None]
    if bases:
        return bases[-1].license
    return None if base_model or provenance.gaps else _OWN_LICENSE


def _citations(model: PreTrainedModel, provenance: Provenance, args: TrainingArguments | None) -> str:
    methods = []
    for phase in provenance.phases:
        regimes = [segment.settings.get("regime") for segment in phase.segments]
        methods += [*["multi_stream"] * ("multi_stream" in regimes), phase.method]
        methods += [phase.adapter["type"]] if phase.adapter else []
    if not provenance.phases:
        methods = [getattr(args, "regime", None)]
    unit = getattr(model.config, "recurrent_unit", None)
    return citations(model.config.model_type, unit, filter(None, methods))


def _fence(text: str) -> str:
    """A fence of Markdown that is longer than any in a text."""
    return "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))


def _class_name(model: PreTrainedModel) -> str:
    return type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__


def _stated_name(corpus_name: str | None) -> str:
    return public_data_name(corpus_name) if corpus_name else "unnamed"


def _stated_data(corpus_name: str | None) -> str | None:
    return data_label(_stated_name(corpus_name)) if corpus_name else None


def _hub_dataset(corpus_name: str | None) -> str | None:
    if corpus_name is None or not corpus_name.startswith("hub:"):
        return None
    return hub_name(corpus_name.removeprefix("hub:"))


def _check_measured(argument: str, value: float) -> None:
    if not _is_finite(value) or not value:
        raise ValueError(f"`{argument}` is {value!r}; it must be a finite number above 0 (measured bits per byte).")


def _is_finite(value: object) -> bool:
    """True for a number that is not negative, NaN or infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def describe_model(model: PreTrainedModel) -> dict[str, str]:
    """Sizes of a model: label → value."""
    facts = {"Parameters": f"{model.num_parameters():,}"}
    for attribute, label in _MODEL_FACTS.items():
        if (value := getattr(model.config, attribute, None)) is not None:
            facts[label] = str(value)
    if getattr(model, "supports_recurrent_state", False):
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
    elif train_steps is not None:
        facts["Updates"] = f"{train_steps:,}"
    if (seconds := metrics.get("train_runtime")) is not None:
        facts["Training time"] = f"{seconds:,.0f} s"
    return facts
