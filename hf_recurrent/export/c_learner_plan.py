"""Layout of the struct of an exported learner, and of its files."""

import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hf_recurrent.export.c_learner_counts import CountPlan, count_plan
from hf_recurrent.export.c_learner_helpers import MOMENTS
from hf_recurrent.export.c_tables import WEIGHTS_MAGIC
from hf_recurrent.export.formats import NUMBERS
from hf_recurrent.learning_rules.compiled_block import CompiledBlock
from hf_recurrent.learning_rules.joint_optimizer import JointOptimizer
from hf_recurrent.learning_rules.rowwise_adagrad import RowwiseAdagrad
from hf_recurrent.learning_rules.rules import build_learning_rule
from hf_recurrent.modeling.block.recurrent_state import RecurrentState
from hf_recurrent.modeling.contexts.counted_predictions import init_network_state
from hf_recurrent.online.learner import OnlineLearner
from hf_recurrent.online.vector_learner import VectorLearner

if TYPE_CHECKING:
    from hf_recurrent.export.vector_block import VectorBlock

SAVED_MAGIC, FILE_VERSION = 0x4C434648, 2  # "HFCL" in little-endian order
HEADER_BYTES = 20
FIXED_SCALE = 1 << 12  # of weights in fixed point, from -8 to 8
FIRST_RANDOM = 2463534242  # Marsaglia 2003, "Xorshift RNGs"
_KINDS = {torch.optim.AdamW: "adamw", torch.optim.RMSprop: "rmsprop", torch.optim.SGD: "sgd"}
_ABSENT = ("amsgrad", "maximize", "weight_decay", "momentum", "centered", "nesterov")  # settings that C does not have


class Part(NamedTuple):
    """An array of `struct NAME_saved`.

    Args:
        field: its name.
        size: elements.
        type: in C; uint16_t is bfloat16, and int16_t `FIXED_SCALE` times the number.
    """

    field: str
    size: int
    type: str = "float"

    @property
    def is_short(self) -> bool:
        """True for 16 bits."""
        return self.type != "float"

    @property
    def num_bytes(self) -> int:
        return self.size * (2 if self.is_short else 4)

    def encode(self, tensor: torch.Tensor) -> bytes:
        """The array as stored in the struct."""
        tensor = tensor.reshape(-1).float()
        if self.type == "int16_t":
            tensor = (tensor * FIXED_SCALE).round().clamp(-(1 << 15), (1 << 15) - 1)
        elif self.type == "uint16_t":
            tensor = tensor.bfloat16().view(torch.int16)
        return tensor.numpy().astype("<i2" if self.is_short else "<f4").tobytes()

    def decode(self, payload: bytes, at: int) -> torch.Tensor:
        """The elements, float32, that begin at a byte."""
        array = np.frombuffer(payload, "<i2" if self.is_short else "<f4", self.size, at)
        if not self.is_short:
            return torch.from_numpy(array.astype(np.float32))
        shorts = torch.from_numpy(array.astype(np.int16))
        return shorts / FIXED_SCALE if self.type == "int16_t" else shorts.view(torch.bfloat16).float()


class TrainedTable(NamedTuple):
    """A table of n-grams, (height, width), that learns by row-wise Adagrad."""

    name: str
    height: int
    width: int
    rate: float
    eps: float


