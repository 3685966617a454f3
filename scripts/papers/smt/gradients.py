"""Gradients of the memories over time, in BPTT and in SMT, by initialisation (SMT, section 3.7)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_recurrent import Retrieval, SmtObjective, SmtRnnForCausalLM, SmtTeacherModel
from papers.engine.experiment import Experiment, Settings
from papers.engine.pictures import mean_points, split_axes
from papers.engine.training import measured_run
from papers.smt.models import BPTT, PAPER_MODEL, SMALL_MODEL, SMT, build_pair, memories_of

# Factors of all linear maps after their initialisation.
GAINS = (0.5, 1.0, 2.0, 4.0)
# The paper's: with fewer tokens and layers of the readout the last step would be an outlier.
_DEPTH: Settings = {key: PAPER_MODEL[key] for key in ("num_memory_tokens", "num_readout_layers")}
SIZES: dict[str, Settings] = {
    "small": {"sizes": SMALL_MODEL | _DEPTH, "length": 128, "batch_size": 16},
    "paper": {"sizes": PAPER_MODEL, "length": 128, "batch_size": 32},
}


class GradientNorms(Experiment):
    def rows(self, size: str) -> list[Settings]:
        return [
            {"label": method, "x": gain, "vocab_size": 16, **SIZES[size]} for method in (BPTT, SMT) for gain in GAINS
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        task = Retrieval(**{key: settings[key] for key in ("length", "vocab_size", "seed")})
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with measured_run() as record:
            rnn, teacher = build_pair(settings["sizes"], task.vocab_size, settings["seed"])
            for model in (rnn, teacher):
                scale_maps(model.to(device, torch.float64), settings["x"])  # explosions leave the range of float32
            examples = task.examples(np.arange(settings["batch_size"]))
            inputs, targets = (torch.from_numpy(part).to(device) for part in examples)
            bptt = settings["label"] == BPTT
            norms = bptt_norms(rnn, inputs, targets) if bptt else smt_norms(rnn, teacher, inputs, targets)
        return {
            "value": (norms.max() / norms.min()).item(),
            "norms": [float(f"{norm:.4g}") for norm in norms.tolist()],
            "num_parameters": rnn.num_parameters(),
            **record,
        }

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        """The last memory is the one that the loss at the last step reads: the others are compared without it."""
        ratios = mean_points((row["x"], max(row["norms"][:-1]) / min(row["norms"][:-1])) for row in rows)
        return {**super().details(rows), "without the last memory": ", ".join(f"{ratio:.1e}" for _, ratio in ratios)}

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        first_seed = [row for row in rows if row["seed"] == rows[0]["seed"]]
        for panel, method in zip(split_axes(axes, 1, 2, (10, 4.5)), (BPTT, SMT), strict=True):
            for row in first_seed:
                if row["label"] == method:
                    norms = np.array(row["norms"])
                    panel.semilogy(norms / norms[-1], label=f"gain {row['x']:g}")
            panel.set(title=method, xlabel="t", ylabel="gradient norm of the memory, relative to the last")
            panel.legend(fontsize="small")


@torch.no_grad()
def scale_maps(model: torch.nn.Module, gain: float) -> None:
    """Multiply the weights of all linear maps except the head."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):
            module.weight.mul_(gain)


def bptt_norms(rnn: SmtRnnForCausalLM, inputs: Tensor, targets: Tensor) -> Tensor:
    """‖∂L/∂m_t‖ (T,) of the loss of an unrolled RNN, computed per example and averaged.

    Args:
        inputs, targets: (B, T), targets -100 where there is none.
    """
    memories = list(memories_of(rnn, inputs))
    for memory in memories:
        memory.retain_grad()
    asked = targets.ne(-100)
    logits = rnn.readout(torch.stack(memories, 1)[asked])
    torch.nn.functional.cross_entropy(logits, targets[asked], reduction="sum").backward()
    return torch.stack([_norm(memory.grad) for memory in memories])


def smt_norms(rnn: SmtRnnForCausalLM, teacher: SmtTeacherModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """‖∂L/∂m_t‖ (T,) of the SMT loss at all timesteps, mean over examples; arguments as for [`bptt_norms`]."""

    class Watched(SmtObjective):
        def encode(self, *args: Any) -> Tensor:
            self.memory = super().encode(*args)
            self.memory.retain_grad()
            return self.memory

    count, length = inputs.shape
    objective = Watched(rnn, teacher, context_length=length, future_length=length)
    resets = torch.zeros_like(inputs, dtype=torch.bool)
    resets[:, 0] = True
    anchors = torch.arange(length, device=inputs.device).expand(count, -1)
    objective(inputs, targets, resets, anchors).total.backward()
    return _norm(objective.memory.grad)


def _norm(gradient: Tensor) -> Tensor:
    """Mean over the batch of the norms of memories (B, …, Z, D), (…)."""
    return gradient.flatten(-2).norm(dim=-1).mean(0)
