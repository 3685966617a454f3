"""The weights of a checkpoint directory, compared with the model before they are used.

`from_pretrained` fills a missing weight with random numbers, and leaves out one that the model does not have.
"""

import os

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hf_recurrent.checkpoint_files import read_json
from hf_recurrent.modeling.own_unit_loading import compare_code

WEIGHTS_FILE, WEIGHTS_INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


def open_tensors(path: str | os.PathLike) -> safe_open:
    """Open a safetensors file of a checkpoint; raise a ValueError if it is missing or damaged."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"The checkpoint file `{os.fspath(path)}` is missing or damaged: {error}.") from error


def weight_files(checkpoint: str | os.PathLike) -> list[str]:
    """The safetensors files of the weights, sharded or not.

    Raises:
        ValueError: the index of the shards is damaged.
    """
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
    """Compare names, shapes and types of the stored weights with those of a model; only headers are read.

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
    """Load the weights of a checkpoint directory, sharded or not; warn if a user's own unit has other code there.

    Raises:
        ValueError: see [`check_weights`]; the model is unchanged then.
    """
    check_weights(model, checkpoint)
    compare_code(getattr(model.config, "recurrent_unit", None), checkpoint)
    for path in weight_files(checkpoint):
        model.load_state_dict(load_file(path), strict=False)
    model.tie_weights()
