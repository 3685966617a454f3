"""Training and results on a model card, from the recorded provenance alone."""

from collections.abc import Iterable
from typing import Any

from hf_recurrent.checkpoints.privacy import hub_name
from hf_recurrent.checkpoints.records import Data, Phase, Provenance, Rate, Result, Segment

METHODS = {
    "bptt": "backpropagation through each block",
    "rtrl": "real-time recurrent learning (RTRL)",
    "snap1": "approximate real-time recurrent learning (SnAp-1)",
    "truncated": "backpropagation inside each stride only",
    "spatial": "backpropagation without gradients through time",
    "smt": "Supervised Memory Training (SMT)",
    "dmt": "DAgger Memory Training (DMT)",
}
# Further settings, in the order of the card.
_SETTINGS = (
    "stride", "update_every", "context_length", "future_length", "rollout_length", "gradient_steps", "timesteps",
    "start_share", "decoder_weight", "dynamics_weight", "uniformity_weight", "uniformity_over", "detached",
    "precision", "seed", "data_seed",
)  # fmt: skip
_REGIMES = {"multi_stream": "continuous streams", "iid": "blocks at random starts (IID)"}
_METRICS = {
    "bits_per_byte": "Bits per byte",
    "network_bits_per_byte": "Bits per byte of the network alone, without its count memory",
    "bits_per_symbol": "Bits per symbol",
    "accuracy": "Accuracy",
    "exact_match": "Exact match",
    "drift": "Drift (1 - R² of the RNN's memories)",
    "prequential_bits_per_byte": "Bits per byte while learning",
}
# Part of the data that a result was measured on.
_SPLITS = {
    "validation": "held-out data of",
    "train": "training data of",
    "stream": "each byte predicted before it was learned from, up to",
}


def describe_phase(phase: Phase) -> dict[str, Any]:
    """Values of a phase for the template: `title`, and `columns` and `rows` of a table of its segments.

    Rows about the whole phase have one cell.
    """
    first, last = phase.segments[0], phase.segments[-1]
    unit = phase.data[0].unit if phase.data else "byte"
    size = phase.data[0].size if len(phase.data) == 1 else None
    times = f" ({phase.read / size:.3g} times the data)" if size else ""
    rows = {
        "Data": ["; ".join(_describe_data(data, last.versions) for data in phase.data)],
        "Updates": [f"{phase.steps - first.first_step:,}"],
        f"{unit.capitalize()}s read": [f"{phase.read:,}{times}"],
    }
    if phase.trained_parameters is not None:
        teacher = " (the teacher's included)" if phase.method == "smt" else ""
        rows["Trained parameters"] = [f"{phase.trained_parameters:,}{teacher}"]
    if phase.adapter:
        values = ", ".join(f"{name} {_shown(value)}" for name, value in phase.adapter.items() if name != "type")
        rows["Adapter"] = [f"{phase.adapter['type']}: {values}"]
    described = [_describe_segment(segment, unit) for segment in phase.segments]
    for label in dict.fromkeys(label for facts in described for label in facts):
        rows[label] = [facts.get(label, "-") for facts in described]
    title = f"{METHODS.get(phase.method, phase.method)}, {', '.join(data.name for data in phase.data)}"
    return {
        "title": f"{title} (recipe `{phase.recipe}`)" if phase.recipe else title,
        "columns": [f"updates {segment.first_step + 1:,} to {segment.last_step:,}" for segment in phase.segments],
        "rows": rows,
        "base": _describe_base(phase),
        "teacher": [describe_phase(earlier) for earlier in phase.teacher.phases] if phase.teacher else [],
    }


def result_rows(results: Iterable[Result]) -> list[tuple[str, str, str]]:
    """(when, what, value) of the metrics that a card shows."""
    rows = []
    for result in results:
        when = f"phase {result.phase}, update {result.step:,}" if result.phase else "before training"
        for name, value in shown_metrics(result).items():
            data = f"{_SPLITS[split_of(result)]} {data_label(result.data.name)}{measured_size(result)}"
            rows.append((when, f"{metric_label(name, result)}, {data}", f"{value:.4f}"))
    return rows


def metric_label(name: str, result: Result) -> str:
    """A metric in words; bits are per token of the unit of the data."""
    label = _METRICS[name]
    return label if result.data.unit == "byte" else label.replace("byte", result.data.unit)


def shown_metrics(result: Result) -> dict[str, float]:
    """The metrics of a result that a card shows, in a fixed order."""
    return {name: result.metrics[name] for name in _METRICS if name in result.metrics}


def split_of(result: Result) -> str:
    """ "validation", "train", or "stream" for bytes that were predicted before they were learned from."""
    split = result.settings.get("split")
    return split if split in _SPLITS else "validation"


def measured_size(result: Result) -> str:
    """The size of the data of a result in brackets; empty if it was not recorded."""
    read, count = result.metrics.get("num_bytes"), result.metrics.get("num_episodes")
    if read is None:
        return ""
    episodes = "" if count is None else f" in {count:,.0f} episode{'' if count == 1 else 's'}"
    return f" ({read:,.0f} {result.data.unit}s{episodes})"


def hub_datasets(provenance: Provenance) -> list[str]:
    """Names on the Hub of the data of all phases, and of the training of teachers."""
    phases = [*provenance.phases]
    phases += [earlier for phase in provenance.phases if phase.teacher for earlier in phase.teacher.phases]
    parts = [part for phase in phases for data in phase.data for part in data.name.split(", ")]
    names = [part.removeprefix("hub:") for part in parts if part.startswith("hub:")]
    return [name for name in dict.fromkeys(names) if hub_name(name)]


def hub_base(provenance: Provenance) -> str | None:
    """Name on the Hub of the last saved model from there that training went on from."""
    bases = [phase.base for phase in reversed(provenance.phases) if phase.base is not None]
    return next((base.name for base in bases if "/" in base.name), None)


