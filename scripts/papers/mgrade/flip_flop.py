"""The flip-flop language: mGRADE with short and long delays against TCNs (mGRADE, section 4.2, figure 3)."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM

from hf_recurrent import FlipFlop, MgradeConfig
from papers.engine.experiment import Experiment, Settings
from papers.engine.supervised import train_supervised
from papers.engine.training import new_model

# Section 4: one layer without MLP and LayerNorm. The taps are first spread evenly up to the longest delay.
_SINGLE_LAYER = {"num_hidden_layers": 1, "spacing": "learned", "mlp_layers": 0, "layer_norm": False}
# Without MLP a TCN would be linear as a whole.
_TCN = {"num_hidden_layers": 5, "spacing": "exponential", "recurrent_unit": None}
# Left out of the small size: the other TCN sees more.
_SHORT_VIEW = "TCN-EID, base dilation 1"
# Label → fields of the configuration. The paper prints no number of taps. Base dilation 8, with which 4 taps see all
# of 512 steps, is no baseline: it does not learn the training task (docs/log.md).
MODELS: dict[str, Settings] = {
    "mGRADE-L, delays up to 2": _SINGLE_LAYER | {"conv_kernel": 3, "receptive_field": 2, "dilation": 1},
    "mGRADE-L, delays up to 64": _SINGLE_LAYER | {"conv_kernel": 8, "receptive_field": 64, "dilation": 9},
    _SHORT_VIEW: _TCN | {"conv_kernel": 4, "dilation": 1},
    "TCN-EID, base dilation 1, whole sequence in view": _TCN | {"conv_kernel": 18, "dilation": 1},
}
# TCNs need these instead to learn the training task.
_TCN_TRAINING: dict[str, Settings] = {"small": {"steps": 5000, "learning_rate": 2e-3}, "paper": {}}
# Instructions from a read back to its write, on average → share of instructions that are ignored.
DISTANCES = {"10": 0.8, "100": 0.98}


class FlipFlopDistances(Experiment):
    lines = {label: {"options": options} for label, options in MODELS.items()}
    shared = {"hidden_size": 32, "length": 512}
    sizes = {
        "small": {"steps": 1500, "batch_size": 16, "learning_rate": 2e-2, "num_tested": 2000},
        "paper": {"steps": 20_000, "batch_size": 32, "learning_rate": 4e-3, "num_tested": 10_000},
    }

    def rows(self, size: str) -> list[Settings]:
        rows = [row for row in super().rows(size) if size == "paper" or row["label"] != _SHORT_VIEW]
        return [row | _TCN_TRAINING[size] if row["label"].startswith("TCN") else row for row in rows]

    def run(self, settings: Settings) -> dict[str, Any]:
        seed, length = settings["seed"], settings["length"]
        tasks = {distance: FlipFlop(length=length, p_ignore=p, seed=seed) for distance, p in DISTANCES.items()}
        options = {"vocab_size": tasks["10"].vocab_size, "hidden_size": settings["hidden_size"], **settings["options"]}
        model = new_model(AutoModelForCausalLM, MgradeConfig(**options), seed)
        data = PredictionSets(tasks["10"], settings["steps"] * settings["batch_size"])
        results = train_supervised(model, data, settings, warmup_share=0.1, loss=set_loss)
        reads, sets = {}, {}
        for distance, task in tasks.items():
            reads[distance], sets[distance] = measure(model, task, settings["num_tested"])
        return {**results, "value": reads, "right_sets": sets}

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        right = statistics.fmean(row["right_sets"]["100"] for row in rows)
        return {**super().details(rows), "whole sets at distance 100, %": f"{right * 100:.2f}"}


class PredictionSets(Dataset):
    """Strings of the language, with the set of possible next symbols at each step (definition 2).

    Items are `input_ids` (T,) and `labels` (T, 5) float32, 1 where a symbol is possible.
    """

    def __init__(self, task: Any, num_examples: int) -> None:
        self.task, self.num_examples = task, num_examples

    def __len__(self) -> int:
        return self.num_examples

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        """A whole batch, generated at once; the DataLoader calls this where it exists."""
        inputs, _ = self.task.examples(np.asarray(indices))
        sets = torch.from_numpy(possible_next(inputs)).float()
        return [
            {"input_ids": ids, "labels": labels} for ids, labels in zip(torch.from_numpy(inputs), sets, strict=True)
        ]


def possible_next(input_ids: np.ndarray) -> np.ndarray:
    """The set of symbols that can follow each step: any instruction after a bit, both bits after w and i, only the
    remembered bit after r. (B, T) → (B, T, 5) bool."""
    instructions = input_ids[:, 0::2]
    last_write = np.maximum.accumulate(np.where(instructions == 2, np.arange(instructions.shape[1]), 0), axis=1)
    remembered = np.take_along_axis(input_ids[:, 1::2], last_write, axis=1)
    possible = np.zeros((*input_ids.shape, 5), dtype=bool)
    possible[:, 1::2, 2:] = True
    possible[:, 0::2, :2] = (instructions != 3)[..., None] | (remembered[..., None] == np.arange(2))
    return possible


def set_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Binary cross-entropy of the five outputs of each step against its set.

    The paper reports the mean squared error. As a loss it gets stuck where the sigmoids of both bits are saturated,
    before anything is remembered.
    """
    return torch.nn.functional.binary_cross_entropy_with_logits(outputs.logits.float(), labels)


@torch.no_grad()
def measure(model: Any, task: Any, num_examples: int, batch_size: int = 100) -> tuple[float, float]:
    """Share of reads whose remembered bit has the largest logit, and share of steps in which exactly the possible
    symbols have positive logits."""
    model.eval()
    right_reads = reads = right_sets = steps = 0
    for first in range(0, num_examples, batch_size):
        indices = np.arange(first, min(first + batch_size, num_examples))
        inputs, targets = task.examples(indices, "test")
        possible = torch.from_numpy(possible_next(inputs))
        targets = torch.from_numpy(targets)
        logits = model(input_ids=torch.from_numpy(inputs).to(model.device), use_cache=False).logits.cpu()
        asked = targets >= 0
        right_reads += int((logits.argmax(-1) == targets)[asked].sum())
        reads += int(asked.sum())
        right_sets += int(((logits > 0) == possible).all(-1).sum())
        steps += asked.numel()
    return right_reads / reads, right_sets / steps
