"""Tasks by name, as in command lines and recipes: `retrieval,length=128,label_noise=0.1`."""

import dataclasses
import json
from typing import Any, get_args

from hf_recurrent.tasks.associative_recall import AssociativeRecall, InductionHeads
from hf_recurrent.tasks.copying import Copying
from hf_recurrent.tasks.flip_flop import FlipFlop
from hf_recurrent.tasks.selective_copying import SelectiveCopying
from hf_recurrent.tasks.smt_tasks import KeysValues, ModularArithmetic, Retrieval, StackOperations, StringCopy
from hf_recurrent.tasks.state_tracking import Parity, PermutationComposition
from hf_recurrent.tasks.task import Task

_TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        AssociativeRecall,
        Copying,
        FlipFlop,
        InductionHeads,
        KeysValues,
        ModularArithmetic,
        Parity,
        PermutationComposition,
        Retrieval,
        SelectiveCopying,
        StackOperations,
        StringCopy,
    )
}


def task_names() -> list[str]:
    """Names of the tasks of [`task_from_name`]."""
    return list(_TASKS)


def task_from_name(description: str) -> Task:
    """Build a task from its name and comma-separated settings of its fields.

    >>> task_from_name("string_copy,length=128")
    StringCopy(seed=0, num_examples=None, num_validation_examples=1024, length=128, vocab_size=16)

    Raises:
        ValueError: a name or field is unknown, a setting is not of the form field=value, or a value is invalid.
    """
    name, *settings = (part.strip() for part in description.split(","))
    if name not in _TASKS:
        raise ValueError(f"`task` is {name!r}; it must be one of {', '.join(_TASKS)}.")
    types = {field.name: field.type for field in dataclasses.fields(_TASKS[name])}
    values = {}
    for setting in settings:
        field, equals, text = (part.strip() for part in setting.partition("="))
        if not equals or field not in types:
            raise ValueError(f"`task` {name!r} has no setting {setting!r}; it must be one of {'=…, '.join(types)}=….")
        values[field] = _value(text, types[field], f"`{field}` of task {name!r}")
    return _TASKS[name](**values)


def _value(text: str, kind: Any, place: str) -> int | float | bool | None:
    allowed = get_args(kind) or (kind, *([int] if kind is float else []))
    try:
        value = json.loads(text.lower())
    except ValueError:
        value = text
    if type(value) not in allowed:
        raise ValueError(f"{place} is {text!r}; it must be {' or '.join(each.__name__ for each in allowed)}.")
    return value
