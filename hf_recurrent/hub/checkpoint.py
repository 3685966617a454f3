"""Checkpoints that load where this package is not installed: weights, tokenizer, code and card in one directory."""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_recurrent.checkpoints.privacy import find_local_path, redact_secrets
from hf_recurrent.checkpoints.provenance_files import PROVENANCE_FILE, find_provenance, write_provenance
from hf_recurrent.hub.eval_results import EVAL_RESULTS_FILE, write_eval_results
from hf_recurrent.hub.model_card import CURVE_FILE, create_model_card, plot_training_curve
from hf_recurrent.modeling.units.own_code import AUTO_MAP_KEY, OWN_CODE

# Files with names and texts of the user; the others are vocabularies, weights and our own code.
_PUBLISHED_TEXTS = (
    "README.md", "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "adapter_config.json", PROVENANCE_FILE,
)  # fmt: skip
_CURVE_LINE = re.compile(rf"^!\[[^]]*\]\({re.escape(CURVE_FILE)}\)\n\n?", re.MULTILINE)


def save_checkpoint_for_hub(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: str | os.PathLike,
    card: ModelCard | str | None = None,
    *,
    state_dict: dict[str, Tensor] | None = None,
) -> list[str]:
    """Write everything that a repository on the Hub needs, and check that it loads elsewhere.

    Weights are written as safetensors, model and tokenizer with their code; also the recorded provenance, its results
    on datasets of the Hub as data (`.eval_results/`), and its training curve if the card shows it.

    Args:
        directory: created if missing. Files of the same name are replaced one by one, after all have been written.
        card: the model card, by default [`create_model_card`]`(model)`. Secrets in it are redacted.
        state_dict: the weights to write, by default the model's; in another type, as of [`narrow_weights`], they are
            loaded as the model's.

    Returns:
        The names of the files written, sorted.

    Raises:
        ValueError: a class outside transformers is not in `auto_map`, or a unit is not in a file, so that the
            checkpoint would not load elsewhere; or a configuration or the card has a path of this machine.
            `directory` is then unchanged.
    """
    directory = Path(directory)
    provenance = find_provenance(model)
    if card is None:
        card = create_model_card(model, provenance=provenance, curve=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as partial:
        model.save_pretrained(partial, state_dict=state_dict)
        tokenizer.save_pretrained(partial)
        write_provenance(provenance, partial)
        text = redact_secrets(str(card))
        if CURVE_FILE in text and not plot_training_curve(provenance, Path(partial, CURVE_FILE)):
            text = _CURVE_LINE.sub("", text)
        Path(partial, "README.md").write_text(text, encoding="utf-8")
        _check_no_local_paths(Path(partial))
        if not Path(partial, "adapter_config.json").is_file():  # an adapter is loaded into its base model
            auto_class = getattr(type(model), "_auto_class", None) or "AutoModelForCausalLM"
            _check_registered(model, Path(partial, "config.json"), "AutoConfig", auto_class)
            _check_unit(model, Path(partial, "config.json"))
        _check_registered(tokenizer, Path(partial, "tokenizer_config.json"), "AutoTokenizer")
        _check_code_files(Path(partial))
        directory.mkdir(exist_ok=True)
        names = sorted(os.listdir(partial))
        for name in names:
            os.replace(os.path.join(partial, name), directory / name)
    return sorted([*names, *[EVAL_RESULTS_FILE] * write_eval_results(provenance, directory)])


def push_checkpoint_to_hub(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    repo_id: str,
    card: ModelCard | str | None = None,
    *,
    state_dict: dict[str, Tensor] | None = None,
    private: bool | None = None,
    commit_message: str = "Upload model, tokenizer, code and card",
) -> str:
    """Upload the files of [`save_checkpoint_for_hub`] as one commit and return its URL.

    The token is read from `HF_TOKEN` or from `hf auth login`; it is not an argument, so that no log can show it.
    """
    api = HfApi()
    with tempfile.TemporaryDirectory() as temporary:
        directory = os.path.join(temporary, "checkpoint")
        save_checkpoint_for_hub(model, tokenizer, directory, card, state_dict=state_dict)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=directory,
            commit_message=commit_message,
            delete_patterns=EVAL_RESULTS_FILE,  # results of other weights
        ).commit_url


def narrow_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights by name, those whose values bfloat16 can hold in bfloat16; tied ones stay one tensor."""
    narrow: dict[int, Tensor] = {}
    state = model.state_dict()
    for tensor in state.values():
        if tensor.is_floating_point() and tensor.data_ptr() not in narrow:
            rounded = tensor.bfloat16()
            narrow[tensor.data_ptr()] = rounded if torch.equal(rounded.to(tensor.dtype), tensor) else tensor
    return {name: narrow.get(tensor.data_ptr(), tensor) for name, tensor in state.items()}


def stores_bfloat16(directory: str | os.PathLike) -> bool:
    """True if the weights file in a directory has tensors in bfloat16."""
    path = Path(directory, SAFE_WEIGHTS_NAME)
    if not path.is_file():
        return False
    with safe_open(path, framework="pt") as file:
        return any(file.get_slice(name).get_dtype() == "BF16" for name in file.keys())  # noqa: SIM118


def _check_no_local_paths(directory: Path) -> None:
    """Raise a ValueError if a configuration or the card has a path of this machine: it names users and projects."""
    for name in _PUBLISHED_TEXTS:
        path = directory / name
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        for part in _texts(json.loads(text)) if text and name.endswith(".json") else [text]:
            if found := find_local_path(part):
                raise ValueError(f"`{name}` has the local path {found!r}, which would be published; remove it.")


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _check_registered(part: PreTrainedModel | PreTrainedTokenizerBase, path: Path, *auto_classes: str) -> None:
    if type(part).__module__.startswith("transformers."):
        return
    if missing := [name for name in auto_classes if name not in _auto_map(path)]:
        raise ValueError(
            f"`{path.name}` of {type(part).__name__} names no `{missing[0]}`, so it would not load elsewhere; call "
            f"`{type(part).__name__}.register_for_auto_class()` first."
        )


def _check_code_files(directory: Path) -> None:
    """Raise a ValueError if a code file that `auto_map` names is missing, as with classes that a repository had."""
    for path in (directory / "config.json", directory / "tokenizer_config.json"):
        for classes in _auto_map(path).values() if path.is_file() else ():
            # "modeling_x.XModel" or "owner/name--modeling_x.XModel"; of tokenizers a list, in which None may be
            for reference in filter(None, classes if isinstance(classes, list) else [classes]):
                name = f"{reference.split('--')[-1].split('.')[0]}.py"
                if not (directory / name).is_file():
                    raise ValueError(
                        f"The checkpoint lacks `{name}`, which `{path.name}` needs, so it would not load elsewhere."
                    )


def _check_unit(model: PreTrainedModel, path: Path) -> None:
    """Raise a ValueError if a user's own unit has no file that could be uploaded."""
    unit = getattr(model.config, "recurrent_unit", None)
    if unit in OWN_CODE and AUTO_MAP_KEY not in _auto_map(path):
        raise ValueError(
            f"The model has the recurrent unit {unit!r}, whose code is not in a file, so it would not load elsewhere; "
            "move the class from `__main__` to a file, and import that."
        )


def _auto_map(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")).get("auto_map", {})
