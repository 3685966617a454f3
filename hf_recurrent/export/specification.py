"""The description of an exported program: its inputs, outputs and state, and the weights that it belongs to.

Shape letters: B streams.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_recurrent.checkpoints.weight_hashing import weights_hash
from hf_recurrent.export.formats import FORMATS
from hf_recurrent.export.step_module import StepModule
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, check_state

FORMAT = "hf_recurrent.export.3"  # raise the number with every change of the folder's content


@dataclass(frozen=True)
class StatePart:
    """One tensor of the state: `shape` is the shape of one stream, without B."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ExportSpecification:
    """Content of `specification.json`.

    Args:
        runtime: one of `FORMATS`.
        program: name of the program's file.
        model_type: the family.
        outputs: "logits", or "hidden_states" of a base model.
        inputs: "token_ids", or "values" of a model that reads real values.
        vocab_size: token ids are below it; None for real values.
        input_size: width of real values; None for token ids.
        num_outputs: width of the outputs.
        pooling: "mean" or "last" of the steps' logits of a classifier; None for others.
        weights: the type that large weights are stored in, or None for the model's own.
        weights_hash: [`weights_hash`] of the model; states belong to it.
        max_streams: the largest B.
        state: the parts of the state, in the order of inputs and outputs.
        versions: of torch and of this package.
    """

    runtime: str
    program: str
    model_type: str
    outputs: str
    inputs: str
    vocab_size: int | None
    input_size: int | None
    num_outputs: int
    pooling: str | None
    weights: str | None
    weights_hash: str
    max_streams: int
    state: tuple[StatePart, ...]
    versions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any, path: str) -> "ExportSpecification":
        """The inverse of `to_json`; `path` names the file in errors.

        Raises:
            ValueError: the value is not a specification, or has another version.
        """
        if not isinstance(value, dict) or "format" not in value:
            raise ValueError(f"`{path}` is not the specification of an exported program.")
        fields = dict(value)
        if (found := fields.pop("format")) != FORMAT:
            raise ValueError(f"`{path}` has the format {found!r}; this version of hf-recurrent reads {FORMAT!r}.")
        if fields["runtime"] not in FORMATS:
            raise ValueError(f"`{path}` has the unknown runtime {fields['runtime']!r}.")
        parts = tuple(StatePart(p["name"], tuple(p["shape"]), p["dtype"]) for p in fields.pop("state"))
        return cls(state=parts, **fields)

    def init_state(self, batch_size: int) -> RecurrentState:
        """The zero state of B streams."""
        return {p.name: torch.zeros((batch_size, *p.shape), dtype=_DTYPES[p.dtype]) for p in self.state}

    def check(self, inputs: torch.Tensor, state: RecurrentState) -> None:
        """Raise a ValueError unless inputs and state have the shapes of one step."""
        width = () if self.input_size is None else (self.input_size,)
        if inputs.dim() != 1 + len(width) or inputs.shape[1:] != width or len(inputs) < 1:
            wanted = ", ".join(["B", *map(str, width)])
            raise ValueError(f"`inputs` has shape {tuple(inputs.shape)}; it must be ({wanted}).")
        if len(inputs) > self.max_streams:
            raise ValueError(f"`inputs` has {len(inputs)} streams; this program reads at most {self.max_streams}.")
        dtype = torch.int64 if self.vocab_size is not None else _DTYPES[self.state[0].dtype]
        if inputs.dtype != dtype:
            raise ValueError(f"`inputs` has type {inputs.dtype}; it must be {dtype}.")
        if self.vocab_size is not None:
            low, high = map(int, inputs.aminmax())
            if low < 0 or high >= self.vocab_size:
                wrong = low if low < 0 else high
                raise ValueError(
                    f"`inputs` holds {wrong}, but the vocabulary has {self.vocab_size} tokens, from 0 on."
                )
        check_state(state, {p.name: torch.Size((len(inputs), *p.shape)) for p in self.state})
        for p in self.state:
            if state[p.name].dtype != _DTYPES[p.dtype]:
                raise ValueError(f"`state['{p.name}']` has type {state[p.name].dtype}; it must be {_DTYPES[p.dtype]}.")


_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def describe(
    model: PreTrainedModel, runtime: str, program: str, weights: str | None, max_streams: int
) -> ExportSpecification:
    import hf_recurrent

    module, config = StepModule(model), model.config
    state = module.backbone.init_state(1)
    is_classifier = module.head is not None and not hasattr(model, "lm_head")
    return ExportSpecification(
        runtime=runtime,
        program=program,
        model_type=config.model_type,
        outputs="hidden_states" if module.head is None else "logits",
        inputs="values" if module.reads_values else "token_ids",
        vocab_size=None if module.reads_values else config.vocab_size,
        input_size=config.input_size if module.reads_values else None,
        num_outputs=config.hidden_size if module.head is None else module.head.out_features,
        pooling=config.pooling if is_classifier else None,
        weights=weights,
        weights_hash=weights_hash(model),
        max_streams=max_streams,
        state=tuple(StatePart(name, tuple(t.shape[1:]), str(t.dtype)[6:]) for name, t in state.items()),
        versions={"torch": torch.__version__, "hf_recurrent": hf_recurrent.__version__},
    )
