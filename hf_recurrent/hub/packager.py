"""The code that travels with a checkpoint: modules of `hf_recurrent.modeling`, gathered into a few flat files.

A checkpoint that loads without this package needs files that lie side by side and import only each other. Each
file joins modules in the order of their imports: `configuration_recurrent.py`, `configuration_NAME.py`,
`recurrent_shared.py` (scan, units, blocks), `modeling_NAME.py`. Tokenizers lie in one folder and travel as they are.
"""

import ast
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

from hf_recurrent.modeling.units.own_code import SHARED_FILE, OwnCode

MODELING = "hf_recurrent.modeling"
_BASE_CONFIGURATION = "configuration_recurrent"
_HEADER = '"""{title}\n\nGathered from `{package}`: with this file a checkpoint loads without the package.\n"""\n'


@cache
def gathered_files(module: str) -> dict[str, str]:
    """The files that a module of `hf_recurrent.modeling` needs in a checkpoint: name → text.

    Args:
        module: full name of the module with the class that is saved, such as
            `hf_recurrent.modeling.memora.modeling_memora`.

    Raises:
        ValueError: two modules of one file define the same name differently.
    """
    parts: dict[str, list[_Module]] = {}
    for name in _in_order(module):
        parts.setdefault(_file_of(name, module), []).append(_read(name))
    return {f"{file}.py": _join(file, modules, module) for file, modules in parts.items()}


@contextmanager
def packaged(saved_class: type, unit: OwnCode | None = None) -> Iterator[str]:
    """Inside the block, a class's module is a file of gathered code, which transformers copies with its neighbours.

    Args:
        saved_class: its module is changed inside the block; classes of other packages stay as they are.
        unit: the user-defined recurrent unit of the model, if any.

    Yields:
        The name of the module.
    """
    module = saved_class.__module__
    if not module.startswith(f"{MODELING}."):
        yield module
        return
    stem = module.rpartition(".")[2]
    files = dict(gathered_files(module))
    if unit is not None:
        files[unit.file] = unit.text
        name = unit.file.removesuffix(".py")
        files[f"{stem}.py"] += f"\n\nfrom .{name} import {unit.class_name}  # noqa: E402, F401 (registers the unit)\n"
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        staged = ModuleType(f"{MODELING}.{Path(folder).name}.{stem}")
        staged.__file__ = str(Path(folder, f"{stem}.py"))
        sys.modules[staged.__name__] = staged
        saved_class.__module__ = staged.__name__
        try:
            yield staged.__name__
        finally:
            saved_class.__module__ = module
            del sys.modules[staged.__name__]


class _Module:
    """The source of one module: its imports of siblings, other imports, and definitions."""

    def __init__(self, name: str, path: Path):
        self.name, self.lines = name, path.read_text(encoding="utf-8").splitlines(keepends=True)
        self.tree = ast.parse("".join(self.lines))
        self.title = ast.get_docstring(self.tree) or ""
        self.relative = [node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom) and node.level]
        self.imports = [
            node
            for node in self.tree.body
            if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
        ]
        self.definitions = dict(_definitions(self.tree))

    def target(self, node: ast.ImportFrom) -> str:
        """The full name of the module that a relative import names."""
        return importlib.util.resolve_name("." * node.level + (node.module or ""), self.name.rpartition(".")[0])

    def text(self, node: ast.stmt) -> str:
        return "".join(self.lines[node.lineno - 1 : node.end_lineno])


def _definitions(tree: ast.Module):
    """Top-level names of a module, each with the code that defines it."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, ast.dump(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        yield name.id, ast.dump(node)


@cache
def _read(name: str) -> _Module:
    return _Module(name, Path(importlib.util.find_spec(name).origin))


@cache
def _in_order(module: str) -> tuple[str, ...]:
    """A module and all modules of `modeling` that it imports, each after those that it imports itself."""
    order: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in order:
            source = _read(name)
            for node in source.relative:
                visit(source.target(node))
            order[name] = None

    visit(module)
    return tuple(order)


def _file_of(name: str, root: str) -> str:
    """The file of a checkpoint that holds a module, without `.py`."""
    folder, _, stem = name.rpartition(".")
    root_folder, _, root_stem = root.rpartition(".")
    if stem == _BASE_CONFIGURATION:
        return stem
    if folder != root_folder:
        return SHARED_FILE
    if stem.startswith("configuration_") and not root_stem.startswith("configuration_"):
        return root_stem.replace("modeling_", "configuration_", 1)
    return root_stem


def _join(file: str, modules: list[_Module], root: str) -> str:
    """One file: all imports, then the modules, each below a comment with its name."""
    seen: dict[str, tuple[str, str]] = {}
    for module in modules:
        for name, code in module.definitions.items():
            if seen.setdefault(name, (code, module.name))[0] != code:
                raise ValueError(f"{name!r} is defined in both {seen[name][1]} and {module.name}; rename one.")
    own = {module.name for module in modules}
    plain, siblings, bodies = {}, {}, []
    for module in modules:
        removed: dict[int, str] = {}
        for node in module.imports:
            for alias in node.names:
                source = f"from {node.module} import" if isinstance(node, ast.ImportFrom) else "import"
                plain.setdefault(source, {})[ast.unparse(alias)] = None
            _replace(removed, node, "")
        for node in module.relative:
            target = module.target(node)
            renamed = [f"{alias.asname} = {alias.name}\n" for alias in node.names if alias.asname]
            if target not in own:
                for alias in node.names:
                    siblings.setdefault(_file_of(target, root), {})[ast.unparse(alias)] = None
                renamed = []
            _replace(removed, node, "".join(renamed))
        docstring = module.tree.body[0] if module.title else None
        if docstring is not None:
            _replace(removed, docstring, "")
        body = "".join(removed.get(number, line) for number, line in enumerate(module.lines, start=1))
        about = module.title.split("\n\n")[0].replace("\n", " ")
        bodies.append(f"# ---- {module.name.removeprefix(MODELING + '.')}: {about}\n\n{body.strip()}\n")
    header = _HEADER.format(title=modules[-1].title, package=MODELING)
    imports = [f"import {name}" for name in sorted(plain.pop("import", ()))]
    imports += [f"{source} {', '.join(sorted(names))}" for source, names in sorted(plain.items())]
    relative = [f"from .{name} import {', '.join(names)}" for name, names in siblings.items()]
    return "\n".join([header, *imports, "", *relative, "", "\n\n".join(bodies)])


def _replace(removed: dict[int, str], node: ast.stmt, text: str) -> None:
    """Replace the lines of a statement."""
    for number in range(node.lineno, node.end_lineno + 1):
        removed[number] = ""
    removed[node.lineno] = text