@dataclass(frozen=True)
class LearnerSetting:
    """Settings of an exported learner.

    Args:
        optimizer: AdamW, RMSprop or SGD without weight decay and momentum, of all trained parameters of the model;
            joined with [`RowwiseAdagrad`] for a table of n-grams.
        max_grad_norm: gradients are clipped to this norm; 0 for no clipping.
        end: the token that ends an episode; None if there is none.
        numbers: "float32"; "bfloat16" for the optimizer's moments and the sensitivities, or "int16" for the trained
            matrices too, in fixed point, all with stochastic rounding. Gradients and the state are always float32.
    """

    optimizer: torch.optim.Optimizer
    max_grad_norm: float = 1.0
    end: int | None = 0
    numbers: str = "float32"

    def check(self) -> None:
        """Raise a ValueError for a setting that a learner in C does not have."""
        groups, kind = self.dense.param_groups, type(self.dense)
        if kind not in _KINDS or any(group.get(name) for group in groups for name in _ABSENT):
            raise ValueError(
                f"`setting.optimizer` is {kind.__name__}; it must be AdamW, RMSprop or SGD without weight decay and "
                "momentum."
            )
        if not 0 <= self.max_grad_norm < math.inf:
            raise ValueError(f"`setting.max_grad_norm` is {self.max_grad_norm}; it must be finite and at least 0.")
        if self.numbers not in NUMBERS:
            raise ValueError(f"`numbers` is {self.numbers!r}; it must be one of {', '.join(NUMBERS)}.")

    @property
    def parts(self) -> list[torch.optim.Optimizer]:
        """The optimizers that step together."""
        if not isinstance(self.optimizer, JointOptimizer):
            return [self.optimizer]
        self.optimizer.bind_parts()
        return [*self.optimizer.parts.values()]

    @property
    def dense(self) -> torch.optim.Optimizer:
        """The optimizer of the parameters other than tables."""
        return next(part for part in self.parts if not isinstance(part, RowwiseAdagrad))

    def table_group(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """Settings of row-wise Adagrad for a table; raises a ValueError if it has another optimizer."""
        for part in self.parts:
            for group in part.param_groups if isinstance(part, RowwiseAdagrad) else ():
                if any(one is parameter for one in group["params"]):
                    return group
        raise ValueError("`setting.optimizer` must have RowwiseAdagrad for the table of n-grams.")


def learner_setting(learner: OnlineLearner | VectorLearner, numbers: str = "float32") -> LearnerSetting:
    """Settings of a learner.

    Raises:
        ValueError: a learner of tokens does not learn by the rule "rtrl" with stride 1.
    """
    settings = learner.settings
    if isinstance(learner, VectorLearner):
        return LearnerSetting(learner.optimizer, settings.max_grad_norm, None, numbers)
    if not settings.learn or (settings.rule, settings.stride, settings.update_every) != ("rtrl", 1, 1):
        raise ValueError("`learner` must learn by the rule 'rtrl' with stride 1, as a learner in C does.")
    return LearnerSetting(learner.step.optimizer, settings.max_grad_norm, learner.end, numbers)


class LearnerPlan:
    """Layout of the struct of a learner.

    Args:
        state: the zero state of one stream.
        scales: name → size of other numbers that are saved.

    Attributes:
        offsets: name of a parameter → its first element among the weights; trained ones come first.
        names, trained: of all parameters and of the trained ones, in order.
        num_trained, num_weights: elements; the former without tables.
        num_fixed: elements of the first trained parameters, which are in fixed point.
        num_orders: rows of a table of n-grams that are read for a token.
        table: of n-grams, if one learns.
        fields: name of a part of the state or of the sensitivities → field of the struct and elements.
        rates: (begin, end, factor of the learning rate) of trained weights.
    """

    def __init__(
        self,
        block: "CompiledBlock | VectorBlock",
        setting: LearnerSetting,
        state: RecurrentState,
        scales: Mapping[str, int] | None = None,
        counts: CountPlan | None = None,
    ):
        self.setting, self.scales, self.counts = setting, dict(scales or {}), counts
        self.kind = _KINDS[type(setting.dense)]
        self.parameters = block.parameters
        sizes = {name: parameter.numel() for name, parameter in self.parameters.items()}
        matrices = {name for name in sizes if setting.numbers == "int16" and self.parameters[name].dim() > 1}
        self.trained = trained = sorted(block.gradients, key=lambda name: name not in matrices)
        self.names = [*trained, *(name for name in sizes if name not in block.gradients)]
        self.offsets, self.num_weights = {}, 0
        for name in self.names:
            self.offsets[name] = self.num_weights
            self.num_weights += sizes[name]
        self.num_trained = sum(sizes[name] for name in trained)
        self.num_fixed = sum(sizes[name] for name in trained if name in matrices)
        self.num_orders = len(getattr(block.rule.model.config, "ngram_orders", None) or ())
        self.fields: dict[str, tuple[str, int]] = {}
        for part, tensors in (("state", state), ("carried", block.rule.init_carried(1))):
            for name, tensor in tensors.items():
                field = re.sub(r"\W", "_", f"{part}_{name}")
                self.fields[f"{part} {name}"] = field, tensor.numel()
        self.learning_rate = float(setting.dense.param_groups[0]["lr"])
        self.rates = self._rates()
        self.table = self._trained_table(block)
        if self.table is not None:
            self.scales["row_sums"] = self.table.height

    def _trained_table(self, block: "CompiledBlock | VectorBlock") -> TrainedTable | None:
        if not block.tables:
            return None
        (name,) = block.tables  # a model has one
        parameter = self.parameters[name]
        group = self.setting.table_group(parameter)
        return TrainedTable(name, *parameter.shape, float(group["lr"]), group["eps"])

    def _rates(self) -> list[tuple[int, int, float]]:
        rate_of = {p: group["lr"] for group in self.setting.dense.param_groups for p in group["params"]}
        segments: list[tuple[int, int, float]] = []
        for name in self.trained:
            parameter, begin = self.parameters[name], self.offsets[name]
            if parameter not in rate_of:
                raise ValueError(f"`setting.optimizer` does not have the parameter `{name}`.")
            factor, end = rate_of[parameter] / self.learning_rate, begin + parameter.numel()
            if segments and segments[-1][2] == factor and begin != self.num_fixed:
                begin = segments.pop()[0]
            segments.append((begin, end, factor))
        return segments

    @property
    def moments(self) -> tuple[str, ...]:
        """Fields of the optimizer's arrays."""
        return MOMENTS[self.kind]

    @property
    def is_narrow(self) -> bool:
        """True if moments and sensitivities are bfloat16."""
        return self.setting.numbers != "float32"

    @property
    def weight_parts(self) -> list[Part]:
        """Arrays of weights, in the order of the struct."""
        parts = [Part("weights", self.num_weights - self.num_fixed)]
        return [*parts, Part("fixed", self.num_fixed, "int16_t")] if self.num_fixed else parts

    @property
    def weight_bytes(self) -> int:
        """Bytes of the file of weights, without counts."""
        return sum(part.num_bytes for part in self.weight_parts)

    def weights(self) -> dict[str, torch.Tensor]:
        """Field → its elements, of all weights as they are now."""
        flat = torch.cat([self.parameters[name].detach().reshape(-1) for name in self.names])
        return {"fixed": flat[: self.num_fixed], "weights": flat[self.num_fixed :]}

    def join_weights(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """All weights one after another, of such fields."""
        return torch.cat([values[name] for name in ("fixed", "weights") if name in values])

    def split(self, flat: torch.Tensor, names: list[str]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Named parameters, each with its part of elements that lie one after another."""
        parameters = [self.parameters[name] for name in names]
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            yield parameter, part.view_as(parameter)

    @property
    def parts(self) -> list[Part]:
        """Arrays of `struct NAME_saved`, in order; 16-bit ones are last, and their number is even."""
        narrow = "uint16_t" if self.is_narrow else "float"
        parts = self.weight_parts + [Part(moment, self.num_trained, narrow) for moment in self.moments]
        for name, (field, size) in self.fields.items():
            parts.append(Part(field, size, narrow if name.startswith("carried") else "float"))
        parts += [Part(name, size) for name, size in self.scales.items()]
        if sum(part.size for part in parts if part.is_short) % 2:
            parts.append(Part("unused", 1, "uint16_t"))
        words = sum(part.num_bytes for part in parts) // 4
        if (words + 3 + self.is_narrow) % 2 and self.counts is not None:
            parts.append(Part("alignment", 1))  # after the integers of 64 bits of a count memory
        return sorted(parts, key=lambda part: part.is_short)

    @property
    def table_memory(self) -> tuple[str, int]:
        """Fields of `struct NAME_learner` for n-grams, which are not saved, and the number of their words."""
        rows = f"    uint32_t rows[{self.num_orders}]; /* of the table of n-grams */\n" if self.num_orders else ""
        if self.table is None:
            return rows, self.num_orders
        fields = f"    float of_rows[{self.table.width}]; /* the gradient of each */\n"
        fields += "    float table_learning_rate; /* may be changed at any time */\n"
        return rows + fields, self.num_orders + self.table.width + 1

    @property
    def saved_bytes(self) -> int:
        """Size of `struct NAME_saved`."""
        size = sum(part.num_bytes for part in self.parts) + 4 * (3 + self.is_narrow)
        return size + (0 if self.counts is None else self.counts.size)

    @property
    def checksum(self) -> int:
        """CRC-32 of names and shapes of all that is saved, which ties files to code."""
        shapes = [f"{name} {tuple(self.parameters[name].shape)}" for name in self.names]
        fields = [f"{field} {size}" for field, size in (*self.fields.values(), *self.scales.items())]
        kinds = [self.kind, self.setting.numbers] if self.is_narrow else [self.kind]
        counts = [] if self.counts is None else [f"counts {self.counts.memory.shape}"]
        return zlib.crc32("\n".join([*shapes, *fields, *kinds, *counts]).encode())

    def weights_file(self) -> bytes:
        fields = self.weights()
        counts = b"" if self.counts is None or self.counts.is_empty else self.counts.learned()
        weights = b"".join(part.encode(fields[part.field]) for part in self.weight_parts)
        return self.file(WEIGHTS_MAGIC, counts + weights)

    def file(self, magic: int, payload: bytes) -> bytes:
        """Magic number, version, size, layout and CRC-32 of the payload, 32 bits each, and the payload."""
        words = (magic, FILE_VERSION, len(payload), self.checksum, zlib.crc32(payload))
        return b"".join(word.to_bytes(4, "little") for word in words) + payload


def token_plan(model: torch.nn.Module, setting: LearnerSetting) -> tuple[CompiledBlock, LearnerPlan]:
    """The block of one byte of a language model, and the layout of its learner.

    Raises:
        Uncompilable: the kernel cannot compute the block.
    """
    block = CompiledBlock(build_learning_rule("rtrl", model), 1, 1, resets=False)
    return block, LearnerPlan(block, setting, init_network_state(model, 1), counts=count_plan(model))
