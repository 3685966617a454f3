"""The file of a learner in C, written from an `OnlineLearner` or a `VectorLearner`, and read into one."""

import zlib
from typing import Any

import numpy as np
import torch

from hf_recurrent.export.c_learner_plan import FILE_VERSION, HEADER_BYTES, SAVED_MAGIC, LearnerPlan, learner_setting
from hf_recurrent.export.vector_block import VectorBlock, vector_plan
from hf_recurrent.learning_rules.compiled_block import CompiledBlock
from hf_recurrent.learning_rules.compiled_program import Uncompilable
from hf_recurrent.learning_rules.rules import build_learning_rule
from hf_recurrent.online.learner import OnlineLearner
from hf_recurrent.online.vector_learner import VectorLearner

_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "rmsprop": ("square_avg",), "sgd": ()}
_LARGEST_COUNT = (1 << 32) - 1


def save_c_state(learner: OnlineLearner | VectorLearner) -> bytes:
    """The file that `NAME_load` of the exported learner reads: weights, state and optimizer of a learner.

    Raises:
        ValueError: the learner is not one of rule "rtrl" and stride 1, or is not supported in C.
    """
    plan = _plan(learner)
    if isinstance(learner, VectorLearner):
        optimizer, state, carried, begins = learner.optimizer, learner.state, learner.carried, learner.last is None
        read, last = min(learner.vectors_read, _LARGEST_COUNT), int(not begins)
        scales = [learner.mean, learner.variance, learner.errors, torch.zeros_like(learner.mean)]
        scales[3] = scales[3] if begins else learner.last
    else:
        learner.step.learning.write_steps()
        optimizer, state, carried = learner.step.optimizer, learner.stream.state, learner.stream.carried
        last, begins = learner.stream.last or (-1, True)
        read, scales = learner.bytes_read % (1 << 32), []
    states = [optimizer.state.get(plan.parameters[name], {}) for name in plan.trained]
    parts = [plan.parameters[name].detach() for name in plan.names]
    for moment in _MOMENTS[plan.kind]:
        parts += [
            of_one.get(moment, torch.zeros_like(plan.parameters[name]))
            for name, of_one in zip(plan.trained, states, strict=True)
        ]
    # In C, the state is zero as soon as an episode begins.
    of_fields = {f"state {name}": part for name, part in state.items()}
    of_fields |= {f"carried {name}": part for name, part in carried.items()}
    parts += [of_fields[name] * (not begins) for name in plan.fields]
    values = torch.cat([part.reshape(-1) for part in (*parts, *scales)]).numpy().astype("<f4").tobytes()
    numbers = np.array([min(learner.updates, _LARGEST_COUNT), read, last % (1 << 32)], dtype="<u4").tobytes()
    return plan.file(SAVED_MAGIC, values + numbers)


def load_c_state(learner: OnlineLearner | VectorLearner, content: bytes) -> None:
    """Continue in a learner from what `NAME_save` of the exported learner wrote.

    Raises:
        ValueError: the content is damaged or of another model or optimizer, or the learner is not supported; it is
            unchanged then.
    """
    plan = _plan(learner)
    allowed = (0, 1) if isinstance(learner, VectorLearner) else (-1, learner.model.config.vocab_size - 1)
    payload = _checked(content, plan, allowed)
    values = torch.from_numpy(np.frombuffer(payload[:-12], dtype="<f4").astype(np.float32))
    updates, read = np.frombuffer(payload[-12:-4], dtype="<u4").tolist()
    last = int.from_bytes(payload[-4:], "little", signed=True)
    parts = iter(values.split(_sizes(plan)))
    with torch.no_grad():
        for name in plan.names:
            plan.parameters[name].copy_(next(parts).view_as(plan.parameters[name]))
    trained = plan.trained if plan.moments else []
    states = {plan.parameters[name]: {"step": torch.tensor(float(updates))} for name in trained}
    for moment in _MOMENTS[plan.kind]:
        for name in plan.trained:
            states[plan.parameters[name]][moment] = next(parts).view_as(plan.parameters[name]).clone()
    tensors = {name: next(parts) for name in plan.fields}
    stream = learner if isinstance(learner, VectorLearner) else learner.stream
    for part, own in (("state", stream.state), ("carried", stream.carried)):
        for name, tensor in own.items():
            tensor.copy_(tensors[f"{part} {name}"].view_as(tensor))
    if isinstance(learner, VectorLearner):
        _load_vectors(learner, updates, states, list(parts))
        learner.vectors_read = read
        if not last:
            learner.reset()
        return
    saved = learner.step.saved_values()["optimizer"]
    order = [parameter for group in learner.step.optimizer.param_groups for parameter in group["params"]]
    saved["state"] = {number: states[one] for number, one in enumerate(order) if one in states} if updates else {}
    learner.step.restore({"optimizer": saved, "summed": (0, 0), "gradients": {}})
    learner.step.updates, learner.bytes_read = updates, read
    learner.stream.last, learner.stream.waiting = (None if last < 0 else (last, False)), []


def _load_vectors(learner: VectorLearner, updates: int, states: dict[Any, dict], scales: list[torch.Tensor]) -> None:
    learner.updates = updates
    learner.optimizer.state.clear()
    if updates:
        learner.optimizer.state.update(states)
    dtype = learner.model.dtype
    learner.mean, learner.variance, learner.errors, learner.last = (part.to(dtype, copy=True) for part in scales)


def _plan(learner: OnlineLearner | VectorLearner) -> LearnerPlan:
    if isinstance(learner, VectorLearner):
        return vector_plan(learner, VectorBlock(learner))
    setting = learner_setting(learner)
    if learner.stream.waiting:
        raise ValueError("`learner` has bytes that wait to be learned.")
    try:
        block = CompiledBlock(build_learning_rule("rtrl", learner.model), 1, 1, resets=False)
        return LearnerPlan(block, setting, learner.model.init_state(1))
    except Uncompilable as error:
        raise ValueError(f"`learner` is not supported in C: {error}.") from error


def _sizes(plan: LearnerPlan) -> list[int]:
    trained = [plan.parameters[name].numel() for name in plan.trained]
    weights = [plan.parameters[name].numel() for name in plan.names]
    fields = [size for _, size in plan.fields.values()]
    return [*weights, *trained * len(plan.moments), *fields, *plan.scales.values()]


def _checked(content: bytes, plan: LearnerPlan, allowed: tuple[int, int]) -> bytes:
    size = 4 * plan.saved_words
    expected = (SAVED_MAGIC, FILE_VERSION, size, plan.checksum)
    words = [int.from_bytes(content[at : at + 4], "little") for at in range(0, HEADER_BYTES, 4)]
    payload = content[HEADER_BYTES:]
    if tuple(words[:4]) != expected or len(payload) != size:
        raise ValueError("`content` was not saved by a learner in C of this model and optimizer.")
    if zlib.crc32(payload) != words[4]:
        raise ValueError("`content` is damaged: its checksum differs.")
    if not allowed[0] <= int.from_bytes(payload[-4:], "little", signed=True) <= allowed[1]:
        raise ValueError("`content` is damaged: its last number is out of range.")
    return payload
