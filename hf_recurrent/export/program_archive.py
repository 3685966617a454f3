"""Archives of `torch.export`, checked before torch reads them: torch evaluates strings and unpickles parts of them.

Only content as [`export_step`] writes it passes: plain tensors, and a graph of functional operations of ATen. Pickles,
custom objects, expressions that are more than a symbol and names of files are refused.
"""

import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_FILES = re.compile(
    r"[^/]+/(data/weights/(weight_\d+|model_weights_config\.json)|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|data/sample_inputs/model\.pt|models/model\.json|archive_format|archive_version|byteorder"
    r"|\.data/(version|serialization_id))"
)
_TENSOR_FILE = re.compile(r"(weight|tensor)_\d+")
_OPERATION = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)")
_ARITHMETIC = re.compile(r"_operator\.(add|sub|mul|floordiv|getitem)")
_SYMBOL = re.compile(r"-?\d+|Symbol\('[su]\d+'(, \w+=True)*\)")
_TEXTS = {"none", "tanh", "floor", "trunc"}  # of operations such as gelu and div
_FOREIGN_KEYS = {"as_custom_obj", "as_operator", "as_graph", "source_fn_stack", "__enum__"}
_CONTAINERS = {"builtins.tuple", "builtins.list", "builtins.dict", None}


def checked_archive(path: Path) -> io.BytesIO:
    """The archive at `path`, written anew from the parts that were checked.

    Raises:
        ValueError: the file is damaged, or holds something that torch would run.
    """
    copy = io.BytesIO()
    try:
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as checked:
            names = archive.namelist()
            if len(set(names)) != len(names) or len({name.partition("/")[0] for name in names}) != 1:
                raise _Refusal("has files of one name, or several folders")
            for name in names:
                content = archive.read(name)
                _check_file(name, content)
                checked.writestr(name, content)
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, _Refusal):
            raise ValueError(f"`{path}` {error}; it is not loaded.") from error
        raise ValueError(f"`{path}` is damaged: {str(error).rstrip('.')}.") from error
    copy.seek(0)
    return copy


class _Refusal(ValueError):
    """The reason for a refusal, as the end of a sentence."""


def _check_file(name: str, content: bytes) -> None:
    if not _FILES.fullmatch(name):
        raise _Refusal(f"holds the file {name!r}, which may be a pickle or code")
    if name.endswith("sample_inputs/model.pt") and content:
        raise _Refusal("holds pickled sample inputs")
    if name.endswith("_config.json"):
        for payload in json.loads(content)["config"].values():
            if payload["use_pickle"] is not False or not _TENSOR_FILE.fullmatch(payload["path_name"]):
                raise _Refusal("holds pickled tensors")
    elif name.endswith("models/model.json"):
        for key, value in _fields(json.loads(content)):
            _check_field(key, value)


def _fields(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """All keys with their values, at every depth."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield name, part
            yield from _fields(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from _fields(part, key)


def _check_field(key: str, value: Any) -> None:
    if key in _FOREIGN_KEYS:
        raise _Refusal(f"holds {key!r}, which is not part of a step")
    if key == "target" and not _is_allowed(value):
        raise _Refusal(f"calls {value!r}, which is not an operation of a step")
    if key == "expr_str" and not _SYMBOL.fullmatch(value):
        raise _Refusal(f"has the expression {value!r}, which is more than a symbol")
    if (key == "as_string" and value not in _TEXTS) or key == "as_strings":
        raise _Refusal(f"passes the text {value!r} to an operation")
    if key in ("in_spec", "out_spec") and value:
        for name, part in _fields(json.loads(value)):
            if name not in ("type", "context", "children_spec") or (name == "type" and part not in _CONTAINERS):
                raise _Refusal(f"has inputs or outputs of a foreign kind, {part!r}")


def _is_allowed(target: str) -> bool:
    if not (match := _OPERATION.fullmatch(target)):
        return bool(_ARITHMETIC.fullmatch(target))
    operation = getattr(getattr(torch.ops.aten, match[1], None), match[2], None)
    return isinstance(operation, torch._ops.OpOverload) and not operation._schema.is_mutable
