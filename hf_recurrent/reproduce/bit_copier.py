"""The copy task as the online-learning paper has it: a model that reads and predicts bits, and its examples."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from hf_recurrent import Copying, LruConfig, LruModel, SequenceRule
from hf_recurrent.reproduce.supervised import train_supervised


class CopiedBits(Dataset):
    """Examples of 7-bit patterns to copy: `input_values` (T, 8), the last one the marker, and `labels` (T, 7).

    Args:
        num_tokens: patterns in a sequence.
        num_examples: sequences.
        seed: decides which.
        split: "train", "validation" or "test"; splits share nothing.
    """

    delay, num_symbols = 7, 128

    def __init__(self, num_tokens: int, num_examples: int, seed: int, split: str = "train"):
        task = Copying(num_tokens=num_tokens, delay=self.delay, num_symbols=self.num_symbols, seed=seed)
        inputs, bits, asked = task.bit_examples(np.arange(num_examples), split)
        self.num_tokens = int(asked[0].sum())
        self.inputs, self.bits = torch.from_numpy(inputs), torch.from_numpy(bits).long()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_values": self.inputs[index], "labels": self.bits[index]}

    def loss(self, logits: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        """Nats a bit where the patterns are asked for, from logits (B, T, 2, 7)."""
        asked = slice(-self.num_tokens, None)
        return nn.functional.cross_entropy(logits[:, asked].flatten(0, 1), bits[:, asked].flatten(0, 1))


class BitCopier(nn.Module):
    """An LRU model, or one of its paper's other layers, between 8 numbers and two logits for each of 7 bits.

    Args:
        fields: fields of [`LruConfig`].
        rule: by which it learns, see [`SequenceRule`].
        readout: width of a hidden layer in front of the decoder; 0 for none.
    """

    def __init__(self, fields: dict[str, Any], rule: str, readout: int = 0):
        super().__init__()
        self.backbone = LruModel(LruConfig(input_size=8, **fields))
        width = self.backbone.config.hidden_size
        self.readout = nn.Sequential(nn.Linear(width, readout), nn.ReLU()) if readout else nn.Identity()
        self.decoder = nn.Linear(readout or width, 2 * 7)
        self.rule = SequenceRule(rule, self.backbone)

    def forward(self, input_values: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (B, T, 2, 7); what is backpropagated from them is the rule's gradient.

        `labels` is there for the Trainer, which drops columns that no argument is named after.
        """
        with self.rule.block():
            hidden = self.backbone(input_values=input_values, use_cache=False).last_hidden_state
        return self.decoder(self.readout(hidden)).unflatten(-1, (2, 7))

    def parameters_without_weight_decay(self) -> set[str]:
        """Those of the backbone, by their names here."""
        return {f"backbone.{name}" for name in self.backbone.parameters_without_weight_decay()}

    def parameter_learning_rate_factors(self) -> dict[str, float]:
        """Those of the backbone, by their names here."""
        factors = self.backbone.parameter_learning_rate_factors()
        return {f"backbone.{name}": factor for name, factor in factors.items()}


def train_bit_copier(
    model: BitCopier, data: CopiedBits, settings: dict[str, Any], loss: Callable[..., torch.Tensor]
) -> dict[str, Any]:
    """Train by a row's `steps`, `batch_size`, `learning_rate` and `seed`, without warm-up and weight decay."""
    return train_supervised(
        model,
        data,
        steps=settings["steps"],
        batch_size=settings["batch_size"],
        learning_rate=settings["learning_rate"],
        warmup_share=0.0,
        weight_decay=0.0,
        seed=settings["seed"],
        loss=loss,
    )


def layer_cosines(model: BitCopier, data: CopiedBits) -> list[float]:
    """Cosine, layer by layer, of the angle between the gradient of the model's rule and the true one.

    A layer's norm is left out: it stands before the recurrent unit, where no rule is exact.
    """
    device = next(model.parameters()).device
    inputs, bits = data.inputs.to(device), data.bits.to(device)
    names, parameters = zip(*model.named_parameters(), strict=True)
    layers = model.backbone.config.num_hidden_layers
    rule, learned = model.rule, []
    model.eval()
    try:
        for used in (rule, SequenceRule("bptt", model.backbone)):
            model.rule = used
            loss = data.loss(model(inputs), bits)
            gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
            learned.append([_of_layer(gradients, f"backbone.layers.{layer}.") for layer in range(layers)])
    finally:
        model.rule = rule
    return [nn.functional.cosine_similarity(*pair, dim=0).item() for pair in zip(*learned, strict=True)]


def _of_layer(gradients: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    return torch.cat(
        [g.flatten() for name, g in gradients.items() if name.startswith(prefix) and ".norm." not in name]
    )
