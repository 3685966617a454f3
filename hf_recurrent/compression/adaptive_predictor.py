"""A model that learns from the data while they are coded; the decoder makes the same updates.

Shape letters: T steps, V vocabulary.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_recurrent.argument_checks import check_integer, is_number
from hf_recurrent.checkpoints.optimizer_state import load_optimizer_state, optimizer_state
from hf_recurrent.compression.predictors import Predictor, check_model, finite
from hf_recurrent.learning_rules.block_learning import BlockLearning
from hf_recurrent.learning_rules.compiled_program import CompiledReading
from hf_recurrent.learning_rules.joint_optimizer import join_optimizers
from hf_recurrent.learning_rules.rowwise_adagrad import use_sparse_gradients
from hf_recurrent.learning_rules.rules import RULES, NonFiniteLossError, build_learning_rule
from hf_recurrent.modeling.block.recurrent_state import detach_state

_LARGEST_STRIDE = 1 << 16
_RATES = 100  # different learning rates, from the first to the last


@dataclass(frozen=True)
class AdaptiveSettings:
    """Settings of the learning model.

    Args:
        learning_rate: at the beginning; it falls linearly to `final_rate` of it at the end of the data.
        final_rate: share of the learning rate at the end.
        stride: T, bytes between two updates.
        rule: `rtrl`, `snap1`, `truncated` or `spatial` ([`build_learning_rule`]).
        max_grad_norm: gradients are clipped to this norm.
        compiled: use the compiled kernel instead of plain torch; their results differ by rounding.

    Raises:
        ValueError: a value is not allowed.
    """

    learning_rate: float = 2e-3
    final_rate: float = 0.1
    stride: int = 16
    rule: str = "truncated"
    max_grad_norm: float = 1.0
    compiled: bool = True

    def __post_init__(self):
        check_integer("stride", self.stride, 1, _LARGEST_STRIDE)
        for name in ("learning_rate", "final_rate", "max_grad_norm"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < float("inf"):
                raise ValueError(f"`{name}` is {value!r}; it must be a finite number of at least 0.")
        if self.rule not in RULES:
            raise ValueError(f"`rule` is {self.rule!r}; it must be one of {', '.join(RULES)}.")


class _PlainReading:
    """The attributes of [`CompiledReading`], in plain torch."""

    def __init__(self, model: PreTrainedModel):
        self._model, self.state = model, model.init_state(1)

    def read(self, token: int) -> None:
        # With gradients: without them, the step would be compiled again after every update.
        with torch.enable_grad():
            output = self._model(torch.tensor([[token]]), state=self.state, use_cache=True)
        self.state, self.logits = detach_state(output.state), output.logits[0].detach().float()


class AdaptivePredictor(Predictor):
    """A recurrent byte-level model that reads one stream byte by byte, and learns in place after every T bytes.

    The learning rate falls over the `size` of the data.

    Raises:
        Uncompilable: the settings ask for the compiled kernel, which cannot compute with this model.
    """

    def __init__(self, model: PreTrainedModel, size: int, settings: AdaptiveSettings):
        check_model(model)
        super().__init__(1)
        self._model, self._size, self._settings = model.eval(), size, settings
        parameters = [weight for weight in model.parameters() if weight.requires_grad]
        use_sparse_gradients(model)
        adamw = torch.optim.AdamW(parameters, settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
        self._optimizer = join_optimizers(adamw, model)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        rule = build_learning_rule(settings.rule, model)
        self._learning = BlockLearning(rule, self._optimizer, settings.stride, settings.stride, updates_each=True)
        if settings.compiled:
            self._learning.require_compiled()
            self._reading = CompiledReading(model)
        else:
            self._learning.use_plain_torch()
            self._reading = _PlainReading(model)
        self._carried = rule.init_carried(1)
        self._unlearned = bytearray()  # the last byte that was learned from, and all since
        self._done = 0  # bytes learned from
        self._block_state = model.init_state(1)  # before the unlearned bytes

    def read(self, tokens: np.ndarray) -> None:
        token = int(tokens[0])
        self._unlearned.append(token)
        if len(self._unlearned) > self._settings.stride:
            self._learn()
        self._reading.read(token)
        self.logits = finite(self._reading.logits.numpy())

    def _learn(self) -> None:
        """Learn to predict the last T bytes, each from the bytes before it."""
        settings = self._settings
        tokens = torch.tensor([list(self._unlearned)])
        block = tokens[:, :-1], tokens[:, 1:], torch.zeros(1, settings.stride, dtype=torch.bool)
        self._done += settings.stride
        share = round(_RATES * self._done / max(self._size, 1)) / _RATES
        factor = 1 - (1 - settings.final_rate) * min(share, 1.0)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        try:
            _, self._block_state = self._learning.learn(self._carried, self._block_state, block)
            self._learning.update(1.0, settings.max_grad_norm)
        except NonFiniteLossError:
            self._block_state = self._model.init_state(1)
        self._reading.state = self._block_state
        del self._unlearned[:-1]

    def state_dict(self) -> dict[str, Any]:
        self._learning.write_steps()
        return {
            "settings": asdict(self._settings),
            "weights": dict(self._model.state_dict()),
            "optimizer": optimizer_state(self._optimizer),
            "carried": dict(self._carried),
            "unlearned": list(self._unlearned),
            "done": self._done,
            "block_state": dict(self._block_state),
            "state": dict(self._reading.state),
            "logits": torch.from_numpy(self.logits),
        }

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._model.load_state_dict(values["weights"])
        load_optimizer_state(self._optimizer, values["optimizer"])
        self._unlearned, self._done = bytearray(values["unlearned"]), values["done"]
        # Copies, because rounding may depend on where a tensor lies.
        self._carried, self._block_state, self._reading.state = (
            {name: tensor.clone() for name, tensor in values[part].items()}
            for part in ("carried", "block_state", "state")
        )
        self.logits = values["logits"].numpy()
