"""Private names of other libraries: all of them are listed, and the installed versions have them."""

import ast
import importlib
import importlib.metadata
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
from private_names import PRIVATE_NAMES

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(
    path
    for folder in ("hf_recurrent", "modeling", "trainers", "scripts", "metrics")
    for path in (ROOT / folder).rglob("*.py")
    if path.relative_to(ROOT).parts[1] not in ("modeling", "trainers")  # links
)
FOREIGN = {
    *("torch", "transformers", "accelerate", "safetensors", "tokenizers", "huggingface_hub", "numpy"),
    *("setuptools", "triton", "datasets", "evaluate", "peft"),
}
LISTED_PARTS = {part for name in PRIVATE_NAMES for part in name.split(".")}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def sets_on_itself(kind: type, name: str) -> bool:
    """True if methods of a class use the attribute `name` of their instance."""
    return re.search(rf"\bself\.{name}\b", _source(kind)) is not None


@cache
def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # written in C
        return ""


def has_name(path: str) -> bool:
    """True if the installed libraries have it: a module, an attribute of one, or an instance's attribute."""
    first, *rest = path.split(".")
    found = importlib.import_module(first)
    for done, name in enumerate(rest):
        if inspect.isclass(found) and not hasattr(found, name):
            return any(sets_on_itself(kind, name) for kind in found.__mro__)
        if not hasattr(found, name):
            try:
                importlib.import_module(".".join([first, *rest[: done + 1]]))
            except ModuleNotFoundError:
                return False
        found = getattr(found, name)
    return True


# `generate` asks whether a model has it, and the class itself does not define it.
ASKED_FOR = {"transformers.GenerationMixin._reorder_cache": "transformers.generation.utils"}


@pytest.mark.parametrize("path", PRIVATE_NAMES)
def test_the_installed_version_has_it(path):
    library, name = path.split(".")[0], path.rpartition(".")[2]
    pytest.importorskip(library)  # a peer of benchmarks may be missing
    if path in ASKED_FOR:
        exists = name in inspect.getsource(importlib.import_module(ASKED_FOR[path]))
    else:
        exists = has_name(path)
    if not exists:
        version = importlib.metadata.version(library)
        message = f"{library} {version} has no {path}, which hf_recurrent uses: {PRIVATE_NAMES[path]}."
        pytest.fail(f"{message} Adapt the code that uses it and tests/private_names.py.", pytrace=False)


def own_names(tree: ast.AST) -> set[str]:
    """Names that a file of ours defines: functions, classes, variables and attributes of its instances."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def used_names(tree: ast.AST):
    """Private names that a file reads or writes, each with its line: attributes, imports and getattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = [alias.name if isinstance(node, ast.Import) else f"{module}.{alias.name}" for alias in node.names]
            for name in names:
                if name.split(".")[0] in FOREIGN:
                    yield from ((part, node.lineno) for part in name.split(".") if is_private(part))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = getattr(node.args[1], "value", None)  # of a constant
            if node.func.id in ("getattr", "hasattr", "setattr", "delattr") and is_private(str(name)):
                yield name, node.lineno


def own_classes():
    """Every class of the package with its syntax tree and its bases in other libraries."""
    for path in FILES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if parts[0] in ("scripts", "metrics") or not any(isinstance(node, ast.ClassDef) for node in tree.body):
            continue
        name = ".".join(parts if parts[0] == "hf_recurrent" else ("hf_recurrent", *parts))
        try:
            module = importlib.import_module(name)
        except ImportError:
            assert "kernels" in parts or parts[-1] == "lm_eval_model"  # not built, or Triton or lm_eval is missing
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                kind = getattr(module, node.name)
                bases = [base for base in kind.__mro__[1:] if base.__module__.split(".")[0] in FOREIGN]
                yield path, node, kind, bases


@pytest.mark.long
def test_every_private_name_that_is_used_is_listed():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    ours = set().union(*map(own_names, trees.values()))
    missing = {
        f"{path.relative_to(ROOT)}:{line} uses {name}"
        for path, tree in trees.items()
        for name, line in used_names(tree)
        if name not in ours and name not in LISTED_PARTS
    }
    for path, node, _, bases in own_classes():
        names = {part for part in own_names(node) if is_private(part)}
        for name in names - LISTED_PARTS:
            for base in bases:
                if name in vars(base) or sets_on_itself(base, name):
                    missing.add(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has a {name}, as {base.__name__}")
    assert not missing, "not in tests/private_names.py:\n" + "\n".join(sorted(missing))


def test_every_listed_name_is_used():
    words = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in FILES)))
    unused = [path for path in PRIVATE_NAMES if path.rpartition(".")[2] not in words]
    assert not unused, f"no longer used, so remove from tests/private_names.py: {', '.join(unused)}"


def test_overrides_take_the_arguments_of_the_installed_version():
    wrong = []
    for path, node, kind, bases in own_classes():
        for method in (child for child in node.body if isinstance(child, ast.FunctionDef)):
            base = next((base for base in bases if method.name in vars(base)), None)
            if base is None or f"transformers.{base.__name__}.{method.name}" not in PRIVATE_NAMES:
                continue
            ours = inspect.signature(getattr(kind, method.name)).parameters
            theirs = inspect.signature(getattr(base, method.name)).parameters
            kinds = {parameter.kind for parameter in ours.values()}
            lacking = [name for name in theirs if name not in ours and theirs[name].kind.name[:4] != "VAR_"]
            if lacking and not {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL} & kinds:
                wrong.append(f"{path.relative_to(ROOT)}: {node.name}.{method.name} lacks {', '.join(lacking)}")
    assert not wrong, "\n".join(wrong)
