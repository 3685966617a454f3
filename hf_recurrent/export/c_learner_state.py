"""The file of a learner in C, written from an `OnlineLearner` and read into one."""

import zlib
from typing import Any

import numpy as np
import torch

from hf_recurrent.export.c_learner_plan import FILE_VERSION, HEADER_BYTES, SAVED_MAGIC, LearnerPlan, LearnerSetting
from hf_recurrent.learning_rules.compiled_block import CompiledBlock
from hf_recurrent.learning_rules.compiled_program import Uncompilable
from hf_recurrent.learning_rules.rules import build_learning_rule

_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "rmsprop": ("square_avg",)}


def save_c_state(learner: Any) -> bytes:
    """The file that `NAME_load` of the exported learner reads: an [`OnlineLearner`]'s weights, state and optimizer.

    Raises:
        ValueError: the learner is not one of rule "rtrl" and stride 1, or is not supported in C.
    """
    plan = _plan(learner)
    learner.step.learning.write_steps()
    states = [learner.step.optimizer.state.get(plan.parameters[name], {}) for name in plan.trained]
    parts = [plan.parameters[name].detach() for name in plan.names]
    for moment in _MOMENTS[plan.kind]:
        parts += [
            state.get(moment, torch.zeros_like(plan.parameters[name]))
            for name, state in zip(plan.trained, states, strict=True)
        ]
    stream = learner.stream
    last, begins = stream.last or (-1, True)
    # In C, the state is zero as soon as an episode begins.
    of_fields = {f"state {name}": part for name, part in stream.state.items()}
    of_fields |= {f"carried {name}": part for name, part in stream.carried.items()}
    parts += [of_fields[name] * (not begins) for name in plan.fields]
    values = torch.cat([part.reshape(-1) for part in parts]).numpy().astype("<f4").tobytes()
    numbers = np.array([learner.updates, learner.bytes_read % (1 << 32), last % (1 << 32)], dtype="<u4").tobytes()
    return plan.file(SAVED_MAGIC, values + numbers)


def load_c_state(learner: Any, content: bytes) -> None:
    """Continue in an [`OnlineLearner`] from what `NAME_save` of the exported learner wrote.

    Raises:
        ValueError: the content is damaged or of another model or optimizer, or the learner is not supported; it is
            unchanged then.
    """
    plan = _plan(learner)
    payload = _checked(content, plan)
    values = torch.from_numpy(np.frombuffer(payload[:-12], dtype="<f4").astype(np.float32))
    updates, bytes_read, last = np.frombuffer(payload[-12:], dtype="<i4").tolist()
    parts = iter(values.split(_sizes(plan)))
    with torch.no_grad():
        for name in plan.names:
            plan.parameters[name].copy_(next(parts).view_as(plan.parameters[name]))
    states = {plan.parameters[name]: {"step": torch.tensor(float(updates))} for name in plan.trained}
    for moment in _MOMENTS[plan.kind]:
        for name in plan.trained:
            states[plan.parameters[name]][moment] = next(parts).view_as(plan.parameters[name]).clone()
    tensors = {name: next(parts) for name in plan.fields}
    for part, own in (("state", learner.stream.state), ("carried", learner.stream.carried)):
        for name, tensor in own.items():
            tensor.copy_(tensors[f"{part} {name}"].view_as(tensor))
    saved = learner.step.saved_values()["optimizer"]
    order = [parameter for group in learner.step.optimizer.param_groups for parameter in group["params"]]
    saved["state"] = {number: states[one] for number, one in enumerate(order) if one in states} if updates else {}
    learner.step.restore({"optimizer": saved, "summed": (0, 0), "gradients": {}})
    learner.step.updates, learner.bytes_read = updates, bytes_read % (1 << 32)
    learner.stream.last, learner.stream.waiting = (None if last < 0 else (last, False)), []


def _plan(learner: Any) -> LearnerPlan:
    settings = learner.settings
    if not settings.learn or (settings.rule, settings.stride, settings.update_every) != ("rtrl", 1, 1):
        raise ValueError("`learner` must learn by the rule 'rtrl' with stride 1, as a learner in C does.")
    if learner.stream.waiting:
        raise ValueError("`learner` has bytes that wait to be learned.")
    try:
        block = CompiledBlock(build_learning_rule("rtrl", learner.model), 1, 1, resets=False)
        return LearnerPlan(block, LearnerSetting(learner.step.optimizer, settings.max_grad_norm))
    except Uncompilable as error:
        raise ValueError(f"`learner` is not supported in C: {error}.") from error


def _sizes(plan: LearnerPlan) -> list[int]:
    trained = [plan.parameters[name].numel() for name in plan.trained]
    weights = [plan.parameters[name].numel() for name in plan.names]
    return [*weights, *trained * plan.num_moments, *(size for _, size in plan.fields.values())]


def _checked(content: bytes, plan: LearnerPlan) -> bytes:
    size = 4 * plan.saved_words
    expected = (SAVED_MAGIC, FILE_VERSION, size, plan.checksum)
    words = [int.from_bytes(content[at : at + 4], "little") for at in range(0, HEADER_BYTES, 4)]
    payload = content[HEADER_BYTES:]
    if tuple(words[:4]) != expected or len(payload) != size:
        raise ValueError("`content` was not saved by a learner in C of this model and optimizer.")
    if zlib.crc32(payload) != words[4]:
        raise ValueError("`content` is damaged: its checksum differs.")
    if not -1 <= int.from_bytes(payload[-4:], "little", signed=True) < plan.vocab_size:
        raise ValueError("`content` is damaged: its last token is not in the vocabulary.")
    return payload
