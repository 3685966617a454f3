"""Model cards: model, training, results, a sample, and how to load it.

A card is made from the provenance that was recorded while the weights were trained ([`find_provenance`]), and says so
where there is none. Its facts are a fixed list of fields, never a dump of the training arguments or of the
environment, so that no token, user name or local path reaches the Hub.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel

from hf_recurrent.checkpoints.fingerprints import adapter_weights
from hf_recurrent.checkpoints.privacy import hub_name, redact_secrets
from hf_recurrent.checkpoints.provenance_files import find_provenance
from hf_recurrent.checkpoints.records import Phase, Provenance, Result, Sample
from hf_recurrent.hub.model_card_training import (
    data_terms,
    describe_phase,
    hub_base,
    hub_datasets,
    metric_label,
    result_rows,
    shown_metrics,
    split_of,
)
from hf_recurrent.modeling.contexts.ngram_embedding import table_parameters
from hf_recurrent.plotting import require_pyplot
from hf_recurrent.stock_models.stock_model import StockModelWithState

CURVE_FILE = "training_curve.png"
_CURVES = {"smt": "teacher's prediction", "dmt": "readout", "bptt": "training"}
_MODEL_FACTS = {
    "vocab_size": "vocabulary (V)",
    "hidden_size": "width (M)",
    "state_size": "state width (S)",
    "num_hidden_layers": "layers (N)",
    "recurrent_unit": "recurrent unit",
    "backbone": "update of the memory",
    "num_memory_tokens": "memory tokens",
}
_NO_OWNER = "your-name"
_OWN_LICENSE = "apache-2.0"
_SHOWN_SAMPLE = 5  # lines


@dataclass(frozen=True)
class Statements:
    """Facts on a card that only its author knows."""

    repo_id: str | None = None  # "owner/name" on the Hub, for the code example
    model_name: str | None = None  # title of the card; by default the name in `repo_id`, or the class of the model
    license: str | None = None  # the Hub's identifier; by default the base model's, "apache-2.0" for new weights
    language: str | list[str] | None = None  # ISO 639 code(s), or "code"
    base_model: str | None = None  # its name on the Hub, for one that was loaded from a directory
    tags: list[str] = field(default_factory=list)
    comparisons: Mapping[str, float] = field(default_factory=dict)  # other methods' bits per byte: {"xz": 1.9}


def create_model_card(
    model: PreTrainedModel,
    provenance: Provenance | None = None,
    statements: Statements | None = None,
    *,
    curve: bool = False,
) -> ModelCard:
    """Create the card of a trained model, ready for `.save("README.md")` or `.push_to_hub(repo_id)`.

    Training, data and results come from the recorded provenance. Without one, the card says that nothing was recorded.

    Args:
        model: gives class, sizes, number of parameters and bytes of state per stream.
        provenance: by default the model's ([`find_provenance`]).
        statements: the author's additions.
        curve: refer to the training curve in `training_curve.png` ([`save_model_card`] draws it).
    """
    found = find_provenance(model) if provenance is None else provenance
    stated = statements or Statements()
    data = _metadata(model, found, stated)
    results = found.current_results()
    sample = found.sample if found.sample and found.sample.weights == found.weights else None
    recurrent = bool(getattr(model, "supports_recurrent_state", False))
    card = ModelCard.from_template(
        data,
        template_str=files("hf_recurrent.hub").joinpath("model_card_template.md").read_text(encoding="utf-8"),
        name=data.model_name,
        class_name=_class_name(model),
        repository=(hub_name(stated.repo_id) and stated.repo_id) or unnamed_repository(_class_name(model)),
        recurrent=recurrent,
        classifies=_classifies(model),
        adapter=adapter_weights(model) is not None,
        unit=_unit(found),
        stock=isinstance(model, StockModelWithState),
        model_facts=describe_model(model),
        curve=CURVE_FILE if curve else None,
        phases=[describe_phase(phase) for phase in found.phases],
        gaps=found.gaps,
        rows=[(label, value) for _, label, value in result_rows(results)],
        bits=any(name.startswith("bits_per") for result in results for name in result.metrics),
        carried=all(result.settings.get("state_carried", recurrent) for result in results),
        earlier_rows=result_rows(result for result in found.results if result.weights != found.weights),
        comparisons=stated.comparisons,
        license=data.license,
        data_terms=data_terms(found),
        has_base=bool(data.base_model) or any(phase.base is not None for phase in found.phases),
        papers=", ".join(papers(model, found)),
        **_sample_fields(sample),
    )
    return ModelCard(redact_secrets(card.content), ignore_metadata_errors=True)


def save_model_card(
    model: PreTrainedModel, directory: str | os.PathLike, provenance: Provenance, statements: Statements | None = None
) -> ModelCard:
    """Write README.md, and the training curve if matplotlib is installed."""
    has_curve = plot_training_curve(provenance, Path(directory, CURVE_FILE))
    card = create_model_card(model, provenance, statements, curve=has_curve)
    card.save(os.path.join(directory, "README.md"))
    return card


def plot_training_curve(provenance: Provenance, path: str | os.PathLike) -> bool:
    """Plot training and held-out bits per token of all phases over the tokens read; False if nothing was plotted."""
    if not any(len(phase.curve) > 1 for phase in provenance.phases):
        return False
    try:
        pyplot = require_pyplot()
    except ImportError:
        return False
    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    unit, before = provenance.phases[-1].data[0].unit, 0
    for number, phase in enumerate(provenance.phases, 1):
        label = f"{number}. {phase.method}: {_CURVES.get(phase.method, 'while learning')}"
        if phase.curve:
            axes.plot([before + read for read, _ in phase.curve], [bits for _, bits in phase.curve], label=label)
        points = _held_out(provenance, number, phase, before)
        if points:
            axes.plot(*zip(*points, strict=True), "o", markersize=4, label=f"{number}. held out")
        before += phase.read
    axes.set(xlabel=f"{unit}s read", ylabel=f"bits per {unit}")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _held_out(provenance: Provenance, number: int, phase: Phase, before: int) -> list[tuple[float, float]]:
    """(tokens read, bits) of the evaluations in a phase."""
    return [
        (before + phase.read * result.step / max(phase.steps, 1), result.metrics["bits_per_byte"])
        for result in provenance.results
        if result.phase == number and "bits_per_byte" in result.metrics
    ]


def unnamed_repository(name: str) -> str:
    """Placeholder for a repository that does not exist yet; [`name_repository`] replaces it."""
    return f"{_NO_OWNER}/{name}"


def name_repository(card: str, repo_id: str) -> str:
    """The text of a card with the repository's name instead of the placeholder."""
    return re.sub(rf"\b{_NO_OWNER}/[\w.-]+", lambda _: repo_id, card)


