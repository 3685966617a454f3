"""Memories of two numbers, drawn, on three tasks (SMT, section 3.7)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_recurrent import SmtObjective, SmtRnnForCausalLM, SmtTeacherModel
from papers.engine.experiment import Experiment, Settings
from papers.engine.pictures import pack, split_axes, unpack
from papers.smt.models import SMT_DMT, TEACHER
from papers.smt.tasks import SIZES, train_on_task

TASKS = {
    "small": {
        "retrieval": "retrieval,vocab_size=4,length=8",
        "string copy": "string_copy,vocab_size=3,length=6",
        "stack operations": "stack_operations,vocab_size=3,max_depth=2,length=8",
    },
    "paper": {
        "retrieval": "retrieval,vocab_size=4,length=16",
        "string copy": "string_copy,vocab_size=3,length=12",
        "stack operations": "stack_operations,vocab_size=3,max_depth=4,length=16",
    },
}
_POINT: Settings = {"num_memory_tokens": 1, "memory_size": 2, "memory_norm": False}
# A memory of two numbers takes long training.
_STEPS: Settings = {"steps": 4000, "dmt_steps": 1500}
_DRAWN = 128


class MemorySpace(Experiment):
    def rows(self, size: str) -> list[Settings]:
        shared = SIZES[size] | (_STEPS if size == "small" else {}) | {"timesteps": 0}
        shared["sizes"] = shared["sizes"] | _POINT
        return [{"label": name, "method": SMT_DMT, "task": task, **shared} for name, task in TASKS[size].items()]

    def run(self, settings: Settings) -> dict[str, Any]:
        results, pair, task = train_on_task(settings)
        inputs, _ = task.examples(np.arange(min(_DRAWN, settings["num_tested"])), "validation")
        measured = results["measured"]
        drawn = zip((TEACHER, SMT_DMT), memories_over_time(*pair, inputs), strict=True)
        return {
            **results,
            "value": {SMT_DMT: measured["accuracy"], TEACHER: measured["teacher_accuracy"]},
            "memories": {kind: pack(memories.cpu().numpy()) for kind, memories in drawn},
            "matters": pack(relevant_past(settings["label"], inputs)),
        }

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        rows = [row for row in rows if row["seed"] == rows[0]["seed"]]
        panels = iter(split_axes(axes, len(rows), 2, (9, 4 * len(rows))))
        for row in rows:
            matters = unpack(row["matters"])
            for kind, packed in row["memories"].items():
                memories, panel = unpack(packed).astype(np.float32), next(panels)
                for track in memories[:8]:
                    panel.plot(*track.T, color="lightgray", linewidth=0.7, zorder=0)
                panel.scatter(*memories.reshape(-1, 2).T, c=matters.ravel(), cmap="turbo", s=10)
                panel.set_title(f"{row['label']}, memories of the {'RNN' if kind == SMT_DMT else kind}")


@torch.no_grad()
def memories_over_time(
    rnn: SmtRnnForCausalLM, teacher: SmtTeacherModel, inputs: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """The teacher's and the RNN's memories after every step of examples (B, T), both (B, T, Z·D)."""
    rnn.eval()
    teacher.eval()
    ids = torch.from_numpy(inputs).to(rnn.device)
    count, length = ids.shape
    pair = SmtObjective(rnn, teacher, context_length=length, future_length=1)
    positions = torch.arange(length, device=ids.device).expand(count, -1)
    labels = pair.encode(ids, torch.zeros_like(ids), positions, length)
    resets = torch.zeros_like(ids, dtype=torch.bool)
    own = pair.roll_out(rnn.init_state(count)["memory"], ids, resets)
    return labels.flatten(2).float(), own.flatten(2).float()


def relevant_past(task: str, inputs: np.ndarray) -> np.ndarray:
    """The part of the past that later answers depend on, as a number per step, from and to (B, T)."""
    state = np.zeros_like(inputs)
    if task == "retrieval":
        place = (inputs == 0).argmax(1)[:, None]
        steps = np.arange(inputs.shape[1])
        answer = np.take_along_axis(inputs, place + 1, 1) + 1
        return np.where(steps < place, 0, np.where(steps == place, 1, answer))
    base, held = inputs.max() + 1, np.zeros(len(inputs), dtype=inputs.dtype)
    for step, token in enumerate(inputs.T):
        held = np.where(token == 0, held // base, held * base + token)
        state[:, step] = held
    return state
