"""Tasks by name, as in command lines and recipes: `retrieval,length=128,label_noise=0.1`."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any, TypeVar, get_args, get_type_hints

from hf_recurrent.own_parts import OwnParts, hint_for_unknown
from hf_recurrent.tasks.recall import AssociativeRecall, Copying, InductionHeads, SelectiveCopying, SentinelCopy
from hf_recurrent.tasks.smt_tasks import KeysValues, ModularArithmetic, Retrieval, StackOperations, StringCopy
from hf_recurrent.tasks.state_tracking import FlipFlop, Parity, PermutationComposition
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
        SentinelCopy,
        StackOperations,
        StringCopy,
    )
}


_Task = TypeVar("_Task", bound=type[Task])


def _check_task(name: str, task: Any) -> None:
    if not isinstance(task, type) or not issubclass(task, Task):
        raise ValueError(f"The task {name!r} is {task!r}; it must be a subclass of `Task`.")
    if "__dataclass_fields__" not in vars(task):
        raise ValueError(
            f"The task {name!r} is not a data class; write `@dataclass(frozen=True, kw_only=True)` between "
            f"`@register_task` and `class {task.__name__}`."
        )


_OWN_TASKS = OwnParts("task", _TASKS, _check_task)


def register_task(name: str) -> Callable[[_Task], _Task]:
    """Class decorator that makes a task of your own available to [`task_from_name`] and as `task:NAME`.

    It goes above `@dataclass(frozen=True, kw_only=True)`. The name is also the `name` of the task.

    Args:
        name: a name that no task of this package has.

    Raises:
        ValueError: the class is not a data class and a [`Task`], or the name is taken by other code.
    """

    def register(task: _Task) -> _Task:
        _OWN_TASKS.add(name, task)
        task.name = name
        return task

    return register


def task_names() -> list[str]:
    """Names of the tasks of [`task_from_name`]."""
    return [*_TASKS, *_OWN_TASKS]


def task_from_name(description: str) -> Task:
    """Build a task from its name and comma-separated settings of its fields.

    >>> task_from_name("string_copy,length=128")
    StringCopy(seed=0, num_examples=None, num_validation_examples=1024, length=128, vocab_size=16)

    Raises:
        ValueError: a name or field is unknown, a setting is not of the form field=value, or a value is invalid.
    """
    name, *settings = (part.strip() for part in description.split(","))
    kind = _TASKS.get(name) or _OWN_TASKS.get(name)
    if kind is None:
        hint = hint_for_unknown(name, task_names(), "a task")
        raise ValueError(f"`task` is {name!r}; it must be one of {', '.join(task_names())}; {hint}")
    types = get_type_hints(kind)
    types = {field.name: types[field.name] for field in dataclasses.fields(kind) if field.init}
    values = {}
    for setting in settings:
        field, equals, text = (part.strip() for part in setting.partition("="))
        if not equals or field not in types:
            raise ValueError(f"`task` {name!r} has no setting {setting!r}; it must be one of {'=…, '.join(types)}=….")
        values[field] = _value(text, types[field], f"`{field}` of task {name!r}")
    return kind(**values)


def _value(text: str, kind: Any, name: str) -> int | float | bool | None:
    allowed = get_args(kind) or (kind, *([int] if kind is float else []))
    try:
        value = json.loads(text.lower())
    except ValueError:
        value = text
    if type(value) not in allowed:
        raise ValueError(f"{name} is {text!r}; it must be {' or '.join(each.__name__ for each in allowed)}.")
    return value
