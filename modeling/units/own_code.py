"""Code of a user-defined recurrent unit in the form in which a checkpoint holds it: a file beside the gathered code.

The file may import the standard library, `INSTALLED`, and names of `hf_recurrent` with code in
`hf_recurrent.modeling`, which it imports from `recurrent_shared.py` in a checkpoint (`hf_recurrent/hub/packager.py`).
"""

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

# Key of a user's own unit in `auto_map` of a configuration.
AUTO_MAP_KEY = "recurrent_unit"
# The file of a checkpoint with units, blocks and the scan, and the folders that it is gathered from.
SHARED_FILE = "recurrent_shared"
SHARED_FOLDERS = ("block", "scan", "step", "units")
# False in the files of a checkpoint.
IN_PACKAGE = __package__.startswith("hf_recurrent.")
# Packages that every machine has on which a checkpoint loads.
INSTALLED = ("numpy", "safetensors", "torch", "transformers")
_ALLOWED = (
    "a file with a recurrent unit is saved with every checkpoint, so it may import the standard library, "
    f"{', '.join(INSTALLED)}, and names of `hf_recurrent` with code in `hf_recurrent.modeling`"
)


@dataclass(frozen=True)
class OwnCode:
    """The code of a class that a user wrote.

    Args:
        class_name: name of the class.
        file: name of its file in a checkpoint; None if it is not in a file (`__main__`, a notebook).
        text: content of the file, or else the source of the class; None if there is none.
    """

    class_name: str
    file: str | None
    text: str | None

    @property
    def reference(self) -> str | None:
        """The class as in `auto_map`, such as "leaky_unit.LeakyIntegrator"."""
        return None if self.file is None else f"{self.file.removesuffix('.py')}.{self.class_name}"


# Name of a registered unit → its code when it was registered: the file may be edited while a model trains.
OWN_CODE: dict[str, OwnCode] = {}


def own_code_of(cls: type) -> OwnCode:
    """The code of a class.

    Raises:
        ValueError: its file would not load from a checkpoint; the message names the file and the reason.
    """
    module = sys.modules[cls.__module__]
    path = getattr(module, "__file__", None) or ""
    if cls.__module__ in ("__main__", "__mp_main__") or not path.endswith(".py"):
        try:
            return OwnCode(cls.__name__, None, inspect.getsource(cls))
        except (OSError, TypeError):
            return OwnCode(cls.__name__, None, None)
    path = Path(path)
    if cls.__qualname__ != cls.__name__:
        raise ValueError(f"`{cls.__qualname__}` must be defined at the top level of `{path.name}`.")
    if not path.stem.isidentifier():
        raise ValueError(f"`{path.name}` must have the name of a Python module; rename it, such as to `my_unit.py`.")
    from_checkpoint = module.__package__ == __package__
    if not from_checkpoint and (path.stem == SHARED_FILE or _module_of_file(path.stem) is not None):
        raise ValueError(f"`{path.name}` is also the name of a file of this package in every checkpoint; rename it.")
    text = path.read_text(encoding="utf-8-sig")
    return OwnCode(cls.__name__, path.name, with_relative_imports(text, path.name, from_checkpoint))


def with_relative_imports(text: str, name: str, from_checkpoint: bool = False) -> str:
    """The text of a Python file with relative imports in place of those of `hf_recurrent`.

    Args:
        text: content of the file.
        name: its name, for messages.
        from_checkpoint: it lies in a checkpoint, so it may have relative imports.

    Raises:
        ValueError: it imports something that a checkpoint does not have.
    """
    return _with_imports(text, name, from_checkpoint, lambda found: f".{_saved_file(found)}")


def with_absolute_imports(text: str, name: str) -> str:
    """The text of a unit's file in a checkpoint with imports of `hf_recurrent` in place of relative ones.

    Raises:
        ValueError: it imports something that is not in `hf_recurrent.modeling`.
    """
    return _with_imports(text, name, True, lambda found: found)


