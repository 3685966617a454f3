"""Reading the safetensors files of a checkpoint, checked against the model before anything is changed."""

import os

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hf_recurrent.checkpoint_files import read_json

WEIGHTS_FILE, WEIGHTS_INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def open_tensors(path: str | os.PathLike):
    """Open a safetensors file of a checkpoint; a ValueError if it is missing or damaged."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"The checkpoint file `{path}` is missing or damaged: {error}.") from error


def load_weights(model: PreTrainedModel, checkpoint: str) -> None:
    """Load the weights of a checkpoint directory, sharded or not.

    Raises:
        ValueError: a file is missing or damaged, or a weight is missing, unknown or of another shape.
    """
    index = os.path.join(checkpoint, WEIGHTS_INDEX_FILE)
    names = sorted(set(read_json(index)["weight_map"].values())) if os.path.isfile(index) else [WEIGHTS_FILE]
    paths = [os.path.join(checkpoint, name) for name in names]
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing = own.keys() - set(getattr(model, "all_tied_weights_keys", None) or ())
    for path in paths:
        with open_tensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                shape = tuple(file.get_slice(name).get_shape())
                if name not in own:
                    raise ValueError(f"The checkpoint {checkpoint!r} has a weight `{name}`; the model has none.")
                if shape != own[name]:
                    raise ValueError(
                        f"`{name}` has shape {shape} in the checkpoint {checkpoint!r}, but {own[name]} in the model."
                    )
                missing.discard(name)
    if missing:
        raise ValueError(f"The checkpoint {checkpoint!r} lacks the weight `{min(missing)}` of the model.")
    for path in paths:
        model.load_state_dict(load_file(path), strict=False)
    model.tie_weights()
