import pytest

from hf_recurrent import Retrieval, Task, task_from_name, task_names
from hf_recurrent.tasks import task_names as module


def test_every_task_has_its_name():
    def below(cls):
        return {cls} | {found for sub in cls.__subclasses__() for found in below(sub)}

    public = {cls for cls in below(Task) if cls.__module__.startswith("hf_recurrent.tasks.") and cls is not Task}
    assert public == set(module._TASKS.values())
    assert set(module._TASKS) <= set(task_names())  # other tests may have registered more
    for name in module._TASKS:
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
        ("retreival", "`task` is 'retreival'; it must be one of associative_recall, copying, flip_flop"),
        ("", "`task` is ''"),
        ("parity,size=4", "`task` 'parity' has no setting 'size=4'; it must be one of seed=…, num_examples=…"),
        ("parity,length", "`task` 'parity' has no setting 'length'; it must be one of"),
        ("parity,length=long", r"`length` of task 'parity' is 'long'; it must be int\.$"),
        ("parity,length=true", r"`length` of task 'parity' is 'true'; it must be int\.$"),
        ("parity,num_examples=0.5", "`num_examples` of task 'parity' is '0.5'; it must be int or NoneType"),
        ("parity,final_only=maybe", "`final_only` of task 'parity' is 'maybe'; it must be bool"),
        ("retrieval,label_noise=nan", "`label_noise` of task 'retrieval' is 'nan'; it must be float or int"),
        ("retrieval,length=2", "`length` is 2; it must be an integer of at least 3"),
    ],
)
def test_bad_descriptions_are_named(description, message):
    with pytest.raises(ValueError, match=message):
        task_from_name(description)
