import pytest

from hf_recurrent import Retrieval, Task, task_from_name, task_names
from hf_recurrent.tasks import task_names as module


def test_every_task_has_its_name():
    def below(cls):
        return {cls} | {found for sub in cls.__subclasses__() for found in below(sub)}

    public = {cls for cls in below(Task) if cls.__module__.startswith("hf_recurrent.tasks.") and cls is not Task}
    assert public == set(module._TASKS.values())
    for name in task_names():
        assert task_from_name(name).name == name and task_from_name(name) == module._TASKS[name]()


def test_settings():
    task = task_from_name("retrieval, length=9, label_noise=0.25,num_examples=7")
    assert task == Retrieval(length=9, label_noise=0.25, num_examples=7)
    assert task_from_name("retrieval,label_noise=1").label_noise == 1
    assert task_from_name("parity,final_only=True").final_only is True
    assert task_from_name("parity,num_examples=null").num_examples is None


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("retreival", "task is 'retreival', allowed is one of associative_recall, copying, flip_flop"),
        ("", "task is ''"),
        ("parity,size=4", "task 'parity' has the setting 'size=4', allowed are seed=…, num_examples=…"),
        ("parity,length", "task 'parity' has the setting 'length', allowed are"),
        ("parity,length=long", "task parity, length is 'long', allowed is int$"),
        ("parity,length=true", "task parity, length is 'true', allowed is int$"),
        ("parity,num_examples=0.5", "task parity, num_examples is '0.5', allowed is int or NoneType"),
        ("parity,final_only=maybe", "task parity, final_only is 'maybe', allowed is bool"),
        ("retrieval,label_noise=nan", "task retrieval, label_noise is 'nan', allowed is float or int"),
        ("retrieval,length=2", "`length` is 2; it must be an integer of at least 3"),
    ],
)
def test_bad_descriptions_are_named(description, message):
    with pytest.raises(ValueError, match=message):
        task_from_name(description)
