"""The code of a checkpoint: modules of `hf_recurrent.modeling`, gathered into a few flat files.

A checkpoint that loads without this package needs files that lie side by side and import only each other. Each file
joins modules in the order of their imports: `configuration_recurrent.py`, `configuration_NAME.py`,
`recurrent_shared.py` (scan, units, blocks), `modeling_NAME.py` and `tokenization_NAME.py`.
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


@contextmanager
def packaged(saved_class: type, unit: OwnCode | None = None) -> Iterator[str]:
    """Inside the block, a class's module is a file of gathered code, which transformers copies with its neighbours.

    Yields its name. Classes of other packages stay as they are. `unit` is the user-defined unit of the model, if any.
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


@cache
def gathered_files(module: str) -> dict[str, str]:
    """The files that a checkpoint needs: name → text.

    `module` defines the class that is saved, such as `hf_recurrent.modeling.memora.modeling_memora`.
    """
    files: dict[str, list[Source]] = {}
    for name in in_import_order(module):
        files.setdefault(_file_of(name, module), []).append(read_source(name))
    return {f"{file}.py": _join(sources, module) for file, sources in files.items()}


class Source:
    """The source of one module."""

    def __init__(self, name: str, text: str):
        self.name, self.lines, self.tree = name, text.splitlines(keepends=True), ast.parse(text)
        self.docstring = ast.get_docstring(self.tree) or ""
        self.relative_imports = [
            node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom) and node.level
        ]

    def target(self, node: ast.ImportFrom) -> str:
        """The full name of the module that a relative import names."""
        return importlib.util.resolve_name("." * node.level + (node.module or ""), self.name.rpartition(".")[0])


@cache
def read_source(name: str) -> Source:
    return Source(name, Path(importlib.util.find_spec(name).origin).read_text(encoding="utf-8"))


def in_import_order(module: str) -> list[str]:
    """A module and all modules that it imports relatively, each after its own imports."""
    order: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in order:
            source = read_source(name)
            for node in source.relative_imports:
                visit(source.target(node))
            order[name] = None

    visit(module)
    return list(order)


def _file_of(name: str, root: str) -> str:
    """The file that holds a module in a checkpoint of a class of the module `root`, without `.py`."""
    folder, _, stem = name.rpartition(".")
    root_folder, _, root_stem = root.rpartition(".")
    if stem == _BASE_CONFIGURATION:
        return stem
    if folder != root_folder:
        return SHARED_FILE
    if stem.startswith("configuration_") and not root_stem.startswith("configuration_"):
        return root_stem.replace("modeling_", "configuration_", 1)
    return root_stem


def _join(sources: list[Source], root: str) -> str:
    """One file: all imports, then the modules, each below a comment with its name."""
    own = {source.name for source in sources}
    imports: dict[str, dict[str, None]] = {}  # "from MODULE import" or "import" → names
    bodies = []
    for source in sources:
        lines: dict[int, str] = {}  # number → its replacement
        for node in source.tree.body:
            if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
                start = f"from {node.module} import" if isinstance(node, ast.ImportFrom) else "import"
                imports.setdefault(start, {}).update((ast.unparse(alias), None) for alias in node.names)
                _replace(lines, node, "")
        for node in source.relative_imports:
            target, indent = source.target(node), " " * node.col_offset
            if target in own:
                renamed = [f"{indent}{alias.asname} = {alias.name}\n" for alias in node.names if alias.asname]
                _replace(lines, node, "".join(renamed) or f"{indent}pass\n" * bool(indent))
                continue
            start = f"from .{_file_of(target, root)} import"
            names = {ast.unparse(alias): None for alias in node.names}
            if indent:  # inside a function: imported when it is called
                _replace(lines, node, f"{indent}{start} {', '.join(names)}\n")
            else:
                imports.setdefault(start, {}).update(names)
                _replace(lines, node, "")
        if source.docstring:
            _replace(lines, source.tree.body[0], "")
        body = "".join(lines.get(number, line) for number, line in enumerate(source.lines, start=1)).strip()
        summary = source.docstring.split("\n\n")[0].replace("\n", " ")
        bodies.append(f"# ---- {source.name.removeprefix(f'{MODELING}.')}: {summary}\n\n{body}\n")
    head = [f"import {name}" for name in sorted(imports.pop("import", ()))]
    in_order = sorted(imports, key=lambda start: (start.startswith("from ."), start))  # other packages first
    head += [f"{start} {', '.join(imports[start])}" for start in in_order]
    header = _HEADER.format(title=sources[-1].docstring, package=MODELING)
    text = "\n".join([header, *head, "", "", "\n\n".join(bodies)])
    ast.parse(text)
    return text


def _replace(lines: dict[int, str], node: ast.stmt, text: str) -> None:
    """Replace the lines of a statement."""
    lines.update(dict.fromkeys(range(node.lineno, node.end_lineno + 1), ""))
    lines[node.lineno] = text
