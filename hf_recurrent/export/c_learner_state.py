"""The file of a learner in C, written from an `OnlineLearner` or a `VectorLearner`, and read into one."""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hf_recurrent.export.c_learner_plan import (
    FILE_VERSION,
    FIRST_RANDOM,
    HEADER_BYTES,
    SAVED_MAGIC,
    LearnerPlan,
    learner_setting,
    token_plan,
)
from hf_recurrent.export.formats import NUMBERS
from hf_recurrent.export.vector_block import vector_plan
from hf_recurrent.learning_rules.compiled_program import Uncompilable
from hf_recurrent.modeling.contexts.count_memory import STATE_PART
from hf_recurrent.online.learner import OnlineLearner
from hf_recurrent.online.vector_learner import VectorLearner

_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "rmsprop": ("square_avg",), "sgd": ()}
_LARGEST_COUNT = (1 << 32) - 1


def save_c_state(learner: OnlineLearner | VectorLearner, numbers: str = "float32") -> bytes:
    """The file that `NAME_load` of the exported learner reads: weights, state and optimizer of a learner.

    Args:
        learner: as it was exported.
        numbers: as in [`save_c_learner`].

    Raises:
        ValueError: the learner is not one of rule "rtrl" and stride 1, or is not supported in C.
    """
    plan, scales = _plan(learner, numbers), {}
    if isinstance(learner, VectorLearner):
        optimizer, stream, begins = learner.optimizer, learner, learner.last is None
        read, last = min(learner.vectors_read, _LARGEST_COUNT), int(not begins)
        scales = {name: getattr(learner, name) for name in plan.scales if getattr(learner, name) is not None}
    else:
        learner.step.learning.write_steps()
        optimizer, stream = learner.step.optimizer, learner.stream
        if plan.table is not None:
            state = optimizer.state.get(plan.parameters[plan.table.name], {})
            scales = {"row_sums": state["row_sums"]} if state else {}
        last, begins = stream.last or (-1, True)
        read = learner.bytes_read % (1 << 32)
    states = [optimizer.state.get(plan.parameters[name], {}) for name in plan.trained]
    zeros = [torch.zeros_like(plan.parameters[name]) for name in plan.trained]
    values = plan.weights() | scales
    for field, moment in zip(plan.moments, _MOMENTS[plan.kind], strict=True):
        moments = [of_one.get(moment, zero) for of_one, zero in zip(states, zeros, strict=True)]
        values[field] = torch.cat([tensor.reshape(-1) for tensor in moments])
    # In C, the state is zero as soon as an episode begins.
    values |= {field: tensor * (not begins) for field, tensor in _state_fields(stream, plan)}
    counts = b"" if plan.counts is None else plan.counts.encoded(stream.state[STATE_PART], begins and last >= 0)
    payload = counts + b"".join(part.encode(values.get(part.field, torch.zeros(part.size))) for part in plan.parts)
    random = [FIRST_RANDOM] if plan.is_narrow else []
    words = [*random, min(learner.updates, _LARGEST_COUNT), read, last % (1 << 32)]
    return plan.file(SAVED_MAGIC, payload + np.array(words, dtype="<u4").tobytes())


def load_c_state(learner: OnlineLearner | VectorLearner, content: bytes) -> None:
    """Continue in a learner from what `NAME_save` of the exported learner wrote, with either type of numbers.

    Raises:
        ValueError: the content is damaged or of another model or optimizer, or the learner is not supported; it is
            unchanged then.
    """
    plans = [_plan(learner, numbers) for numbers in NUMBERS]
    plan = next((plan for plan in plans if content[12:16] == plan.checksum.to_bytes(4, "little")), plans[0])
    allowed = (0, 1) if isinstance(learner, VectorLearner) else (-1, learner.model.config.vocab_size - 1)
    payload = _checked(content, plan, allowed)
    values, begins = _decoded(payload[0 if plan.counts is None else plan.counts.size :], plan), False
    if plan.counts is not None:
        begins = plan.counts.decode(payload[: plan.counts.size], learner.stream.state[STATE_PART])
    updates, read = np.frombuffer(payload[-12:-4], dtype="<u4").tolist()
    last = int.from_bytes(payload[-4:], "little", signed=True)
    with torch.no_grad():
        for parameter, part in plan.split(plan.join_weights(values), plan.names):
            parameter.copy_(part)
    trained = plan.trained if plan.moments else []
    states = {plan.parameters[name]: {"step": torch.tensor(float(updates))} for name in trained}
    for field, moment in zip(plan.moments, _MOMENTS[plan.kind], strict=True):
        for parameter, part in plan.split(values[field], trained):
            states[parameter][moment] = part.clone()
    stream = learner if isinstance(learner, VectorLearner) else learner.stream
    for field, tensor in _state_fields(stream, plan):
        tensor.copy_(values[field].view_as(tensor))
    if isinstance(learner, VectorLearner):
        learner.updates, learner.vectors_read = updates, read
        learner.optimizer.state.clear()
        if updates:
            learner.optimizer.state.update(states)
        for name in plan.scales:
            setattr(learner, name, values[name].to(learner.model.dtype, copy=True))
        if not last:
            learner.reset()
        return
    if plan.table is not None:
        states[plan.parameters[plan.table.name]] = {"row_sums": values["row_sums"]}
    saved = learner.step.saved_values()["optimizer"]
    order = [parameter for group in learner.step.optimizer.param_groups for parameter in group["params"]]
    saved["state"] = {number: states[one] for number, one in enumerate(order) if one in states} if updates else {}
    learner.step.restore({"optimizer": saved, "summed": (0, 0), "gradients": {}})
    learner.step.updates, learner.bytes_read = updates, read
    learner.stream.last, learner.stream.waiting = (None if last < 0 else (last, begins)), []


def _state_fields(stream: Any, plan: LearnerPlan) -> Iterator[tuple[str, torch.Tensor]]:
    """Fields of the struct with the parts of the network's state and of the sensitivities."""
    for part, own in (("state", stream.state), ("carried", stream.carried)):
        for name, tensor in own.items():
            if name != STATE_PART:
                yield plan.fields[f"{part} {name}"][0], tensor


def _decoded(payload: bytes, plan: LearnerPlan) -> dict[str, torch.Tensor]:
    """Field → its elements, float32."""
    values, at = {}, 0
    for part in plan.parts:
        values[part.field] = part.decode(payload, at)
        at += part.num_bytes
    return values


def _plan(learner: OnlineLearner | VectorLearner, numbers: str) -> LearnerPlan:
    if isinstance(learner, VectorLearner):
        return vector_plan(learner, numbers)[1]
    setting = learner_setting(learner, numbers)
    if learner.stream.waiting:
        raise ValueError("`learner` has bytes that wait to be learned.")
    try:
        return token_plan(learner.model, setting)[1]
    except Uncompilable as error:
        raise ValueError(f"`learner` is not supported in C: {error}.") from error


def _checked(content: bytes, plan: LearnerPlan, allowed: tuple[int, int]) -> bytes:
    size = plan.saved_bytes
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
