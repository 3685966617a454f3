"""Checkpoints that load where this package is not installed: weights, tokenizer, code and card in one directory."""

import json
import os
import re
import tempfile
from pathlib import Path

from huggingface_hub import HfApi, ModelCard
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_recurrent.hub.model_card import create_model_card, redact_secrets

_SIBLING_IMPORT = re.compile(r"^\s*from\s+\.(\w+)\s+import\b", re.MULTILINE)


def save_checkpoint_for_hub(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: str | os.PathLike,
    card: ModelCard | str | None = None,
) -> list[str]:
    """Write everything that a repository on the Hub needs, and check that it is complete.

    Args:
        model: The model; its weights are written as safetensors and its code, where it is ours, beside them.
        tokenizer: Written with its code.
        directory: Made if need be. Files of the same name are replaced, one by one and only after all were written.
        card: Model card, by default [`create_model_card`]`(model)`. Secrets in it are blanked out.

    Returns:
        The names of the files written, sorted.

    Raises:
        ValueError: a file that the checkpoint's own code or `auto_map` names would be missing, or `auto_map` does not
            name a class that is no part of transformers, so that it would not load elsewhere. `directory` is then left
            as it was.
    """
    directory = Path(directory)
    if card is None:
        card = create_model_card(model)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        Path(partial, "README.md").write_text(redact_secrets(str(card)), encoding="utf-8")
        check_self_contained(partial)
        _check_auto_map(model, partial, "config.json", ("AutoConfig", "AutoModelForCausalLM"))
        _check_auto_map(tokenizer, partial, "tokenizer_config.json", ("AutoTokenizer",))
        directory.mkdir(exist_ok=True)
        names = sorted(os.listdir(partial))
        for name in names:
            os.replace(os.path.join(partial, name), directory / name)
    return names


def push_checkpoint_to_hub(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    repo_id: str,
    card: ModelCard | str | None = None,
    *,
    private: bool | None = None,
    commit_message: str = "Upload model, tokenizer, code and card",
) -> str:
    """Upload what [`save_checkpoint_for_hub`] writes, as one commit, and return the address of that commit.

    The token is the one of `HF_TOKEN` or of `hf auth login`; it is no argument, so that no log can show it.
    """
    api = HfApi()
    with tempfile.TemporaryDirectory() as directory:
        folder = os.path.join(directory, "checkpoint")
        save_checkpoint_for_hub(model, tokenizer, folder, card)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        return api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message).commit_url


def check_self_contained(directory: str | os.PathLike) -> None:
    """Raise a ValueError when `directory` lacks code that its configurations or its code files refer to."""
    directory = Path(directory)
    needed: dict[str, str] = {}  # file -> who needs it
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((directory / name).read_text(encoding="utf-8"))
        references = settings.get("auto_map", {}).values()
        for reference in references:
            for part in reference if isinstance(reference, list) else [reference]:
                if part is not None:
                    needed[f"{part.split('--')[-1].split('.')[0]}.py"] = name
    for file in directory.glob("*.py"):
        for sibling in _SIBLING_IMPORT.findall(file.read_text(encoding="utf-8")):
            needed[f"{sibling}.py"] = file.name
    for name, reason in needed.items():
        if not (directory / name).is_file():
            raise ValueError(
                f"The checkpoint lacks `{name}`, which its `{reason}` needs, so it would not load elsewhere."
            )


def _check_auto_map(part: PreTrainedModel | PreTrainedTokenizerBase, directory: str, file: str, names: tuple) -> None:
    if type(part).__module__.startswith("transformers."):
        return
    auto_map = json.loads(Path(directory, file).read_text(encoding="utf-8")).get("auto_map", {})
    for name in names:
        if name not in auto_map:
            raise ValueError(
                f"`{file}` of {type(part).__name__} names no `{name}`, so it would not load elsewhere; call "
                f"`{type(part).__name__}.register_for_auto_class()` first."
            )
