"""A model that learns from the data while they are coded; the decoder makes the same updates.

Shape letters: B streams, T steps, V vocabulary.
"""

import random
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from hf_recurrent.compression.predictors import check_model, softmax, uniform
from hf_recurrent.learning_rules.optimizer_state import load_optimizer_state, optimizer_state
from hf_recurrent.modeling.recurrent_state import detach_state, upcast

_LARGEST = 1 << 16


@dataclass(frozen=True)
class AdaptiveSettings:
    """How the model learns.

    Args:
        learning_rate: at the beginning; it falls linearly to `final_rate` of it at the end of the data.
        final_rate: share of the learning rate at the end.
        stride: T, bytes between two updates.
        replays: earlier blocks of T bytes that every update reads again with the newest one.
        max_grad_norm: gradients are clipped to this norm.
        weight_decay: of matrices.
        seed: of the choice of replayed blocks.

    Raises:
        ValueError: a value is not allowed.
    """

    learning_rate: float = 4e-3
    final_rate: float = 0.1
    stride: int = 16
    replays: int = 0
    max_grad_norm: float = 1.0
    weight_decay: float = 0.1
    seed: int = 0

    def __post_init__(self):
        for name, least in (("stride", 1), ("replays", 0), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
                raise ValueError(f"`{name}` is {value!r}; it must be an integer from {least} to {_LARGEST}.")
        for name in ("learning_rate", "final_rate", "max_grad_norm", "weight_decay"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"`{name}` is {value!r}; it must be a finite number of at least 0.")


class AdaptivePredictor:
    """One stream. Bytes are predicted one by one; after T of them the weights are updated.

    An update can also learn from blocks of the past, chosen at random: the decoder has read them too.

    Args:
        model: a recurrent byte-level model, trained in place.
        size: bytes of the data, for the learning rate.
        settings: [`AdaptiveSettings`].
    """

    streams = 1

    def __init__(self, model: PreTrainedModel, size: int, settings: AdaptiveSettings):
        check_model(model)
        self._model, self._size, self._settings = model.eval(), size, settings
        parameters = [weight for weight in model.parameters() if weight.requires_grad]
        matrices, others = [w for w in parameters if w.dim() > 1], [w for w in parameters if w.dim() < 2]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
        fused = parameters[0].device.type in ("cpu", "cuda")
        self._optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.99), fused=fused)
        self._random = random.Random(settings.seed)
        self._read = bytearray()
        # The state before the newest block, and the one that single bytes continue.
        self._block_state = self._state = model.init_state(1)
        self._probabilities = uniform(1)

    def probabilities(self) -> np.ndarray:
        return self._probabilities

    def read(self, tokens: np.ndarray) -> None:
        self._read.append(int(tokens[0]))
        if len(self._read) > 1 and (len(self._read) - 1) % self._settings.stride == 0:
            self._learn()
        # With gradients, because without them the step would be compiled anew after every update.
        with torch.enable_grad():
            output = self._model(torch.tensor([[self._read[-1]]]), state=self._state, use_cache=True)
        self._state = detach_state(output.state)
        self._probabilities = softmax(output.logits.detach()[:, -1])

    def _learn(self) -> None:
        """Learn to predict the last T bytes from those before them, and replayed blocks likewise."""
        stride = self._settings.stride
        begin = len(self._read) - 1 - stride
        earlier = begin // stride
        count = min(self._settings.replays, earlier)
        begins = [begin, *(stride * self._random.randrange(earlier) for _ in range(count))]
        blocks = [torch.frombuffer(self._read, dtype=torch.uint8, count=stride + 1, offset=place) for place in begins]
        rows = torch.stack(blocks).long()
        state = {
            name: torch.cat([tensor, tensor.new_zeros(count, *tensor.shape[1:])])
            for name, tensor in self._block_state.items()
        }
        output = self._model(rows[:, :-1], state=state, use_cache=True)
        F.cross_entropy(upcast(output.logits).flatten(0, 1), rows[:, 1:].flatten()).backward()
        parameters = [weight for group in self._optimizer.param_groups for weight in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._settings.max_grad_norm)
        if bool(norm.isfinite()):
            share = len(self._read) / max(self._size, 1)
            rate = self._settings.learning_rate * (1 - (1 - self._settings.final_rate) * share)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._block_state = {name: tensor[:1].clone() for name, tensor in detach_state(output.state).items()}
        self._state = self._block_state

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": asdict(self._settings),
            "weights": dict(self._model.state_dict()),
            "optimizer": optimizer_state(self._optimizer),
            "random": self._random.getstate(),
            "read": torch.frombuffer(bytearray(self._read), dtype=torch.uint8) if self._read else None,
            "block_state": dict(self._block_state),
            "state": dict(self._state),
            "probabilities": torch.from_numpy(self._probabilities),
        }

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._model.load_state_dict(values["weights"])
        load_optimizer_state(self._optimizer, values["optimizer"])
        self._random.setstate(values["random"])
        self._read = bytearray(b"" if values["read"] is None else values["read"].numpy().tobytes())
        self._block_state, self._state = values["block_state"], values["state"]
        self._probabilities = values["probabilities"].numpy()
