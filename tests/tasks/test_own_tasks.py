"""Tasks of a user: registered by name, used as `task:NAME`."""

import importlib
import pickle
from pathlib import Path

import numpy as np
import pytest
from own_parts_state import restored_parts

from hf_recurrent import register_task, task_from_name, task_names
from hf_recurrent.cli.data_arguments import DataArguments, load_training_sources

REVERSAL = """
from dataclasses import dataclass

import numpy as np

from hf_recurrent import ExampleDraws, Task, register_task


@register_task("reversal")
@dataclass(frozen=True, kw_only=True)
class Backwards(Task):
    letters: int = 5
    scale: "float | None" = None

    @property
    def vocab_size(self):
        return 9

    @property
    def length(self):
        return 2 * self.letters

    def generate(self, draws: ExampleDraws):
        letters = draws.integers("letters", self.letters, 8)
        blank = np.full_like(letters, 8)
        return np.concatenate([letters, blank], 1), np.concatenate([blank * 0 - 100, letters[:, ::-1]], 1)
"""


@pytest.fixture(autouse=True)
def own_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("my_tasks.py").write_text(REVERSAL)
    with restored_parts(tmp_path):
        yield importlib.import_module("my_tasks")


def test_a_task_by_name(own_file):
    task = task_from_name("reversal,letters=3,scale=0.5")
    assert task == own_file.Backwards(letters=3, scale=0.5) and task.name == "reversal"
    assert "reversal" in task_names()
    inputs, targets = task.examples(np.arange(4))
    assert (targets[:, 3:] == inputs[:, 2::-1]).all() and (targets[:, :3] == -100).all()
    assert pickle.loads(pickle.dumps(task)) == task  # as it goes to workers
    train, held_out = load_training_sources(DataArguments(corpus=["task:reversal,letters=3"]), None)
    assert train == held_out == own_file.Backwards(letters=3)


def test_an_unknown_task_suggests_the_nearest_and_the_flag():
    with pytest.raises(ValueError, match=r"`task` is 'reversl'.*did you mean 'reversal'\? .*--import FILE"):
        task_from_name("reversl")


def test_the_same_code_may_be_registered_again():
    Path("copied_tasks.py").write_text(REVERSAL)
    copied = importlib.import_module("copied_tasks")
    assert type(task_from_name("reversal")) is copied.Backwards


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("letters: int = 5", "letters: int = 6", "The task 'reversal' is registered already, with other code"),
        ('"reversal"', '"parity"', "'parity' is a task of this package; choose another name"),
        ('"reversal"', '"a,b"', "A task is named 'a,b'; it must be an identifier"),
        ("(Task)", "", "it must be a subclass of `Task`"),
        ("@dataclass(frozen=True, kw_only=True)\n", "", "is not a data class; write `@dataclass"),
    ],
)
def test_registration_refuses(before, after, message):
    Path("other_tasks.py").write_text(REVERSAL.replace(before, after, 1))
    names = task_names()
    with pytest.raises(ValueError, match=message):
        importlib.import_module("other_tasks")
    assert task_names() == names


def test_functions_are_no_tasks():
    with pytest.raises(ValueError, match="it must be a subclass of `Task`"):
        register_task("function")(lambda: None)
