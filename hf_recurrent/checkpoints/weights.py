"""The weights of a checkpoint directory, compared with the model before they are used.

`from_pretrained` fills a missing weight with random numbers, and leaves out one that the model does not have.
"""

import os
from collections.abc import Collection

from transformers import PreTrainedModel

from hf_recurrent.checkpoints.files import read_json
from hf_recurrent.checkpoints.tensor_files import copy_whole, is_sharded, open_tensors, whole, write_tensors
from hf_recurrent.modeling.units.own_code import compare_code

WEIGHTS_FILE, WEIGHTS_INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


def weight_files(checkpoint: str | os.PathLike) -> list[str]:
    """The safetensors files of the weights, sharded or not; raise a ValueError if the index of shards is damaged."""
    index = os.path.join(checkpoint, WEIGHTS_INDEX_FILE)
    if not os.path.isfile(index):
        return [os.path.join(checkpoint, WEIGHTS_FILE)]
    content = read_json(index)
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"The checkpoint file `{index}` is damaged: it has no `weight_map`.")
    names = sorted({str(name) for name in shards.values()})
    for name in names:
        if os.path.basename(name) != name:
            raise ValueError(f"The checkpoint file `{index}` is damaged: {name!r} is not a name of a file next to it.")
    return [os.path.join(checkpoint, name) for name in names]


def check_weights(model: PreTrainedModel, checkpoint: str | os.PathLike) -> None:
    """Compare names, shapes and types of the stored weights with a model's; only headers are read.

    Raises:
        ValueError: a file is missing or damaged, or a weight is missing, unknown or of another shape or type.
    """
    checkpoint = os.fspath(checkpoint)
    own = model.state_dict()
    missing = own.keys() - set(getattr(model, "all_tied_weights_keys", None) or ())
    for path in weight_files(checkpoint):
        with open_tensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                if name not in own:
                    raise ValueError(f"The checkpoint {checkpoint!r} has a weight `{name}`; the model has none.")
                stored = file.get_slice(name)
                shape, own_shape = tuple(stored.get_shape()), tuple(own[name].shape)
                if shape != own_shape:
                    raise ValueError(
                        f"`{name}` has shape {shape} in the checkpoint {checkpoint!r}, but {own_shape} in the model."
                    )
                if own[name].is_floating_point() and stored.get_dtype() not in _FLOATS:
                    raise ValueError(
                        f"`{name}` has the type {stored.get_dtype()} in the checkpoint {checkpoint!r}; it must be one "
                        f"of {', '.join(_FLOATS)}."
                    )
                missing.discard(name)
    if missing:
        raise ValueError(f"The checkpoint {checkpoint!r} lacks the weight `{min(missing)}` of the model.")


def load_weights(model: PreTrainedModel, checkpoint: str | os.PathLike) -> None:
    """Load the weights of a checkpoint directory; warn if a user's own unit has other code there.

    They are read tensor by tensor; of each, a process keeps its part if the model is sharded.

    Raises:
        ValueError: see [`check_weights`]; the model is unchanged then.
    """
    check_weights(model, checkpoint)
    compare_code(getattr(model.config, "recurrent_unit", None), checkpoint)
    own = model.state_dict()
    for path in weight_files(checkpoint):
        with open_tensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                copy_whole(own[name], file.get_tensor(name))
    if not any(map(is_sharded, own.values())):
        model.tie_weights()


def save_weights(
    model: PreTrainedModel, directory: str | os.PathLike, *, writes: bool, adapter: Collection[str] = ()
) -> None:
    """Save a model or its adapter (PEFT), whose tensors have the names `adapter`, as `save_pretrained` does.

    Of a sharded model, all processes call this, and those that do not write take part in gathering the weights.
    """
    own = model.state_dict()
    if not any(map(is_sharded, own.values())):
        if writes:
            model.save_pretrained(directory)
    elif adapter:
        small = {name: whole(own[name]) for name in sorted(adapter)}
        if writes:
            model.save_pretrained(directory, state_dict=small)
    else:
        for name in getattr(model, "all_tied_weights_keys", None) or ():
            own.pop(name, None)
        if writes:
            model.save_pretrained(directory, state_dict={})
        path = os.path.join(directory, WEIGHTS_FILE) if writes else None
        write_tensors(own, path, {"format": "pt"})
