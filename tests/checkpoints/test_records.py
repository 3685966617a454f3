"""Records of provenance: files, damage, and what is kept of a long run."""

import copy
import json

import pytest

from hf_recurrent.checkpoints.privacy import public_data_name, public_name, redact
from hf_recurrent.checkpoints.provenance_files import PROVENANCE_FILE, read_provenance, write_provenance
from hf_recurrent.checkpoints.recorder import join_rates
from hf_recurrent.checkpoints.records import (
    Base,
    Data,
    Phase,
    Provenance,
    Rate,
    Result,
    Sample,
    Segment,
    Teacher,
    from_json,
    thin_out,
)


def whole() -> Provenance:
    """A provenance with every kind of record."""
    rate = Rate(10, 0.0, 1e-4, 0.0, 1e-3, {"weight_decay": 0.1, "betas": [0.9, 0.95]})
    segment = Segment(0, 7, 700, 1, {"streams": 4}, [rate], {"torch": "2.13"}, "a processor", "2026-01-01", 3.5)
    first = Phase("smt", [Data("notes", "abc", size=100, documents=3, read=700)], [segment])
    second = Phase("dmt", [Data("notes", "abc")], [copy.deepcopy(segment)], Base("me/hawk", "f" * 32, "mit"))
    second.teacher, second.adapter, second.curve = Teacher("e" * 32, [first]), {"type": "LORA", "r": 8}, [[1, 2.5]]
    result = Result(1, 7, "w", Data("notes", "def"), {"bits_per_byte": 2.5}, {"block_size": 16})
    return Provenance([first, second], [result], "w", Sample("a", "b", "w", 0.8), ["A gap."])


def test_what_is_written_is_read(tmp_path):
    write_provenance(whole(), tmp_path)
    assert read_provenance(tmp_path) == whole()
    assert read_provenance(tmp_path / "elsewhere") is None
    write_provenance(Provenance(), tmp_path / "nothing to say")  # no file, and so no error
    assert (whole().phases[1].steps, whole().phases[1].read, whole().phases[1].seconds) == (7, 700, 3.5)


def changes():
    """Every value of the file, replaced by one of another type, and every key removed or renamed."""
    values = json.loads(json.dumps(whole().to_json()))

    def walk(value, path):
        if isinstance(value, dict):
            for key in value:
                yield from walk(value[key], (*path, key))
                yield (*path, key), "rename"
        elif isinstance(value, list):
            for number, item in enumerate(value):
                yield from walk(item, (*path, number))
        yield path, "replace"

    for path, kind in walk(values, ()):
        free = {"settings", "adapter"}.intersection(path[:-1])  # any JSON value
        if path and not free and not (kind == "rename" and path[-2:-1] in (("metrics",), ("versions",))):
            yield pytest.param(path, kind, id=".".join(map(str, path)) + f"-{kind}")


@pytest.mark.parametrize(("path", "kind"), changes())
def test_damage_is_one_sentence_that_names_the_file(tmp_path, path, kind):
    values = json.loads(json.dumps(whole().to_json()))
    place = values
    for key in path[:-1]:
        place = place[key]
    if kind == "rename":
        place[f"{path[-1]}_"] = place.pop(path[-1])
    else:
        place[path[-1]] = object_of_another_type(place[path[-1]])
    (tmp_path / PROVENANCE_FILE).write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"provenance\.json` is damaged: "):
        read_provenance(tmp_path)


def object_of_another_type(value):
    return ["a list"] if isinstance(value, dict) or value is None else {"an": ["object"]}


@pytest.mark.parametrize("value", [None, [], {"format": 2}, {"format": True}, {}, {"format": 1, "phases": [3]}])
def test_other_json(value):
    with pytest.raises(ValueError, match=r"`format` is|instead of an object|must be an object"):
        from_json(value)


def test_negative_and_infinite_numbers_are_damage():
    for name, value in (("last_step", -1), ("seconds", float("inf")), ("seconds", float("nan"))):
        values = whole().to_json()
        values["phases"][0]["segments"][0][name] = value
        with pytest.raises(ValueError, match=name):
            from_json(values)


def test_results_belong_to_weights():
    provenance = Provenance(weights="w")
    data = Data("notes", "abc")
    for step, weights, bits in ((1, "v", 3.0), (2, "w", 2.5), (2, "w", 2.4)):
        provenance.add_result(Result(1, step, weights, data, {"bits_per_byte": bits}))
    assert [result.metrics["bits_per_byte"] for result in provenance.results] == [3.0, 2.4]  # one is measured again
    assert [result.metrics["bits_per_byte"] for result in provenance.current_results()] == [2.4]
    for step in range(1000):
        provenance.add_result(Result(1, step, f"{step}", data, {"bits_per_byte": 1.0}))
    assert len(provenance.results) <= 200 and provenance.results[-1].step == 999


def test_curves_are_thinned_out():
    curve = [[step, 1.0] for step in range(1001)]
    thin = thin_out(curve)
    assert len(thin) <= 202 and (thin[0], thin[-1]) == (curve[0], curve[-1])
    assert thin_out(curve[:9]) == curve[:9] and thin_out([]) == []


def test_rates_of_two_parts():
    before, after = Rate(10, 0.0, 0.5, 0.0, 0.9), Rate(10, 0.4, 0.1, 0.1, 0.4)
    assert join_rates([before], [after]) == [Rate(10, 0.0, 0.1, 0.0, 0.9)]
    assert join_rates([], [after]) == join_rates([after], []) == [after]


def test_names_are_public(tmp_path, monkeypatch):
    home = tmp_path / "alice"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    token = "hf_" + "aB3" * 11
    cases = {
        f"{home}/notes": "notes",
        f"{home}": "local files",
        "hub:me/stories": "hub:me/stories",
        f"hub:{home}/notes": "notes",
        f"mnist:{home}/digits": "mnist:digits",
        f"{home}/a, {home}/b.txt": "a, b.txt",
        "task:copying,length=9": "task:copying,length=9",
        "python": "python",
    }
    for name, public in cases.items():
        assert public_data_name(name) == public, name
    assert public_name("me/hawk") == "me/hawk" and public_name(f"{home}/runs/hawk/") == "hawk"
    assert public_name(r"C:\Users\alice\hawk") == "hawk"
    text = redact(f"see {home}/x and {token}")
    assert "alice" not in text and token not in text

    provenance = whole()
    provenance.sample.text = f"{home}/secret {token}"
    write_provenance(provenance, tmp_path)
    written = (tmp_path / PROVENANCE_FILE).read_text()
    assert "alice" not in written and token not in written
