"""Loading of models and tokenizers that executes nothing of theirs: no pickle, and no code unless it is trusted."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import (
    ADAPTER_SAFE_WEIGHTS_NAME,
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
    find_adapter_config_file,
    is_peft_available,
    logging,
)

from hf_recurrent.checkpoints.files import read_json
from hf_recurrent.checkpoints.hub_repositories import check_repository
from hf_recurrent.checkpoints.provenance_files import remember_location

logger = logging.get_logger(__name__)

_INDEX_ENDING = ".safetensors.index.json"
_UNSAFE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")


def load_model(
    auto_class: Any, name: str | os.PathLike, *, argument: str, trust_remote_code: bool = False, **options: Any
) -> PreTrainedModel:
    """Load a saved model from safetensors files.

    Args:
        auto_class: Auto class of transformers, such as `AutoModelForCausalLM`.
        name: directory, or owner/name on the Hub.
        argument: the argument that holds `name`, for messages.
        trust_remote_code: run the model code in the repository `name`; never an adapter's base model's.
        options: further arguments of `from_pretrained`.

    Raises:
        ValueError: the model is missing or damaged, has no safetensors weights, lacks a weight, has one that is NaN or
            infinite, or needs code that is not trusted.
    """
    name = os.fspath(name)
    try:
        base = _check_files(name)
        options |= {"use_safetensors": True, "trust_remote_code": trust_remote_code and base == name}
        with _without_report():
            model, info = auto_class.from_pretrained(
                name, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
        if missing := sorted(info["missing_keys"]):
            tied = getattr(model, "all_tied_weights_keys", None) or ()
            name_of_one = next((weight for weight in missing if weight not in tied), missing[0])
            raise ValueError(f"the weight `{name_of_one}` is missing.")
        for weight, stored, needed in sorted(info["mismatched_keys"]):
            raise ValueError(f"the weight `{weight}` has shape {tuple(stored)}; the model needs {tuple(needed)}.")
        if unexpected := sorted(info["unexpected_keys"]):
            logger.warning(f"`{argument}` is {name!r}; its weight `{unexpected[0]}` is not used by the model.")
        for weight, tensor in model.named_parameters():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise ValueError(f"the weight `{weight}` has NaN or infinite values.")
    except MemoryError:
        raise
    except Exception as error:  # for missing and damaged files, each library raises types of its own
        raise _not_loaded(argument, name, "it", error) from error
    remember_location(model, name)
    return model


def auto_class_of(directory: str | os.PathLike) -> Any:
    """The Auto class of the model that was saved in `directory`: a classifier, or else a language model."""
    path = os.path.join(directory, CONFIG_NAME)
    config = read_json(path) if os.path.isfile(path) else {}
    architectures = (config.get("architectures") if isinstance(config, dict) else None) or [""]
    classifies = isinstance(architectures, list) and str(architectures[0]).endswith("ForSequenceClassification")
    return AutoModelForSequenceClassification if classifies else AutoModelForCausalLM


@contextmanager
def _without_report() -> Iterator[None]:
    """Hide the table of missing and unused weights, which our messages replace."""
    before = logging.get_verbosity()
    logging.set_verbosity(max(before, logging.ERROR))
    try:
        yield
    finally:
        logging.set_verbosity(before)


def load_tokenizer(
    name: str | os.PathLike, *, argument: str, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a saved tokenizer; arguments as of [`load_model`].

    Raises:
        ValueError: the tokenizer is missing or damaged, or needs code that is not trusted.
    """
    name = os.fspath(name)
    try:
        check_repository(name)
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # as in `load_model`
        raise _not_loaded(argument, name, "its tokenizer", error) from error


def _not_loaded(argument: str, name: str, part: str, error: Exception) -> ValueError:
    reason = (str(error).strip().splitlines() or [""])[0]
    if "trust_remote_code=True" in str(error):
        reason = "it needs the code in its repository, which is run only with `trust_remote_code`."
    elif not isinstance(error, OSError | ValueError | ImportError):
        reason = f"{type(error).__name__}: {reason}"
    return ValueError(f"`{argument}` is {name!r}; {part} cannot be loaded: {reason}")


def _check_files(name: str) -> str:
    """Raise a ValueError if transformers would read a pickle; return the name of the model with the configuration.

    Even with `use_safetensors=True`, transformers reads a pickle of an adapter, and one that a configuration or an
    index of shards names.
    """
    if os.path.isfile(name):
        raise ValueError("it must be a directory, or owner/name on the Hub.")
    check_repository(name)
    base = name
    if (adapter := find_adapter_config_file(name)) is not None:
        _find_file(name, ADAPTER_SAFE_WEIGHTS_NAME)
        if not os.path.isfile(os.path.join(name, CONFIG_NAME)):
            base = _read_field(adapter, "base_model_name_or_path", str)
            if os.path.isfile(base):
                raise ValueError(f"its base model is {base!r}; it must be a directory, or owner/name on the Hub.")
    configuration, _ = PreTrainedConfig.get_config_dict(base)
    weights = configuration.get("transformers_weights") or _find_weights(base)
    files = [weights]
    if weights.endswith(_INDEX_ENDING):
        files = sorted(set(_read_field(_find_file(base, weights), "weight_map", dict).values()))
    for file in files:
        if not file.endswith(".safetensors") or os.path.basename(file) != file:
            raise _unsafe(file)
    if adapter is not None and not is_peft_available():
        raise ImportError("it has an adapter, which needs the peft package: pip install 'hf-recurrent[peft]'")
    return base


def _find_weights(name: str) -> str:
    """The file with all weights, or the index of its shards."""
    try:
        _find_file(name, SAFE_WEIGHTS_NAME)
    except OSError:
        _find_file(name, SAFE_WEIGHTS_INDEX_NAME)
        return SAFE_WEIGHTS_INDEX_NAME
    return SAFE_WEIGHTS_NAME


def _find_file(name: str, file: str) -> str:
    """Path of a file in a directory or in a repository on the Hub; an OSError if there is none."""
    if not os.path.isdir(name):
        return cached_file(name, file)
    if os.path.isfile(path := os.path.join(name, file)):
        return path
    if unsafe := sorted(other for other in os.listdir(name) if other.endswith(_UNSAFE_ENDINGS)):
        raise _unsafe(unsafe[0])
    raise OSError(f"there is no `{file}`.")


def _read_field(path: str, field: str, kind: type) -> Any:
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get(field), kind):
        raise ValueError(f"`{os.path.basename(path)}` has no valid `{field}`.")
    return content[field]


def _unsafe(file: str) -> OSError:
    return OSError(f"its weights are in {file!r}, but only safetensors are read, because other files can run code.")
