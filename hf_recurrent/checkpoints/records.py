"""`Provenance`: the phases in which weights were trained, as dataclasses of JSON values.

    Provenance
    ├─ phases: one for each method or start; a resumed run extends its phase
    │  └─ segments: steps between two changes of settings, number of processes, versions or hardware
    └─ results: measurements, each with a fingerprint of the weights that it belongs to

Settings and rates are read from optimizer, schedule and trainer while they act, never from requested arguments.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from hf_recurrent.checkpoints.privacy import public_data_name

# Of the format of the file; a reader refuses newer ones.
FORMAT = 1


@dataclass
class Data:
    """Data of a phase."""

    name: str  # without folders
    fingerprint: str
    unit: str = "byte"  # or "symbol" or "pixel"
    size: int | None = None  # number of tokens; None for an endless source
    documents: int | None = None  # number of documents or examples, where it is known
    read: int = 0  # tokens that were trained on

    @classmethod
    def of(cls, source: Any) -> "Data":
        """Facts of a source of episodes (`EpisodeSource`)."""
        size = source.tokens_per_epoch
        try:
            documents = len(source)
        except TypeError:  # a stream, or a mixture with one
            documents = None
        return cls(
            name=public_data_name(source.name),
            fingerprint=source.fingerprint,
            unit=source.unit,
            size=int(size) if size < float("inf") else None,
            documents=documents,
        )


@dataclass
class Rate:
    """Learning rates over the steps of a segment, and hyperparameters, of a group of parameters."""

    parameters: int
    first: float
    last: float
    lowest: float
    highest: float
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Segment:
    """Consecutive steps of a phase with the same settings on the same hardware."""

    first_step: int  # number of finished steps before it
    last_step: int  # number of finished steps after it
    read: int  # tokens that were trained on
    processes: int
    settings: dict[str, Any]  # names and values that acted, such as `streams` and `schedule`
    rates: list[Rate]  # one entry for each group of parameters
    versions: dict[str, str]  # package → version
    hardware: str
    started: str  # time in UTC, ISO 8601
    seconds: float = 0.0  # duration, with evaluations and saving
    resumed: int = 0  # number of times that it was resumed from a checkpoint
    cpu_seconds: float | None = None  # of the main process, all its threads; None in records of earlier versions
    joules: float | None = None  # energy of the processors ([`EnergyMeter`]); None where it cannot be measured


@dataclass
class Base:
    """The saved model that a phase began with."""

    name: str  # on the Hub, or the last part of a directory
    weights: str  # fingerprint ([`weights_fingerprint`])
    license: str | None = None  # of its card, if it has one


@dataclass
class Teacher:
    """The teacher of a phase of SMT or DMT that was trained before it."""

    weights: str  # fingerprint when the phase began
    phases: list["Phase"] = field(default_factory=list)  # its own training; empty if earlier phases here have it


@dataclass
class Phase:
    """Training by one method."""

    method: str  # "bptt", "rtrl", "snap1", "truncated", "spatial", "smt" or "dmt"
    data: list[Data]
    segments: list[Segment] = field(default_factory=list)
    base: Base | None = None  # None for new weights, and for the weights of the phase before
    parameters: int | None = None  # number of them in the saved model
    trained_parameters: int | None = None  # number of those that were updated
    adapter: dict[str, Any] | None = None  # type and settings of the adapter (PEFT) that was trained
    teacher: Teacher | None = None
    curve: list[list[float]] = field(default_factory=list)  # pairs of tokens read and training bits per token
    recipe: str | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return self.segments[-1].last_step if self.segments else 0

    @property
    def read(self) -> int:
        """Tokens that were trained on, in all segments."""
        return sum(segment.read for segment in self.segments)

    @property
    def seconds(self) -> float:
        """Duration of all segments."""
        return sum(segment.seconds for segment in self.segments)


@dataclass
class Result:
    """A measurement."""

    phase: int  # number of phases that had begun, the current one included
    step: int  # optimizer steps of the current phase
    weights: str  # fingerprint of the weights that were measured
    data: Data
    metrics: dict[str, float]  # finite numbers
    settings: dict[str, Any] = field(default_factory=dict)  # how they were measured, such as `block_size`


@dataclass
class Sample:
    """A continuation of a prompt by the model with the weights of the fingerprint `weights`."""

    prompt: str
    text: str
    weights: str
    temperature: float


@dataclass
class Provenance:
    """Everything that is known about the training of a model's weights."""

    phases: list[Phase] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    weights: str | None = None  # fingerprint of the weights that it describes ([`weights_fingerprint`])
    sample: Sample | None = None
    gaps: list[str] = field(default_factory=list)  # sentences about training that was not recorded

    @property
    def is_empty(self) -> bool:
        """True if nothing was recorded."""
        return not (self.phases or self.results or self.gaps)

    def current_results(self) -> list[Result]:
        """The last measurement of these weights on each source of data."""
        last = {
            result.data.fingerprint: result for result in self.results if result.weights == self.weights is not None
        }
        return list(last.values())

    def add_metrics(self, weights: str, data: Data, metrics: Mapping[str, Any], settings: dict[str, Any]) -> None:
        """Add those metrics of weights at the last recorded step that are finite numbers; see [`add_result`]."""
        step = self.phases[-1].steps if self.phases else 0
        finite = {name: value for name, value in metrics.items() if isinstance(value, int | float) and isfinite(value)}
        self.add_result(Result(len(self.phases), step, weights, data, finite, settings))

    def add_result(self, result: Result) -> None:
        """Add a measurement; it replaces one of the same weights, data and settings."""

        def key(one: Result) -> tuple:
            return one.weights, one.data.fingerprint, one.settings

        self.results = [one for one in self.results if key(one) != key(result)] + [result]
        if len(self.results) > _MOST_RESULTS:  # old ones are thinned out
            half = _MOST_RESULTS // 2
            self.results = self.results[:half:2] + self.results[half:]

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {"format": FORMAT, **dataclasses.asdict(self)}