def data_terms(provenance: Provenance) -> str:
    """The licence of the training data, where it is known."""
    names = {part for phase in provenance.phases for data in phase.data for part in data.name.split(", ")}
    terms = []
    if "python" in names:
        terms.append("The source of Python's standard library is under the PSF License Agreement (`PSF-2.0`).")
    if datasets := hub_datasets(provenance):
        terms.append(f"The terms of {', '.join(map(_dataset_link, datasets))} are on the page of each dataset.")
    if not names or names - {"python", *(f"hub:{name}" for name in datasets)}:
        terms.append(f"The {'other ' if terms else ''}training data keep their own terms.")
    return " ".join(terms)


def data_label(name: str, python: str | None = None) -> str:
    """The name of a corpus in words, with a link to a dataset of the Hub."""
    return ", ".join(_part_label(part, python) for part in name.split(", "))


def _part_label(part: str, python: str | None) -> str:
    if part == "python":
        version = f"Python {python} " if python else "Python "
        return f"the {version}standard library's source, one file per episode"
    if part.startswith("hub:") and "/" in part:
        return _dataset_link(part.removeprefix("hub:"))
    return f"`{part}`"


def _dataset_link(name: str) -> str:
    return f"[{name}](https://huggingface.co/datasets/{name})"


def _describe_data(data: Data, versions: dict[str, str]) -> str:
    words = [data_label(data.name, versions.get("python"))]
    noun = "document" if data.unit == "byte" else "example"
    if data.documents is not None:
        words.append(f"{data.documents:,} {noun}{'' if data.documents == 1 else 's'}")
    if data.size is not None:
        words.append(f"{data.size:,} {data.unit}s")
    return ", ".join([*words, f"fingerprint `{data.fingerprint[:16]}`"])


def _describe_base(phase: Phase) -> str | None:
    if phase.base is None:
        return None
    name = phase.base.name
    link = f"[{name}](https://huggingface.co/{name})" if "/" in name else f"`{name}`"
    return f"{link} (weights `{phase.base.weights[:16]}`)"


def _describe_segment(segment: Segment, unit: str) -> dict[str, str]:
    settings = segment.settings
    facts = {}
    if "streams" in settings:
        size = f", {settings['block_size']:,} {unit}s each per update (T)" if "block_size" in settings else ""
        facts["Streams (B)"] = f"{settings['streams']:,}{size}"
    if "regime" in settings:
        carried = "the state carried" if settings.get("state_carried") else "no state carried"
        facts["Regime"] = f"{_REGIMES.get(settings['regime'], settings['regime'])}, {carried}"
    facts["Learning rate"] = "; ".join(dict.fromkeys(map(_describe_rate, segment.rates)))
    facts["Optimizer"] = _describe_optimizer(settings, segment.rates)
    facts["Weight decay"] = _describe_decay(segment.rates)
    limit = settings.get("max_grad_norm")
    facts["Gradient clipping"] = f"norm {limit:g}" if limit else "none"
    facts["Settings"] = ", ".join(
        f"{name.replace('_', ' ')} {_shown(settings[name])}" for name in _SETTINGS if name in settings
    )
    versions = ", ".join(f"{name} {version}" for name, version in segment.versions.items())
    facts["Machine"] = f"{segment.hardware}; {versions}"
    facts["Time and energy"] = _describe_cost(segment)
    if segment.resumed:
        facts["Resumed"] = f"{segment.resumed} time{'' if segment.resumed == 1 else 's'}"
    return facts


def _describe_cost(segment: Segment) -> str:
    parts = [f"{_duration(segment.seconds)} with evaluations"]
    if segment.cpu_seconds is not None:
        parts.append(f"{_duration(segment.cpu_seconds)} of CPU time")
    measured = segment.joules is not None
    parts.append(f"{segment.joules / 3.6e6:.3g} kWh of the whole processor" if measured else "energy not measured")
    return ", ".join(parts)


def _describe_rate(rate: Rate) -> str:
    # Of several optimizers that step together, each has its rate.
    optimizer = f"{rate.settings['optimizer']} " if "optimizer" in rate.settings else ""
    if rate.lowest == rate.highest:
        return f"{optimizer}{rate.first:.4g}"
    words = f"{optimizer}{rate.first:.3g} at first, {rate.last:.3g} at last"
    return words if rate.highest in (rate.first, rate.last) else f"{words}, {rate.highest:.3g} at most"


def _describe_optimizer(settings: dict[str, Any], rates: list[Rate]) -> str:
    settings_of = [rate.settings for rate in rates]
    first = next((each for each in settings_of if "betas" in each), settings_of[0] if rates else {})
    parts = [settings.get("optimizer", "")]
    if "betas" in first:
        parts.append(f"β {first['betas'][0]:g} and {first['betas'][1]:g}")
    parts += [f"{symbol} {first[key]:g}" for key, symbol in (("alpha", "alpha"), ("eps", "ε")) if key in first]
    if schedule := settings.get("schedule"):
        parts.append(schedule["name"].replace("_", " "))
        if warmup := schedule.get("num_warmup_steps"):
            parts.append(f"warm-up of {warmup:,}")
        if "num_training_steps" in schedule:
            parts.append(f"for {schedule['num_training_steps']:,} updates")
    return ", ".join(parts)


def _describe_decay(rates: list[Rate]) -> str:
    parts: dict[float, int] = {}
    for rate in rates:
        decay = rate.settings.get("weight_decay", 0.0)
        parts[decay] = parts.get(decay, 0) + rate.parameters
    return "; ".join(f"{decay:g} ({count:,} parameters)" for decay, count in parts.items()) or "none"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "all" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
