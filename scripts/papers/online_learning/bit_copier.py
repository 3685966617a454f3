"""The copy task of the online-learning paper: a model that reads and predicts bits, and its examples."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from hf_recurrent import Copying, LruConfig, LruModel, SequenceRule
from papers.engine.experiment import Settings
from papers.engine.supervised import Wrapper, train_supervised

# Appendix B names no clipping of gradients; S5's code, on which it is based, has none.
WITHOUT_CLIPPING: Settings = {"max_grad_norm": 0.0}


class CopiedBits(Dataset):
    """Examples of 7-bit patterns to copy: `input_values` (T, 8), of which the last is the marker, `labels` (T, 7).

    Args:
        num_tokens: patterns in a sequence.
        num_examples: number of sequences.
        seed: of the sequences.
        split: "train", "validation" or "test"; splits share nothing.
    """

    delay, num_symbols = 7, 128

    def __init__(self, num_tokens: int, num_examples: int, seed: int, split: str = "train"):
        task = Copying(num_tokens=num_tokens, delay=self.delay, num_symbols=self.num_symbols, seed=seed)
        ids, targets = task.examples(np.arange(num_examples), split)
        marker = ids == task.num_symbols + 1
        inputs = np.concatenate([_bits(np.where(marker, 0, ids)), marker[..., None]], axis=-1)
        self.inputs, self.bits = torch.from_numpy(inputs).float(), torch.from_numpy(_bits(targets))
        self.num_tokens = num_tokens

    def drop_silent_starts(self) -> None:
        """Drop the sequences whose first pattern has no bit.

        Their first input is zero, and so is each layer's output until the first bit; the next layer's norm divides by
        the root of its epsilon there, and the true gradient of a bias is hundreds of times any other.
        """
        has_bit = self.inputs[:, 0].any(dim=-1)
        self.inputs, self.bits = self.inputs[has_bit], self.bits[has_bit]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_values": self.inputs[index], "labels": self.bits[index]}

    def loss(self, logits: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        """Nats per bit over the steps that have to repeat the patterns, from logits (B, T, 2, 7)."""
        asked = slice(-self.num_tokens, None)
        return nn.functional.cross_entropy(logits[:, asked].flatten(0, 1), bits[:, asked].flatten(0, 1))


def _bits(ids: np.ndarray) -> np.ndarray:
    """The 7 bits of each symbol, the most significant first, 0 where there is none: (B, T) → (B, T, 7)."""
    return np.maximum(ids - 1, 0)[..., None] >> np.arange(6, -1, -1) & 1


class BitCopier(Wrapper):
    """A model that reads 8 numbers per step and predicts two logits for each of 7 bits.

    Args:
        fields: fields of [`LruConfig`].
        rule: learning rule, see [`SequenceRule`].
        readout: width of a hidden layer before the decoder; 0 for none.
    """

    def __init__(self, fields: dict[str, Any], rule: str, readout: int = 0):
        super().__init__()
        self.backbone = LruModel(LruConfig(input_size=8, **fields))
        width = self.backbone.config.hidden_size
        self.readout = nn.Sequential(nn.Linear(width, readout), nn.ReLU()) if readout else nn.Identity()
        self.decoder = nn.Linear(readout or width, 2 * 7)
        self.rule = SequenceRule(rule, self.backbone)

    def forward(self, input_values: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Map inputs (B, T, 8) to logits (B, T, 2, 7), whose backward pass computes the rule's gradient.

        `labels` is unused; the Trainer drops columns of the dataset that are not arguments.
        """
        with self.rule.block():
            hidden = self.backbone(input_values=input_values, use_cache=False).last_hidden_state
        return self.decoder(self.readout(hidden)).unflatten(-1, (2, 7))


def train_bit_copier(
    model: BitCopier, data: CopiedBits, settings: Settings, losses: list[torch.Tensor] | None = None
) -> dict[str, Any]:
    """Train by a row's settings, see [`train_supervised`], without weight decay and, unless it has a `warmup_share`,
    without warm-up.

    Args:
        losses: gets the loss of every step.
    """

    def loss(logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        value = data.loss(logits, labels)
        if losses is not None:
            losses.append(value.detach())
        return value

    return train_supervised(
        model, data, settings, warmup_share=settings.get("warmup_share", 0.0), weight_decay=0.0, loss=loss
    )


def layer_cosines(model: BitCopier, data: CopiedBits) -> list[float]:
    """Cosine between the gradient of the model's rule and the true one, for each layer.

    A layer's norm is left out: it is applied before the recurrent unit, where no rule is exact.
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
