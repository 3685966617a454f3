"""A saved learner is used as it was saved, or refused in one sentence that names what is wrong."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, set_seed

from hf_recurrent import ByteTokenizer, OnlineLearner, config_from_preset
from hf_recurrent.checkpoints.manifest import MANIFEST_FILE, write_manifest

STREAM = b"the first line of a stream\n\0the second\n" * 2


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    set_seed(7)
    sizes = {"hidden_size": 16, "state_size": 24, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(config_from_preset("memora-tiny", **sizes))
    learner = OnlineLearner(model, ByteTokenizer(), stride=3, update_every=2, window=20, learning_rate=1e-2)
    learner.read(STREAM[:49])
    assert learner.stream.waiting and learner.stream.last and learner.step.saved_values()["summed"][0]
    directory = tmp_path_factory.mktemp("learner") / "saved"
    learner.save(directory)
    return directory


@pytest.fixture
def saved(original, tmp_path):
    shutil.copytree(original, tmp_path / "saved")
    return tmp_path / "saved"


def resigned(directory, **changes):
    """Change values of learner.json, given by their paths, and write the checksums anew."""
    path = directory / "learner.json"
    content = json.loads(path.read_text())
    for place, value in changes.items():
        *parents, name = place.split("__")
        part = content
        for parent in parents:
            part = part[parent]
        if value is KeyError:
            del part[name]
        else:
            part[name] = value
    path.write_text(json.dumps(content))
    write_manifest(directory)


def refused(directory, match):
    with pytest.raises(ValueError, match=match) as error:
        OnlineLearner.load(directory)
    assert "\n" not in str(error.value)


# ---- Files ----


def test_every_file_has_a_checksum(saved):
    files = sorted(path.name for path in saved.iterdir())
    listed = json.loads((saved / MANIFEST_FILE).read_text())["files"]
    assert sorted([*listed, MANIFEST_FILE]) == files
    for name in files:
        data = (saved / name).read_bytes()
        for damaged in (None, b"", data[: len(data) // 2], data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]):
            (saved / name).unlink()
            if damaged is not None:
                (saved / name).write_bytes(damaged)
            refused(saved, rf"saved.*{name}")
            (saved / name).write_bytes(data)
    assert OnlineLearner.load(saved).bytes_read == 49


def test_a_learner_without_checksums_or_format_is_refused(saved):
    resigned(saved, format=KeyError)
    refused(saved, "`format` is missing")
    (saved / MANIFEST_FILE).unlink()
    refused(saved, f"{MANIFEST_FILE}` is missing")
    with pytest.raises(ValueError, match="it must be a saved learner"):
        OnlineLearner.load(saved.parent)


def test_files_of_two_learners_do_not_mix(saved, tmp_path):
    other = OnlineLearner.load(saved)
    other.read(STREAM[49:])
    other.save(tmp_path / "other")
    for name in ("learner.json", "learner.safetensors", "model.safetensors"):
        own = (saved / name).read_bytes()
        shutil.copy(tmp_path / "other" / name, saved / name)
        refused(saved, name)
        (saved / name).write_bytes(own)


# ---- Values ----


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("bytes_read", -1),
        ("bytes_read", 1.5),
        ("bytes_read", "50"),
        ("bytes_read", True),
        ("bytes_read", 2**70),
        ("bytes_read", KeyError),
        ("bytes_read", float("nan")),
        ("updates", -1),
        ("updates", 50),
        ("updates", None),
        ("metadata", []),
        ("metadata", KeyError),
        ("settings", None),
        ("settings", {"stride": 3}),
        ("settings__rule", "bptt"),
        ("settings__rule", ["rtrl"]),
        ("settings__stride", 10**30),
        ("settings__stride", 1),
        ("settings__window", 10**12),
        ("settings__window", 21),
        ("settings__learning_rate", "fast"),
        ("settings__learning_rate", float("inf")),
        ("settings__learning_rate", True),
        ("settings__max_grad_norm", None),
        ("settings__max_grad_norm", float("nan")),
        ("settings__binary", 1),
        ("settings__learn", "yes"),
        ("settings__momentum", 0.9),
        ("settings__learn", False),
        ("settings__optimizer", "rmsprop"),
        ("settings__rule", "truncated"),
        ("meter__count", -1),
        ("meter__count", 50),
        ("meter__count", 2.0),
        ("meter__nats", float("nan")),
        ("meter__nats", "9"),
        ("meter__recent", [0.0] * 20),
        ("meter", None),
        ("last", 5),
        ("last", {"__tuple__": [97]}),
        ("last", {"__tuple__": [256, False]}),
        ("last", {"__tuple__": [-1, False]}),
        ("last", {"__tuple__": [97, 0]}),
        ("waiting", None),
        ("waiting", [{"__tuple__": [97, 98]}]),
        ("waiting", [{"__tuple__": [97, 300, False]}]),
        ("waiting", [[97, 98, False]]),
        ("summed", {"__tuple__": [1]}),
        ("summed", {"__tuple__": [-1, 3]}),
        ("summed", {"__tuple__": [2, 3]}),
        ("summed", {"__tuple__": [1, 4]}),
        ("summed", {"__tuple__": [1, 0]}),
        ("state", []),
        ("state", {}),
        ("carried", {}),
        ("gradients", {"lm_head.weight": 0.0}),
        ("gradients", {"__pairs__": [[1, 2]]}),
        ("gradients", {"__pairs__": 7}),
        ("gradients", {"__pairs__": [[[1], 2]]}),
        ("gradients", {"__tensor__": ["a"]}),
        ("gradients", {"__tensor__": "nowhere"}),
        ("gradients", {"__tensor__": "learner.meter.recent"}),
        ("optimizer", None),
        ("optimizer", {}),
        ("optimizer__state", {}),
        ("optimizer__param_groups", []),
        ("optimizer__class", "SGD"),
        ("format", 3),
        ("format", "2"),
    ],
)
def test_no_wrong_value_is_used(saved, place, value):
    resigned(saved, **{place: value})
    refused(saved, "saved")


@pytest.mark.parametrize(
    "text", ["", "7", "null", "[]", "{}", '"a"', "[" * 200_000, "9" * 5000, '{"settings": 1e999}']
)
def test_no_other_json_is_used(saved, text):
    (saved / "learner.json").write_text(text)
    write_manifest(saved)
    refused(saved, "saved")


def tensors_of(directory):
    return load_file(directory / "learner.safetensors")


@pytest.mark.parametrize(
    "part", ["meter.recent", "state.", "carried.", "gradients.", "optimizer.state.0.exp_avg", "optimizer.state.0.step"]
)
@pytest.mark.parametrize("damage", ["missing", "transposed", "longer", "empty", "integers"])
def test_no_wrong_tensor_is_used(saved, part, damage):
    tensors = tensors_of(saved)
    name = next(name for name in tensors if name.startswith(f"learner.{part}"))
    tensor = tensors.pop(name)
    if damage != "missing":
        tensors[name] = {
            "transposed": tensor[None],
            "longer": torch.cat([tensor.reshape(-1), tensor.reshape(-1)]),
            "empty": tensor.reshape(-1)[:0],
            "integers": torch.zeros(tensor.shape, dtype=torch.int64),
        }[damage].contiguous()
    if damage in ("transposed", "integers") and "step" in name:
        return  # the same number
    save_file(tensors, saved / "learner.safetensors")
    write_manifest(saved)
    refused(saved, "saved")


def test_unknown_tensors_are_refused(saved):
    save_file(tensors_of(saved) | {"learner.other": torch.zeros(2)}, saved / "learner.safetensors")
    write_manifest(saved)
    refused(saved, r"learner\.safetensors.*learner\.other")


def test_numbers_of_the_meter_are_finite(saved):
    tensors = tensors_of(saved)
    tensors["learner.meter.recent"][3] = float("nan")
    save_file(tensors, saved / "learner.safetensors")
    write_manifest(saved)
    refused(saved, "meter")


# ---- Weights ----


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "integers"])
@pytest.mark.parametrize("loaded", [False, True])
def test_weights_are_never_filled_at_random(saved, damage, loaded):
    model = AutoModelForCausalLM.from_pretrained(saved) if loaded else None
    weights = load_file(saved / "model.safetensors")
    name = "model.embed_tokens.weight"
    weight = weights.pop(name)
    if damage != "missing":
        wrong = {"unknown": weight.clone(), "shape": weight[:, :-1].contiguous(), "integers": weight.to(torch.int8)}[
            damage
        ]
        weights |= {"model.embed_tokens.wait": wrong, name: weight} if damage == "unknown" else {name: wrong}
    save_file(weights, saved / "model.safetensors", {"format": "pt"})
    write_manifest(saved)
    with pytest.raises(
        ValueError, match="embed_tokens.wait" if damage == "unknown" else "embed_tokens.weight"
    ) as error:
        OnlineLearner.load(saved, model)
    assert "\n" not in str(error.value)


# ---- Saving ----


def test_a_full_disk_leaves_the_learner_that_was_saved(saved, monkeypatch):
    learner = OnlineLearner.load(saved)
    learner.read(STREAM[49:])
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def fail(*arguments, **options):
        raise OSError(28, os.strerror(28))

    for name in ("write_manifest", "save_tree"):
        with monkeypatch.context() as patch:
            patch.setattr(f"hf_recurrent.online.saved_learner.{name}", fail)
            with pytest.raises(OSError, match=r"saved.*cannot be written: No space left on device"):
                learner.save(saved)
        assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
        assert [path.name for path in saved.parent.iterdir()] == ["saved"]
    learner.save(saved)
    assert OnlineLearner.load(saved).bytes_read == len(STREAM)
