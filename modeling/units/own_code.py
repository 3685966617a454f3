"""Code of a user-defined recurrent unit: the file of it that a checkpoint holds, and how that is read again.

The file may import the standard library, `INSTALLED`, and names of `hf_recurrent` with code in
`hf_recurrent.modeling`, which it imports from `recurrent_shared.py` in a checkpoint (`hf_recurrent/hub/packager.py`).
"""

import ast
import hashlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers.utils import cached_file, logging

logger = logging.get_logger(__name__)

AUTO_MAP_KEY = "recurrent_unit"  # of a user-defined unit, in `auto_map` of a configuration
# The file of a checkpoint with units, blocks and the scan, and the folders that it is gathered from.
SHARED_FILE = "recurrent_shared"
SHARED_FOLDERS = ("block", "scan", "step", "units")
_BASE_CONFIGURATION = "configuration_recurrent"
_TAKEN_FILES = re.compile(rf"{SHARED_FILE}|(configuration|modeling|tokenization)_\w+")
INSTALLED = ("numpy", "safetensors", "torch", "transformers")  # on every machine on which a checkpoint loads
_ALLOWED = (
    "a file with a recurrent unit is saved with every checkpoint, so it may import the standard library, "
    f"{', '.join(INSTALLED)}, and names of `hf_recurrent` with code in `hf_recurrent.modeling`"
)
# Arguments of `from_pretrained` that say where files are.
HUB_ARGUMENTS = (
    "cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
)  # fmt: skip


@dataclass(frozen=True)
class OwnCode:
    """The code of a user-defined class."""

    class_name: str
    file: str | None  # its name in a checkpoint; None for a class that is not in a file (`__main__`, a notebook)
    text: str | None  # content of the file, or else the source of the class; None if there is none

    @property
    def reference(self) -> str | None:
        """The class as in `auto_map`, such as "leaky_unit.LeakyIntegrator"."""
        return None if self.file is None else f"{self.file.removesuffix('.py')}.{self.class_name}"


# Name of a registered unit → its code when it was registered: the file may be edited while a model trains.
OWN_CODE: dict[str, OwnCode] = {}


# ---- The file that a checkpoint holds ----


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
    if _TAKEN_FILES.fullmatch(path.stem):
        raise ValueError(f"`{path.name}` is also the name of a file of this package in checkpoints; rename it.")
    text = path.read_text(encoding="utf-8-sig")
    from_checkpoint = module.__package__ == __package__
    return OwnCode(cls.__name__, path.name, with_relative_imports(text, path.name, from_checkpoint))


def with_relative_imports(text: str, name: str, from_checkpoint: bool = False) -> str:
    """The text of a Python file `name` with imports of `recurrent_shared.py` instead of `hf_recurrent`.

    In a file `from_checkpoint`, imports may be relative already.

    Raises:
        ValueError: it imports something that a checkpoint does not have.
    """
    tree = ast.parse(text)
    lines, optional = text.encode().splitlines(keepends=True), set(_optional_imports(tree))
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in sorted(statements, key=lambda node: -node.lineno):  # from the last, so that line numbers stay valid
        try:
            imports = _imports_of_files(node, from_checkpoint, node in optional)
            first, last = node.lineno - 1, node.end_lineno - 1
            before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
            if imports and before.strip():
                raise ValueError("the import of `hf_recurrent` must begin its line.")
        except ValueError as error:
            raise ValueError(f"`{name}`, line {node.lineno}: {error}") from None
        if imports:
            new = [f"from .{file} import {', '.join(names)}".encode() for file, names in imports.items()]
            lines[first : last + 1] = [before + (b"\n" + before).join(new) + after]
    return b"".join(lines).decode()


def _optional_imports(tree: ast.AST) -> Iterator[ast.AST]:
    """Imports in `try` blocks whose failure is handled; transformers does not ask for them either."""
    for block in ast.walk(tree):
        if isinstance(block, ast.Try) and block.handlers:
            for statement in block.body:
                yield from ast.walk(statement)


