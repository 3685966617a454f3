"""The flip-flop language: mGRADE with short and long delays against TCNs (mGRADE, section 4.2, figure 3)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from hf_recurrent.reproduce.experiment import Experiment, Settings

# Section 4: one layer without MLP and LayerNorm. At first the taps are spread evenly up to the longest delay.
_SINGLE_LAYER = {"num_hidden_layers": 1, "spacing": "learned", "mlp_layers": 0, "layer_norm": False}
# A TCN without MLP would be linear as a whole, so this one keeps what mGRADE leaves out.
_TCN = {"num_hidden_layers": 5, "spacing": "exponential", "recurrent_unit": None}
# Label → fields of the configuration. The paper prints no number of taps; 4 with base dilation 8 see all of 512 steps.
MODELS: dict[str, Settings] = {
    "mGRADE-L, delays up to 2": _SINGLE_LAYER | {"conv_kernel": 3, "receptive_field": 2, "dilation": 1},
    "mGRADE-L, delays up to 64": _SINGLE_LAYER | {"conv_kernel": 8, "receptive_field": 64, "dilation": 9},
    "TCN-EID, base dilation 1": _TCN | {"conv_kernel": 4, "dilation": 1},
    "TCN-EID, base dilation 8": _TCN | {"conv_kernel": 4, "dilation": 8},
    "TCN-EID, base dilation 1, whole sequence in view": _TCN | {"conv_kernel": 18, "dilation": 1},
}
SIZES: dict[str, Settings] = {
    "small": {"steps": 1500, "batch_size": 16, "learning_rate": 2e-2, "num_tested": 2000},
    "paper": {"steps": 20_000, "batch_size": 32, "learning_rate": 4e-3, "num_tested": 10_000},
}
# What TCNs need instead to learn what they are shown.
_TCN_TRAINING: dict[str, Settings] = {"small": {"steps": 5000, "learning_rate": 2e-3}, "paper": {}}
# Instructions from a read back to its write, on average → share of instructions that are ignored.
DISTANCES = {"10": 0.8, "100": 0.98}


class FlipFlopDistances(Experiment):
    name = "flip-flop"
    source = "mGRADE, Figure 3"
    claim = (
        "Trained where the last write lies 10 instructions back on average, one layer of mGRADE still reads the bit "
        "when it lies 100 back, whatever its longest delay; TCNs do not, even with the whole sequence in view."
    )
    metric = "accuracy at reads"
    x_label = "distance"
    logarithmic = True
    percent = True

    def rows(self, size: str) -> list[Settings]:
        return [
            {
                "label": label,
                "options": options,
                "hidden_size": 32,
                "length": 512,
                **SIZES[size],
                **(_TCN_TRAINING[size] if label.startswith("TCN") else {}),
            }
            for label, options in MODELS.items()
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        from transformers import AutoModelForCausalLM

        from hf_recurrent import FlipFlop, MgradeConfig
        from hf_recurrent.reproduce.supervised import build_supervised, train_supervised

        seed, steps, batch_size = settings["seed"], settings["steps"], settings["batch_size"]
        task = FlipFlop(length=settings["length"], p_ignore=DISTANCES["10"], seed=seed)
        options = {"vocab_size": task.vocab_size, "hidden_size": settings["hidden_size"], **settings["options"]}
        model = build_supervised(AutoModelForCausalLM, MgradeConfig(**options), seed)
        results = train_supervised(
            model,
            PredictionSets(task, steps * batch_size),
            steps=steps,
            batch_size=batch_size,
            learning_rate=settings["learning_rate"],
            warmup_share=0.1,
            seed=seed,
            loss=set_loss,
        )
        measured = {
            distance: measure(
                model, FlipFlop(length=settings["length"], p_ignore=p_ignore, seed=seed), settings["num_tested"]
            )
            for distance, p_ignore in DISTANCES.items()
        }
        return {
            **results,
            "value": {distance: reads for distance, (reads, _) in measured.items()},
            "right_sets": {distance: sets for distance, (_, sets) in measured.items()},
        }

    def line_style(self, label: str) -> dict[str, Any]:
        return {"linestyle": "-" if label.startswith("mGRADE") else ":"}

    def note(self, rows: Sequence[Settings]) -> str:
        row = rows[0]
        others = {(other["steps"], other["learning_rate"]) for other in rows}
        others.discard((row["steps"], row["learning_rate"]))
        tcn = "".join(f" ({steps:,} steps at {rate:g} for TCNs)" for steps, rate in others)
        sets = {row["label"]: f"{row['right_sets']['100'] * 100:.2f}" for row in rows}
        return (
            f"Width {row['hidden_size']}; {row['steps']:,} steps of {row['batch_size']} strings of {row['length']} "
            "symbols with p = 0.8, binary cross-entropy of the sets of possible next symbols, learning "
            f"rate {row['learning_rate']:g} with warm-up and cosine{tcn}; {row['num_tested']:,} strings with p = 0.8 "
            "and with p = 0.98 to judge. mGRADE has one layer, without MLP and LayerNorm as in section 4; TCNs have "
            "five with both, because they would be linear without. With base dilation 8 every delay is a multiple of "
            "8, so that no output sees a bit together with the instruction before it. Steps whose whole set is right "
            "at distance 100, per cent, last seed: "
            + "; ".join(f"{label} {share}" for label, share in sets.items())
            + "."
        )


class PredictionSets(Dataset):
    """Strings of the language, each step with the set of symbols that may come next (definition 2).

    Items are `input_ids` (T,) and `labels` (T, 5) float32, 1 where a symbol is possible.
    """

    def __init__(self, task: Any, num_examples: int) -> None:
        self.task, self.num_examples = task, num_examples

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        """A whole batch at once, which is what a DataLoader asks for; generating is vectorised."""
        inputs, _ = self.task.examples(np.asarray(indices))
        sets = torch.from_numpy(self.task.possible_next(inputs)).float()
        return [
            {"input_ids": ids, "labels": labels} for ids, labels in zip(torch.from_numpy(inputs), sets, strict=True)
        ]


def set_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Binary cross-entropy of the five outputs of each step against its set.

    The paper shows the mean squared error. As a loss it stops where the sigmoids of both bits are saturated, before
    anything is remembered; this one goes on.
    """
    return torch.nn.functional.binary_cross_entropy_with_logits(outputs.logits.float(), labels)


@torch.no_grad()
def measure(model: Any, task: Any, num_examples: int, batch_size: int = 100) -> tuple[float, float]:
    """Share of reads where the remembered bit has the largest output, and of steps where exactly the possible symbols
    have a positive one."""
    model.eval()
    right_reads = reads = right_sets = steps = 0
    for first in range(0, num_examples, batch_size):
        indices = np.arange(first, min(first + batch_size, num_examples))
        inputs, targets = task.examples(indices, "test")
        possible = torch.from_numpy(task.possible_next(inputs))
        targets = torch.from_numpy(targets)
        logits = model(input_ids=torch.from_numpy(inputs).to(model.device), use_cache=False).logits.cpu()
        asked = targets >= 0
        right_reads += int((logits.argmax(-1) == targets)[asked].sum())
        reads += int(asked.sum())
        right_sets += int(((logits > 0) == possible).all(-1).sum())
        steps += asked.numel()
    return right_reads / reads, right_sets / steps


EXPERIMENT = FlipFlopDistances()