def describe_parameters(model: PreTrainedModel) -> str:
    """Number of parameters; those in tables, of which a step reads a few rows, are counted apart."""
    tables = table_parameters(model)
    text = f"{model.num_parameters() - tables:,} parameters"
    return f"{text} and {tables / 1e6:,.1f} M in tables" if tables else text


def describe_model(model: PreTrainedModel) -> str:
    """Sizes of a model."""
    tables = table_parameters(model)
    facts = [f"Parameters: {model.num_parameters() - tables:,}"]
    if tables:
        facts.append(f"parameters in tables of n-grams: {tables:,}")
    for attribute, label in _MODEL_FACTS.items():
        if (value := getattr(model.config, attribute, None)) is not None:
            facts.append(f"{label}: {value}")
    if getattr(model, "supports_recurrent_state", False):
        holder = model if hasattr(model, "init_state") else model.base_model  # a classifier has none of its own
        state = holder.init_state(1)
        size = sum(part.numel() * part.element_size() for part in state.values())
        facts.append(f"state per stream: {size:,} bytes")
    return "; ".join(facts)


def papers(model: PreTrainedModel, provenance: Provenance) -> list[str]:
    """The papers of a model's family, recurrent unit and training, as links in Markdown."""
    known = json.loads(files("hf_recurrent.hub").joinpath("papers.json").read_text(encoding="utf-8"))
    keys = [*known["families"].get(model.config.model_type, ())]
    keys += known["units"].get(getattr(model.config, "recurrent_unit", None), ())
    for phase in provenance.phases:
        on_streams = any(segment.settings.get("regime") == "multi_stream" for segment in phase.segments)
        for method in (*["multi_stream"] * on_streams, phase.method, (phase.adapter or {}).get("type")):
            keys += known["methods"].get(method, ())
    return [_paper(**known["papers"][key]) for key in dict.fromkeys(keys)]