def _with_imports(text: str, name: str, from_checkpoint: bool, written: Callable[[str], str]) -> str:
    tree = ast.parse(text)
    lines, optional = text.encode().splitlines(keepends=True), set(_optional_imports(tree))
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in sorted(statements, key=lambda node: -node.lineno):  # from the last, so that line numbers stay valid
        own = _modules_of(node, name, from_checkpoint, node in optional)
        if own is None:
            continue
        first, last = node.lineno - 1, node.end_lineno - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        if before.strip():
            raise ValueError(f"`{name}`, line {node.lineno}: the import of `hf_recurrent` must begin its line.")
        imports: dict[str, list[str]] = {}
        for module, names in own.items():
            imports.setdefault(written(module), []).extend(names)
        new = [f"from {module} import {', '.join(names)}".encode() for module, names in imports.items()]
        lines[first : last + 1] = [before + (b"\n" + before).join(new) + after]
    return b"".join(lines).decode()


def _optional_imports(tree: ast.AST) -> Iterator[ast.AST]:
    """Imports in `try` blocks whose failure is handled; transformers does not ask for them either."""
    for block in ast.walk(tree):
        if isinstance(block, ast.Try) and block.handlers:
            for statement in block.body:
                yield from ast.walk(statement)


def _modules_of(
    node: ast.Import | ast.ImportFrom, name: str, from_checkpoint: bool, is_optional: bool
) -> dict[str, list[str]] | None:
    """Module of `hf_recurrent.modeling` → names that an import takes from it; None for allowed other imports."""
    line, package = f"`{name}`, line {node.lineno}:", __package__.partition(".")[0]
    if isinstance(node, ast.ImportFrom) and node.level:
        if from_checkpoint and node.level == 1 and not IN_PACKAGE and _module_of_file(node.module) is not None:
            return None
        if not from_checkpoint or node.level != 1 or not (found := _gathered(node)):
            raise ValueError(f"{line} relative imports are not possible; {_ALLOWED}.")
        return found
    modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    for module in modules:
        top = module.partition(".")[0]
        if top == package and isinstance(node, ast.Import):
            raise ValueError(f"{line} write `from {package} import NAME` in place of `import {module}`.")
        if top != package and top not in (*INSTALLED, *sys.stdlib_module_names) and not is_optional:
            raise ValueError(f"{line} `{top}` is imported, but {_ALLOWED}.")
    if modules[0].partition(".")[0] != package:
        return None
    found: dict[str, list[str]] = {}
    for alias in node.names:
        holder = _holder(sys.modules[package], alias.name) if modules[0] == package else modules[0]
        if _saved_file(holder) is None:
            raise ValueError(
                f"{line} `{alias.name}` of `{modules[0]}` is imported, but {_ALLOWED}; put the unit in its own file."
            )
        found.setdefault(holder, []).append(ast.unparse(alias))
    return found


def _holder(package: ModuleType, name: str) -> str:
    """The module that defines a public name."""
    return str(getattr(getattr(package, name, None), "__module__", ""))


def _gathered(node: ast.ImportFrom) -> dict[str, list[str]]:
    """Module of the package → names that a relative import in a checkpoint takes from it; empty if one is unknown."""
    found: dict[str, list[str]] = {}
    for alias in node.names:
        if node.module == SHARED_FILE:
            modules = (name for name in list(sys.modules) if _saved_file(name) == SHARED_FILE)
            holder = next((name for name in modules if _defines(sys.modules[name], alias.name)), None)
        else:  # a checkpoint of an earlier version, with a file for each module
            holder = _module_of_file(node.module)
        if holder is None or _saved_file(holder) is None:
            return {}
        found.setdefault(holder, []).append(ast.unparse(alias))
    return found


def _defines(module: ModuleType, name: str) -> bool:
    value = vars(module).get(name)
    return value is not None and getattr(value, "__module__", module.__name__) == module.__name__


def _saved_file(module: str) -> str | None:
    """The file of a checkpoint that holds a module of `hf_recurrent.modeling`; None if a unit cannot use it."""
    folder, _, stem = module.rpartition(".")
    root, _, room = folder.rpartition(".")
    if root != __package__.rpartition(".")[0] or room not in SHARED_FOLDERS:
        return None
    return stem if stem == "configuration_recurrent" else SHARED_FILE


def _module_of_file(stem: str | None) -> str | None:
    """The module of `hf_recurrent.modeling`, or the neighbour in a checkpoint, with this file name."""
    if not stem or not stem.isidentifier():
        return None
    folder = Path(__file__).parent
    if not IN_PACKAGE:
        return f"{__package__}.{stem}" if (folder / f"{stem}.py").exists() else None
    path = next(folder.parent.glob(f"*/{stem}.py"), None)
    return path and f"{__package__.rpartition('.')[0]}.{path.parent.name}.{stem}"
