"""Registers our classes with transformers' Auto classes, and targets of adapters with PEFT, without importing torch.

Importing an auto module of transformers loads torch, which takes seconds. Classes are therefore registered at once if
the auto module is loaded already, and otherwise right after it is loaded.
"""

import importlib.abc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

_AUTO = "transformers.models.auto"
_LANGUAGE_MODEL = {
    "AutoModel": "Model",
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
}
# Family → the prefix of its class names, and the suffix for each Auto class.
_FAMILIES = {
    "memora": ("Memora", _LANGUAGE_MODEL),
    "hawk": ("Hawk", _LANGUAGE_MODEL),
    "mgrade": ("Mgrade", _LANGUAGE_MODEL),
    "lru": ("Lru", _LANGUAGE_MODEL),
    "smt_rnn": ("SmtRnn", _LANGUAGE_MODEL),
    "smt_teacher": ("SmtTeacher", {"AutoModel": "Model"}),
}


def _public(name: str) -> Any:
    return getattr(sys.modules[__package__], name)


def _configurations() -> Iterator[tuple[str, type]]:
    return ((family, _public(f"{prefix}Config")) for family, (prefix, _) in _FAMILIES.items())


def _register_configurations(auto: ModuleType) -> None:
    for family, config_class in _configurations():
        auto.AutoConfig.register(family, config_class, exist_ok=True)


def _register_models(auto: ModuleType) -> None:
    for family, config_class in _configurations():
        prefix, endings = _FAMILIES[family]
        for auto_class, ending in endings.items():
            getattr(auto, auto_class).register(config_class, _public(prefix + ending), exist_ok=True)


def _register_tokenizers(auto: ModuleType) -> None:
    # A checkpoint names its tokenizer class, which transformers looks up among these two.
    tokenizers = {"tokenizer_class": _public("ByteTokenizer"), "slow_tokenizer_class": _public("DNATokenizer")}
    for _, config_class in _configurations():
        auto.AutoTokenizer.register(config_class, **tokenizers, exist_ok=True)


# Projections of all layers, as PEFT's defaults for models with gates.
_ADAPTED = {
    "memora": ["gate_proj", "input_projection", "recurrence_gate", "input_gate", "out_proj", "up_proj", "down_proj"],
    "hawk": ["gate_proj", "in_proj", "recurrence_gate", "input_gate", "out_proj", "up_proj", "down_proj"],
    "mgrade": ["candidate", "update_gate", "up_proj", "down_proj"],
    "lru": ["input_projection", "state_map", "value_proj", "gate_proj"],
    "smt_rnn": ["q_proj", "kv_proj", "o_proj", "up_proj", "down_proj"],
}


def _register_adapters(constants: ModuleType) -> None:
    for name, mapping in vars(constants).items():
        if name.endswith("_TARGET_MODULES_MAPPING") and "llama" in mapping:
            mapping.update({family: mapping.get(family, modules) for family, modules in _ADAPTED.items()})


_REGISTRATIONS = {
    f"{_AUTO}.configuration_auto": _register_configurations,
    f"{_AUTO}.modeling_auto": _register_models,
    f"{_AUTO}.tokenization_auto": _register_tokenizers,
    "peft.utils.constants": _register_adapters,
}


# Our classes need these modules: importing them fails while one of these is only partly executed.
_NEEDED = {"transformers.modeling_layers", "transformers.modeling_utils"}


class _RegisterAfterImport(importlib.abc.MetaPathFinder):
    """Finds these modules as usual and registers our classes after the outermost of them has been executed."""

    def __init__(self):
        self._executing = 0
        self._pending = dict(_REGISTRATIONS)

    def find_spec(self, fullname, path, target=None):
        if fullname not in _REGISTRATIONS and fullname not in _NEEDED:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            if spec := finder.find_spec(fullname, path, target):
                spec.loader.exec_module = partial(self._execute, spec.loader.exec_module)
                return spec
        return None

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        self._executing += 1
        try:
            execute(module)
        finally:
            self._executing -= 1
        self.register_loaded()

    def register_loaded(self) -> None:
        """Register with every loaded auto module, unless a module is still being executed."""
        while not self._executing and (loaded := [name for name in self._pending if name in sys.modules]):
            self._pending.pop(loaded[0])(sys.modules[loaded[0]])


def register() -> None:
    """Register our families with `AutoConfig`, `AutoTokenizer` and the Auto classes of models."""
    if not any(isinstance(finder, _RegisterAfterImport) for finder in sys.meta_path):
        finder = _RegisterAfterImport()
        sys.meta_path.insert(0, finder)
        finder.register_loaded()
