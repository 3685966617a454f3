"""Where everything lies in the struct of an exported learner, and in its files."""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_recurrent.export.c_learner_printer import Layout
from hf_recurrent.export.c_tables import WEIGHTS_MAGIC
from hf_recurrent.learning_rules.compiled_block import CompiledBlock

SAVED_MAGIC, FILE_VERSION = 0x4C434648, 2  # "HFCL" in little-endian order
HEADER_BYTES = 20


@dataclass(frozen=True)
class LearnerSetting:
    """How an exported learner learns.

    Args:
        optimizer: AdamW or RMSprop without weight decay, of all trained parameters of the model.
        max_grad_norm: gradients are clipped to this norm; 0 for no clipping.
        end: the token that ends an episode; None if there is none.
    """

    optimizer: torch.optim.Optimizer
    max_grad_norm: float = 1.0
    end: int | None = 0


class LearnerPlan:
    """Where everything lies in the struct of a learner.

    Attributes:
        offsets: name of a parameter → its first element among the weights; trained ones come first.
        names, trained: of all parameters and of the trained ones, in order.
        num_trained, num_weights: elements.
        fields: name of a part of the state or of the sensitivities → field of the struct and elements.
        rates: (begin, end, factor of the learning rate) of trained weights.
    """

    def __init__(self, block: CompiledBlock, setting: LearnerSetting):
        self.setting, self.vocab_size = setting, block.model.config.vocab_size
        self.kind = "adamw" if isinstance(setting.optimizer, torch.optim.AdamW) else "rmsprop"
        self.parameters = block.parameters
        self.trained = trained = list(block.gradients)
        self.names = [*trained, *(name for name in self.parameters if name not in block.gradients)]
        self.offsets, at = {}, 0
        for name in self.names:
            self.offsets[name] = at
            at += self.parameters[name].numel()
        self.num_weights = at
        self.num_trained = sum(self.parameters[name].numel() for name in trained)
        rule = block.rule
        self.fields: dict[str, tuple[str, int]] = {}
        for part, tensors in (("state", rule.model.init_state(1)), ("carried", rule.init_carried(1))):
            for name, tensor in tensors.items():
                field = re.sub(r"\W", "_", f"{part}_{name}")
                self.fields[f"{part} {name}"] = field, tensor.numel()
        self.rates = list(self._rates(trained))

    def _rates(self, trained: list[str]) -> Iterator[tuple[int, int, float]]:
        groups = self.setting.optimizer.param_groups
        rate_of = {p: group["lr"] for group in groups for p in group["params"]}
        self.learning_rate = float(groups[0]["lr"])
        segments: list[tuple[int, int, float]] = []
        for name in trained:
            parameter, begin = self.parameters[name], self.offsets[name]
            if parameter not in rate_of:
                raise ValueError(f"`setting.optimizer` does not have the parameter `{name}`.")
            factor, end = rate_of[parameter] / self.learning_rate, begin + parameter.numel()
            if segments and segments[-1][2] == factor:
                begin = segments.pop()[0]
            segments.append((begin, end, factor))
        yield from segments

    @property
    def num_moments(self) -> int:
        """Arrays of moments of the optimizer."""
        return 2 if self.kind == "adamw" else 1

    @property
    def saved_words(self) -> int:
        """Elements of `struct NAME_saved`."""
        return self.num_weights + self.num_moments * self.num_trained + sum(n for _, n in self.fields.values()) + 3

    @property
    def checksum(self) -> int:
        """CRC-32 of names and shapes of all that is saved, which ties files to code."""
        shapes = [f"{name} {tuple(self.parameters[name].shape)}" for name in self.names]
        return zlib.crc32("\n".join([*shapes, *(f"{f} {n}" for f, n in self.fields.values()), self.kind]).encode())

    def layout(self) -> Layout:
        """For a printer."""
        inputs = {name: f"learner->saved.{field}[{{}}]" for name, (field, _) in self.fields.items()}
        return Layout([(self.parameters[name].detach(), at) for name, at in self.offsets.items()], inputs)

    def weights_file(self) -> bytes:
        """The file of the weights, float32."""
        flat = [self.parameters[name].detach().reshape(-1) for name in self.names]
        return self.file(WEIGHTS_MAGIC, torch.cat(flat).numpy().astype("<f4").tobytes())

    def file(self, magic: int, payload: bytes) -> bytes:
        """Magic number, version, size, layout and CRC-32 of the payload, 32 bits each, and the payload."""
        words = (magic, FILE_VERSION, len(payload), self.checksum, zlib.crc32(payload))
        return b"".join(word.to_bytes(4, "little") for word in words) + payload
