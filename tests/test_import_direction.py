"""Imports point one way: a file imports from its own package or from a lower tier, and no files import in a circle."""

import ast
import functools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import hf_recurrent

ROOT = Path(__file__).resolve().parent.parent

# From the top down. A part imports its own files and parts of lower tiers; parts of one tier do not import each other.
# A part is a package, or a file that lies in `hf_recurrent` itself.
TIERS = (
    ("scripts",),
    ("cli",),
    ("papers", "chat", "server", "planning", "watch"),  # papers: scripts/papers
    ("export",),
    ("trainers", "online", "compression"),
    ("learning_rules", "evaluation", "generation", "tasks", "hub"),
    ("data",),
    ("checkpoints",),
    ("plotting", "presets", "__init__"),
    ("argument_checks", "interruption", "own_parts"),
    ("auto_registration", "stock_models"),
    ("modeling",),
    ("kernels",),  # modeling knows them by name only
)
TIER = {part: tier for tier, parts in enumerate(TIERS) for part in parts}
SOURCES = sorted(
    path
    for folder in ("hf_recurrent", "modeling", "trainers", "scripts")
    for path in (ROOT / folder).rglob("*.py")
    if path.relative_to(ROOT).parts[1] not in ("modeling", "trainers")  # links
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[:2] == ("scripts", "papers"):
        parts = parts[1:]
    name = ".".join(parts if parts[0] in ("hf_recurrent", "scripts", "papers") else ("hf_recurrent", *parts))
    return name.removesuffix(".__init__")


MODULES = {module_name(path): path for path in SOURCES}


def part_of(module: str) -> str:
    first, *rest = module.split(".")
    return first if first in ("scripts", "papers") else rest[0] if rest else "__init__"


def nodes_that_run(node: ast.AST):
    """Every node below, functions included, without the imports that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        yield child
        yield from nodes_that_run(child)


def imports_of(module: str):
    """Modules of the project that a module imports, anywhere in its code, each with its line."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in nodes_that_run(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                # A public name of `hf_recurrent` stands for the module that holds it.
                holder = hf_recurrent._MODULE_OF.get(alias.name) if base == "hf_recurrent" else None
                found = next((name for name in (f"{base}.{alias.name}", holder, base) if name in MODULES), None)
                if found not in (None, module):
                    yield found, node.lineno


@functools.cache
def import_graph() -> dict[str, list[tuple[str, int]]]:
    return {module: sorted(set(imports_of(module))) for module in MODULES}


def location(module: str, line: int) -> str:
    return f"{MODULES[module].relative_to(ROOT)}:{line}"


def test_every_part_has_a_tier():
    without = {part_of(module) for module in MODULES} - TIER.keys()
    assert not without, f"give these a place in TIERS: {', '.join(sorted(without))}"


def test_imports_point_down():
    wrong = []
    for module, imports in import_graph().items():
        for target, line in imports:
            here, there = part_of(module), part_of(target)
            if here != there and TIER.get(there, 0) <= TIER.get(here, 0):
                reason = "is above" if TIER.get(there, 0) < TIER.get(here, 0) else "is in the same tier as"
                wrong.append(f"{location(module, line)} imports {target}, but {there} {reason} {here}")
    assert not wrong, f"{len(wrong)} imports against the direction:\n" + "\n".join(wrong)


def test_no_files_import_in_a_circle():
    graph = {module: {target for target, _ in imports} for module, imports in import_graph().items()}
    circles = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
            break
        except CycleError as error:
            circle = error.args[1][::-1]  # each imports the next
            circles.append(" → ".join(circle))
            graph[circle[0]].discard(circle[1])
    assert not circles, "import cycles:\n" + "\n".join(circles)


def test_experiments_use_public_names_only():
    """The papers' experiments show that the library suffices for research."""
    wrong = []
    for path in sorted((ROOT / "scripts" / "papers").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                private = node.module == "hf_recurrent" and {alias.name for alias in node.names} - {
                    *hf_recurrent.__all__
                }
                modules = [f"hf_recurrent.{name}" for name in private] if private else [node.module]
            inside = [module for module in modules if module.startswith("hf_recurrent.")]
            wrong += [f"{path.relative_to(ROOT)}:{node.lineno} imports {module}" for module in inside]
    assert not wrong, "\n".join(wrong)


def test_modeling_imports_its_own_files_only():
    """The packager gathers them for checkpoints: it follows `from .x import y` and `from ..room.x import y`."""
    wrong = []
    for path in sorted((ROOT / "modeling").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""] if node.level == 0 else []
                file = path.parents[max(node.level, 1) - 1] / f"{(node.module or '').replace('.', '/')}.py"
                if node.level > 2 or (node.level and not file.is_file()):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
            if any(name.split(".")[0] in ("hf_recurrent", "modeling", "trainers", "scripts") for name in names):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert not wrong, "modeling imports its own files only, by relative imports:\n" + "\n".join(wrong)