# Measurements that are kept of a run that is evaluated for weeks.
_MOST_RESULTS = 200


def thin_out(curve: list[list[float]]) -> list[list[float]]:
    """At most about 200 points of a curve, the first and the last among them."""
    stride = -(-len(curve) // 200)
    return curve if stride <= 1 else [*curve[:-1:stride], curve[-1]]


def from_json(value: Any) -> Provenance:
    """The provenance in JSON values of [`Provenance.to_json`].

    Raises:
        ValueError: a value is missing, unknown or of another type.
    """
    if not isinstance(value, dict):
        raise ValueError(f"it has a JSON {type(value).__name__} instead of an object.")
    version = value.get("format")
    if type(version) is not int or version != FORMAT:
        raise ValueError(f"`format` is {version!r:.40}; this version reads {FORMAT}.")
    return _decode({name: item for name, item in value.items() if name != "format"}, Provenance, "provenance")


_KINDS = {
    dict: "an object", list: "a list", float: "a finite number", int: "an integer from 0 on", str: "text",
}  # fmt: skip


def _decode(value: Any, kind: Any, place: str) -> Any:
    """`value` as an instance of the annotated type `kind`, or a ValueError that names its place."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is types.UnionType:
        return None if value is None else _decode(value, arguments[0], place)
    base = dict if dataclasses.is_dataclass(kind) else origin or kind
    if base is float:
        matches = type(value) in (int, float) and isfinite(value)
    else:
        matches = type(value) is base and (base is not int or 0 <= value < 2**63)
    if not matches:
        raise ValueError(f"`{place}` is {value!r:.40}; it must be {_KINDS[base]}.")
    if base is list:
        return [_decode(item, arguments[0], place) for item in value]
    if origin is dict:
        return {name: _decode(item, arguments[1], f"{place}.{name}") for name, item in value.items()}
    if base is not dict:
        return value
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    required = {
        part.name for part in dataclasses.fields(kind) if part.default is missing and part.default_factory is missing
    }
    if wrong := sorted(map(str, (value.keys() - hints.keys()) | (required - value.keys()))):
        raise ValueError(f"`{place}` has a missing or unknown `{wrong[0]:.40}`.")
    return kind(**{name: _decode(item, hints[name], f"{place}.{name}") for name, item in value.items()})
