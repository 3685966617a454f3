"""Text byte by byte: BPTT against SMT→DMT at equal steps, sequential operations and time, and sweeps of contexts,
memories, models, updates, training and weights of the losses (SMT, sections 3.3 to 3.6)."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hf_recurrent import Corpus, SmtTeacherModel, uniformity_loss
from papers.engine.experiment import Settings
from papers.engine.pictures import draw_grid, mean_points
from papers.engine.training import split_corpus
from papers.smt.models import BPTT, PAPER_MODEL, SMALL_MODEL, SMT_DMT, TEACHER, Pair, build_pair
from papers.smt.operations import step_operations
from papers.smt.training import MethodComparison, method_values, smt_dmt_operations, train_bptt, train_smt_dmt

EQUAL_STEPS, EQUAL_OPERATIONS, EQUAL_TIME = "equal steps", "equal sequential operations", "equal time"
# As many for both methods; SMT→DMT's second one is DMT's.
RATES = {"small": (1e-3, 3e-3, 1e-2), "paper": (1e-4, 3e-4, 1e-3)}
# Steps of BPTT for each of SMT→DMT in equal time, by the times per step on one CPU core (docs/log.md).
EQUAL_TIME_SHARE = {"small": 0.26, "paper": 0.07}
# Axis → size → values. The paper prints its ranges only in figures.
AXES: dict[str, dict[str, tuple[int, ...]]] = {
    "context Tc": {"small": (4, 32), "paper": (16, 32, 64, 128, 256, 512)},
    "memory tokens": {"small": (1, 8), "paper": (1, 2, 4, 8, 16, 32)},
    "width": {"small": (16, 64), "paper": (64, 128, 256, 512)},
    "layers": {"small": (1, 4), "paper": (2, 4, 8, 16)},
}
_TRAINING: dict[str, Settings] = {
    "small": {
        "sizes": SMALL_MODEL | {"num_readout_layers": 2}, "steps": 400, "dmt_steps": 60,
        "learning_rate": 3e-3, "dmt_learning_rate": 1e-3,
    },
    "paper": {"sizes": PAPER_MODEL, "learning_rate": 3e-4, "dmt_learning_rate": 3e-5},
}  # fmt: skip
BACKBONES = {"Transformer": "transformer", "MLP": "mlp", "GRU": "gru"}
TOKENS = {"small": (1, 2, 4), "paper": (1, 2, 4, 8, 16, 32)}
STEPS = {"small": (100, 200, 400), "paper": (9_375, 18_750, 37_500, 75_000, 150_000)}
DYNAMICS = {"small": (0.01, 0.1, 1.0), "paper": (0.0, 0.01, 0.1, 1.0, 10.0)}
UNIFORMITY = {"small": (0.0, 0.1), "paper": (0.0, 0.0001, 0.001, 0.01, 0.1)}
_MEMORIES = 64


class TextMethods(MethodComparison):
    sizes = {
        "small": {
            "sizes": SMALL_MODEL | {"hidden_size": 64, "num_readout_layers": 4}, "corpus": "python",
            "steps": 500, "dmt_steps": 80, "batch_size": 16,
            "context_length": 32, "future_length": 16, "rollout_length": 32,
            "timesteps": 1, "dmt_timesteps": 8, "eval_windows": 128, "eval_bytes": 20_000,
        },
        "paper": {
            "sizes": PAPER_MODEL, "corpus": "hub:roneneldan/TinyStories",
            "steps": 151_500, "dmt_steps": 1500, "batch_size": 128, "dmt_batch_size": 32,
            "context_length": 256, "future_length": 64, "rollout_length": 256,
            "timesteps": 1, "dmt_timesteps": 16, "eval_windows": 512, "eval_bytes": 1_000_000,
        },
    }  # fmt: skip
    tuning = {
        "small": {"steps": 160, "dmt_steps": 25, "eval_bytes": 10_000},
        "paper": {"steps": 50_500, "dmt_steps": 500},
    }

    def rows(self, size: str) -> list[Settings]:
        shared = self.size_settings(size)
        smt = [{"learning_rate": rate, "dmt_learning_rate": rate / 3} for rate in RATES[size]]
        bptt = {"method": BPTT, "candidates": [{"bptt_learning_rate": rate} for rate in RATES[size]], **shared}
        return [
            {"label": SMT_DMT, "method": SMT_DMT, "candidates": smt, **shared},
            {"label": f"{BPTT}, {EQUAL_OPERATIONS}", **bptt},
            {"label": f"{BPTT}, {EQUAL_TIME}", **bptt, "bptt_share": EQUAL_TIME_SHARE[size]},
            {"label": f"{BPTT}, {EQUAL_STEPS}", **bptt, "bptt_share": 1.0},
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        results, _, _ = train_on_text(settings)
        return {**results, "value": method_values(results, "bits_per_byte")}

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        for part, value in row["value"].items():
            yield row["label"] if part == row["method"] else part, None, value

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        steps = {"optimizer steps": f"{rows[-1].get('bptt_steps', rows[-1]['steps']):,}"}
        seconds = [row["core_seconds"] for row in rows if "core_seconds" in row]
        time = {"core seconds": f"{min(seconds):,.0f}"} if seconds else {}
        return {**super().details(rows), **steps, **time}


def train_on_text(settings: Settings) -> tuple[dict[str, Any], Pair, Corpus]:
    """Train an RNN on a row's `corpus` by its `method`.

    Args:
        settings: a row with settings of training. BPTT has `bptt_share` of the steps of SMT→DMT, or without it as many
            as take its sequential operations.

    Returns:
        Results, (RNN, teacher), held-out text.
    """
    corpus, held_out = split_corpus(settings)
    pair = build_pair(settings["sizes"], corpus.vocab_size, settings["seed"])
    lengths = {key: settings[key] for key in ("context_length", "future_length", "rollout_length")}
    if settings["method"] == SMT_DMT:
        return train_smt_dmt(pair, corpus, held_out, settings, lengths), pair, held_out
    # As many bytes of each sequence as a step of SMT reads.
    block_size = settings["context_length"] + settings["future_length"]
    if "bptt_share" in settings:
        steps = round(settings["steps"] * settings["bptt_share"])
    else:
        steps = smt_dmt_operations(pair, settings, lengths) // step_operations(*pair, BPTT, block_size)
    steps = max(steps, 1)
    results = train_bptt(pair[0], corpus, held_out, {**settings, "steps": steps}, block_size=block_size)
    return {**results, "bptt_steps": steps}, pair, held_out


class Scaling(TextMethods):
    tuning = {}

    def size_settings(self, size: str) -> Settings:
        return super().size_settings(size) | {"method": SMT_DMT} | _TRAINING[size]

    def rows(self, size: str) -> list[Settings]:
        shared = self.size_settings(size)
        return [
            {"label": f"{axis} {value}", "axis": axis, "swept": value, **with_value(shared, axis, value)}
            for axis, values in AXES.items()
            for value in values[size]
        ]

    def points(self, row: Settings) -> Any:
        for kind in (SMT_DMT, TEACHER):
            yield f"{row['label']}, {kind}", None, row["value"][kind]

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        self.draw_sweeps(axes, rows, "axis")


def with_value(settings: Settings, axis: str, value: int) -> Settings:
    """Settings with the value of one axis."""
    if axis == "context Tc":
        return settings | {"context_length": value}
    fields = {"memory tokens": "num_memory_tokens", "width": "hidden_size", "layers": "num_hidden_layers"}
    return settings | {"sizes": settings["sizes"] | {fields[axis]: value}}


class Backbones(TextMethods):
    def rows(self, size: str) -> list[Settings]:
        methods = {f"{BPTT}, {EQUAL_OPERATIONS}", SMT_DMT}
        return [
            {**row, "label": f"{name}: {row['label']}", "sizes": row["sizes"] | {"backbone": backbone}}
            for name, backbone in BACKBONES.items()
            for row in super(Backbones, self).rows(size)
            if row["label"] in methods
        ]

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        backbone = row["label"].partition(": ")[0]
        for label, place, value in super().points(row):
            yield label if label == row["label"] else f"{backbone}: {label}", place, value


class Compression(Scaling):
    def rows(self, size: str) -> list[Settings]:
        shared = self.size_settings(size) | {"dmt_steps": 0}
        return [
            with_value(shared, "memory tokens", tokens) | {"label": f"{tokens} memory tokens", "steps": steps}
            for tokens in TOKENS[size]
            for steps in STEPS[size]
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        results = super().run(settings)
        return {**results, "value": results["value"][TEACHER], "value_of_rnn": results["value"][SMT_DMT]}

    def points(self, row: Settings) -> Any:
        yield row["label"], row["steps"], row["value"]

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        """Contours of equal loss over steps and size of the memory."""
        steps = sorted({row["steps"] for row in rows})
        tokens = sorted({row["sizes"]["num_memory_tokens"] for row in rows})
        if min(len(steps), len(tokens)) < 2:
            TextMethods.draw(self, axes, rows)
            return
        cells = dict(mean_points(((row["sizes"]["num_memory_tokens"], row["steps"]), row["value"]) for row in rows))
        loss = [[cells.get((count, step), np.nan) for step in steps] for count in tokens]
        lines = axes.contour(steps, tokens, loss, levels=8, cmap="viridis")
        axes.clabel(lines, fontsize="small")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set(xlabel="optimizer steps", ylabel="memory tokens", title=self.metric)


class LossWeights(Scaling):
    def rows(self, size: str) -> list[Settings]:
        return [
            {
                **self.size_settings(size),
                "label": f"λ_dyn {dynamics:g}",
                "uniformity": uniformity,
                "smt": {"dynamics_weight": dynamics, "uniformity_weight": uniformity},
            }
            for dynamics in DYNAMICS[size]
            for uniformity in UNIFORMITY[size]
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        results, (_, teacher), held_out = train_on_text(settings)
        uniformity = memory_uniformity(teacher, held_out, settings["context_length"])
        value = method_values(results, "bits_per_byte")[SMT_DMT]
        return {**results, "value": value, "uniformity_loss": uniformity}

    def points(self, row: Settings) -> Any:
        yield row["label"], row["uniformity"], row["value"]

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        """A cell for each pair of weights: bits per byte, and below them the uniformity loss."""
        bits, losses = (
            dict(mean_points(((row["smt"]["dynamics_weight"], row["uniformity"]), row[measure]) for row in rows))
            for measure in ("value", "uniformity_loss")
        )
        draw_grid(
            axes, {place: (bits[place], f"{bits[place]:.3f}\n{losses[place]:.2f}") for place in bits}, cmap="Blues"
        )
        axes.set(xlabel="λ_unif", ylabel="λ_dyn", title=f"{self.metric}, and uniformity loss of the memories")


@torch.no_grad()
def memory_uniformity(teacher: SmtTeacherModel, text: Corpus, context_length: int) -> float:
    """Uniformity loss of the teacher's memories of excerpts of a text."""
    teacher.eval()
    everything = np.concatenate(list(text))
    starts = np.linspace(0, len(everything) - context_length, _MEMORIES).astype(int)
    windows = np.stack([everything[start : start + context_length] for start in starts])
    ids = torch.from_numpy(windows.astype(np.int64)).to(teacher.device)
    return float(uniformity_loss(teacher.encode(ids)[:, None]))