def _imports_of_files(
    node: ast.Import | ast.ImportFrom, from_checkpoint: bool, is_optional: bool
) -> dict[str, list[str]]:
    """File of a checkpoint → names that an import takes from it; empty for allowed imports of other packages."""
    if getattr(node, "level", 0):
        if not from_checkpoint or node.level != 1 or not node.module:
            raise ValueError(f"relative imports are not possible; {_ALLOWED}.")
        # Checkpoints of earlier versions have a file for each module.
        file = node.module if node.module == _BASE_CONFIGURATION else SHARED_FILE
        return {file: [ast.unparse(alias) for alias in node.names]}
    package = __package__.partition(".")[0]
    if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == package:
        found: dict[str, list[str]] = {}
        for alias in node.names:
            module = node.module
            if module == package:  # a public name
                module = str(getattr(getattr(sys.modules[package], alias.name, None), "__module__", ""))
            if (file := _file_of(module)) is None:
                raise ValueError(f"`{alias.name}` of `{node.module}` is imported, but {_ALLOWED}; move the unit.")
            found.setdefault(file, []).append(ast.unparse(alias))
        return found
    for module in [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]:
        top = module.partition(".")[0]
        if top == package:
            raise ValueError(f"write `from {package} import NAME` in place of `import {module}`.")
        if top not in (*INSTALLED, *sys.stdlib_module_names) and not is_optional:
            raise ValueError(f"`{top}` is imported, but {_ALLOWED}.")
    return {}


def _file_of(module: str) -> str | None:
    """The file of a checkpoint that holds a module of `hf_recurrent.modeling`; None if a unit cannot use it."""
    folder, _, stem = module.rpartition(".")
    root, _, room = folder.rpartition(".")
    if root != __package__.rpartition(".")[0] or room not in SHARED_FOLDERS:
        return None
    return stem if stem == _BASE_CONFIGURATION else SHARED_FILE


# ---- Read from a checkpoint, if its code is trusted ----


def find_own_unit(config: Any, name: str | os.PathLike, trust_remote_code: bool, **hub_arguments: Any) -> None:
    """Register the user-defined unit that a configuration names, from the code of its checkpoint, if it is trusted.

    A unit of this name that is registered already is used instead. The arguments are `from_pretrained`'s; `config` may
    be a dictionary.

    Raises:
        ValueError: the code is needed and not trusted, or does not register the unit.
        OSError: its file is missing.
    """
    fields = config if isinstance(config, dict) else vars(config)
    unit = fields.get("recurrent_unit")
    reference = (fields.get("auto_map") or {}).get(AUTO_MAP_KEY)
    if reference is None:
        return
    # Of a repository on the Hub: "owner/name--file.Class".
    file = f"{str(reference).split('--')[-1].partition('.')[0]}.py"
    if not file.removesuffix(".py").isidentifier():
        raise ValueError(f"`auto_map` names {reference!r} as the recurrent unit; it must be of the form FILE.CLASS.")
    if unit in OWN_CODE:
        compare_code(unit, name, file, **hub_arguments)
        return
    if not trust_remote_code:
        raise ValueError(
            f"`recurrent_unit` is {unit!r}, whose code is the file `{file}` of the checkpoint; it is run only with "
            "`trust_remote_code`, unless you import your own copy first (`--import FILE` on the command line)."
        )
    _run(cached_file(name, file, **hub_arguments))
    if unit not in OWN_CODE:
        raise ValueError(f"The file `{file}` of the checkpoint does not register the recurrent unit {unit!r}.")


def compare_code(unit: str | None, name: str | os.PathLike, file: str | None = None, **hub_arguments: Any) -> None:
    """Warn if the code of a registered unit differs from the file of a checkpoint; other units are ignored."""
    registered = OWN_CODE.get(unit)
    if registered is None or registered.file is None:
        return
    try:
        saved = Path(cached_file(name, file or registered.file, **hub_arguments)).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return
    if saved != registered.text:
        logger.warning(
            f"`{file or registered.file}` of {os.fspath(name)!r} differs from the imported `{registered.file}`, which "
            "is used: the model may compute something else than when it was saved."
        )


def _run(path: str) -> None:
    """Execute a file of a checkpoint in this package, whose modules take the place of the file's neighbours."""
    text = Path(path).read_text(encoding="utf-8")
    # Checkpoints may have files of one name with different code.
    name = f"{__package__}.{Path(path).stem}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    for file in (SHARED_FILE, _BASE_CONFIGURATION):
        gathered = sys.modules.setdefault(f"{__package__}.{file}", ModuleType(file))
        gathered.__getattr__ = _find_shared
    specification = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    try:
        code = with_relative_imports(text, os.path.basename(path), from_checkpoint=True)
        exec(compile(code, path, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise


def _find_shared(name: str) -> Any:
    """A name of any module that is gathered for checkpoints, where names are unique."""
    for module in [module for key, module in sys.modules.items() if _file_of(key) is not None]:
        if name in vars(module):
            return vars(module)[name]
    raise AttributeError(f"a unit of a checkpoint imports {name!r}, which this version of hf_recurrent does not have")