def _paper(title: str, authors: str, year: int | None = None, url: str | None = None, venue: str | None = None) -> str:
    where = ", ".join(str(part) for part in (authors, venue, year) if part is not None)
    return f"[{title}]({url}) ({where})" if url else f"{title} ({where})"


def _metadata(model: PreTrainedModel, provenance: Provenance, stated: Statements) -> ModelCardData:
    """The front matter that the Hub reads."""
    base_model, adapter = stated.base_model or hub_base(provenance), adapter_weights(model) is not None
    names = {data.name for phase in provenance.phases for data in phase.data}
    recurrent = bool(getattr(model, "supports_recurrent_state", False))
    return ModelCardData(
        license=stated.license or _license_of(provenance, base_model),
        language="code" if stated.language is None and names == {"python"} else stated.language,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-classification" if _classifies(model) else "text-generation",
        tags=list(
            dict.fromkeys(["hf_recurrent", f"{_unit(provenance)}-level", *["recurrent"] * recurrent, *stated.tags])
        ),
        datasets=hub_datasets(provenance) or None,
        model_name=stated.model_name or (stated.repo_id or _class_name(model)).rsplit("/", 1)[-1],
        base_model=base_model,
        eval_results=_eval_results(provenance.current_results()) or None,
        **({"base_model_relation": "adapter" if adapter else "finetune"} if base_model else {}),
    )


def _eval_results(results: list[Result]) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="text-generation",
            # The name on the Hub, or an identifier in its alphabet.
            dataset_type=re.sub(r"[^\w./-]+", "-", result.data.name.removeprefix("hub:")).strip("-") or "unnamed",
            dataset_name=result.data.name,
            dataset_split="train" if split_of(result) == "stream" else split_of(result),
            metric_type=name,
            metric_name=metric_label(name, result),
            metric_value=round(float(value), 4),
        )
        for result in results
        for name, value in shown_metrics(result).items()
    ]


def _license_of(provenance: Provenance, base_model: str | None) -> str | None:
    """The licence of the saved model from which training last went on; None if its card names none."""
    bases = [phase.base for phase in provenance.phases if phase.base is not None]
    if bases:
        return bases[-1].license
    return None if base_model or provenance.gaps else _OWN_LICENSE


def _sample_fields(sample: Sample | None) -> dict[str, object]:
    """The prompt, and the first lines of the sample in a fence that is longer than any of its own."""
    prompt = json.dumps(sample.prompt if sample else "Your text", ensure_ascii=False)
    text = "\n".join(f"{sample.prompt}{sample.text}".splitlines()[:_SHOWN_SAMPLE]) if sample else ""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return {"sample": sample, "prompt": prompt, "shown_sample": text, "fence": fence}


def _unit(provenance: Provenance) -> str:
    """The unit of the data of the last phase."""
    return provenance.phases[-1].data[0].unit if provenance.phases and provenance.phases[-1].data else "byte"


def _class_name(model: PreTrainedModel) -> str:
    return type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__


def _classifies(model: PreTrainedModel) -> bool:
    return type(model).__name__.endswith("ForSequenceClassification")
