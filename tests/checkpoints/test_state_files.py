"""State files keep states exactly, and are refused by other weights."""

import warnings

import pytest
import torch
from model_cases import each_family, tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_recurrent import join_states, load_state, save_state, split_state, weights_hash
from hf_recurrent.checkpoints.state_files import pack_state, unpack_state
from hf_recurrent.generation.text_state import load_text_state

TEXT = torch.tensor([list(b"to be"), list(b"or no")])


def state_of(model):
    with torch.no_grad():
        return model(TEXT).state


@each_family
def test_a_state_is_kept_exactly(family, tmp_path):
    model, path = tiny_model(family, torch.float64), tmp_path / "state.safetensors"
    state = state_of(model)
    save_state(state, path, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_state(path, model)
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_other_weights_refuse_it(tmp_path):
    model, path = tiny_model("memora"), tmp_path / "state.safetensors"
    save_state(state_of(model), path, model)
    sentence = "`.*state.safetensors` belongs to other weights; a state works only with the model that saved it"
    for other in (tiny_model("hawk"), tiny_model("memora", num_hidden_layers=1)):
        with pytest.raises(ValueError, match=sentence):
            load_state(path, other)
    load_state(path, tiny_model("memora"))  # the same weights
    load_state(path, tiny_model("memora", torch.bfloat16))
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    with pytest.raises(ValueError, match=sentence):
        load_state(path, model)


def test_files_without_a_hash_are_refused(tmp_path):
    model, path = tiny_model("memora"), tmp_path / "old.safetensors"
    state = state_of(model)
    for metadata in (None, {"format": "hf_recurrent.text_state.1", "pending": "[1, 2]", "weights": "of another kind"}):
        save_file(dict(state), path, metadata)
        for load in (lambda: load_state(path, model), lambda: load_text_state(model, path)):
            with pytest.raises(ValueError, match="is not a saved state; it must be written by `save_state`"):
                load()


def test_damage_is_named(tmp_path):
    model, path = tiny_model("memora"), tmp_path / "state.safetensors"
    save_state(state_of(model), path, model)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    name = next(iter(tensors))
    for damaged, problem in (
        (tensors[name] * float("nan"), "has NaN or infinite values"),
        (tensors[name].long(), "it must be a floating-point type"),
        (tensors[name][:1], "has shape"),
    ):
        save_file({**tensors, name: damaged}, path, metadata)
        with pytest.raises(ValueError, match=f"is damaged: .*{problem}"):
            load_state(path, model)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="is damaged or not a saved state"):
        load_state(path, model)
    with pytest.raises(FileNotFoundError, match="no saved state"):
        load_state(tmp_path / "none", model)


def test_every_damaged_bit_is_noticed():
    model = tiny_model("memora")
    data = pack_state(state_of(model), model, {"pending": "[66, 67]"})
    unpack_state(data, "state", model)
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(ValueError, match=r"`state` (is damaged|belongs to other weights|is not a saved state)"):
            unpack_state(bytes(damaged), "state", model)


def test_files_of_the_version_without_a_checksum_still_load(tmp_path):
    model, path = tiny_model("memora"), tmp_path / "state.safetensors"
    state = state_of(model)
    save_file(dict(state), path, {"format": "hf_recurrent.state.2", "weights": weights_hash(model)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_state(path, model)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    save_file(dict(state), path, {"format": "hf_recurrent.state.3", "weights": weights_hash(model)})
    with pytest.raises(ValueError, match="is damaged: its content does not match its checksum"):
        load_state(path, model)


def test_what_is_no_state_is_not_saved(tmp_path):
    model, path = tiny_model("memora"), tmp_path / "state.safetensors"
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="has NaN or infinite values"):
            save_state({name: tensor + value for name, tensor in state_of(model).items()}, path, model)
    with pytest.raises(TypeError, match="`state` is of type NoneType"):
        save_state(None, path, model)
    with pytest.raises(ValueError, match="`state` has no"):
        save_state({}, path, model)
    with pytest.raises(ValueError, match=r"which this model does not have|has no|has shape"):
        save_state(state_of(tiny_model("hawk")), path, model)
    for no_model in ("cpu", torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=r"`model` is a .*, which has no recurrent state"):
            save_state({}, path, no_model)
    assert not list(tmp_path.iterdir())


def test_many_sessions_in_one_file(tmp_path):
    model, path = tiny_model("hawk"), tmp_path / "all.safetensors"
    users = split_state(state_of(model))
    save_state(join_states(users), path, model)
    for loaded, user in zip(split_state(load_state(path, model)), users, strict=True):
        assert all(torch.equal(loaded[name], tensor) for name, tensor in user.items())
