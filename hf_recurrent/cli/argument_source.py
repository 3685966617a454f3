"""Dataclasses of arguments, read from their source: importing them imports torch and takes seconds."""

import argparse
import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hf_recurrent


@dataclass(frozen=True)
class Argument:
    """A field of a dataclass of arguments.

    Args:
        type: its annotation.
        choices: allowed values; None if any is, or if they are not known without an import.
    """

    name: str
    default: Any
    help: str
    type: str = "str"
    choices: tuple[str, ...] | None = None

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add its flags, those of `HfArgumentParser`; a switch that is on by default has a `--no_` form too."""
        choices = self.choices and list(self.choices)
        parser.add_argument(*_spellings(self.name), help=self.help, choices=choices)
        if self.type.startswith("bool") and self.default is True:
            parser.add_argument(*_spellings(f"no_{self.name}"), help=self.help, action="store_true")


def own_fields(file: str, class_name: str) -> list[Argument]:
    """The fields with a help text of a dataclass in a file of this package."""
    path = next(path for folder in hf_recurrent.__path__ if (path := Path(folder, file)).is_file())
    tree = _parsed(path)
    found = []
    for name, type_, call in _annotated_calls(tree, class_name):
        default, help = map(ast.literal_eval, call.args[:2])
        chosen = call.args[2] if len(call.args) > 2 else next((k.value for k in call.keywords if k.arg), None)
        found.append(Argument(name, default, help, type_, _choices(chosen, tree)))
    return found


@cache
def training_arguments() -> tuple[Argument, ...]:
    """The fields of `TrainingArguments` of transformers, with the values of their enumerations."""
    folder = Path(importlib.util.find_spec("transformers").origin).parent
    trees = [_parsed(folder / name) for name in ("trainer_utils.py", "training_args.py")]
    enums = {node.name: _enum_values(node) for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    found = []
    for name, type_, call in _annotated_calls(trees[-1], "TrainingArguments"):
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        metadata = given.get("metadata")
        texts = (
            dict(zip(map(_literal, metadata.keys), map(_literal, metadata.values), strict=True)) if metadata else {}
        )
        choices = enums.get(type_.partition(" | ")[0]) or texts.get("choices")
        found.append(
            Argument(name, _literal(given.get("default")), texts.get("help") or "", type_, choices and tuple(choices))
        )
    return tuple(found)


def _annotated_calls(tree: ast.Module, class_name: str) -> Iterator[tuple[str, str, ast.Call]]:
    """(name, annotation, call) of the fields `name: annotation = call(…)` of a class."""
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name).body
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            yield node.target.id, ast.unparse(node.annotation), node.value


def _choices(node: ast.expr | None, tree: ast.Module) -> tuple[str, ...] | None:
    """A literal, or the value of a constant of the same file."""
    if isinstance(node, ast.Name):
        values = {part.targets[0].id: part.value for part in tree.body if _assigns_name(part)}
        node = values.get(node.id)
    return None if node is None else tuple(ast.literal_eval(node))


def _assigns_name(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)


def _enum_values(node: ast.ClassDef) -> tuple[str, ...] | None:
    if not any(isinstance(base, ast.Name) and base.id == "ExplicitEnum" for base in node.bases):
        return None
    return tuple(_literal(part.value) for part in node.body if isinstance(part, ast.Assign))


def _literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:  # an expression
        return None


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
