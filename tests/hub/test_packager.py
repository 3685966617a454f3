"""The packager gathers modules into files that parse, agree with each other and bind every name once."""

import ast
from collections.abc import Iterator

import pytest

from hf_recurrent.hub import packager
from hf_recurrent.hub.packager import MODELING, gathered_files

MODELS = ["memora", "hawk", "mgrade", "lru", "smt_rnn", "smt_teacher"]


def module_of(kind: str, family: str) -> str:
    return f"{MODELING}.{family.partition('_')[0]}.{kind}_{family}"


@pytest.mark.parametrize("family", MODELS)
def test_a_checkpoint_has_at_most_five_files_that_import_only_each_other(family):
    model = gathered_files(module_of("modeling", family))
    for tokenizer in ("byte", "dna"):
        files = model | gathered_files(f"{MODELING}.tokenizer.tokenization_{tokenizer}")
        assert sorted(files) == sorted(
            [
                "configuration_recurrent.py", f"configuration_{family}.py", f"modeling_{family}.py",
                "recurrent_shared.py", f"tokenization_{tokenizer}.py",
            ]
        )  # fmt: skip
        for text in files.values():
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and node.level:
                    assert node.level == 1 and f"{node.module}.py" in files
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    names = [node.module] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
                    assert not any(name.partition(".")[0] == "hf_recurrent" for name in names)


@pytest.mark.parametrize("family", MODELS)
def test_configurations_and_tokenizers_bring_the_same_text_as_their_model(family):
    model = gathered_files(module_of("modeling", family))
    parts = [module_of("configuration", family), f"{MODELING}.tokenizer.tokenization_byte"]
    for part in map(gathered_files, parts):
        assert all(text == model.get(name, text) for name, text in part.items())
        assert "configuration_recurrent.py" in part


def join(*modules: str) -> str:
    """Modules a, b, … of one folder in one file, gathered for the last one."""
    names = [f"{MODELING}.room.{name}" for name in "abc"]
    sources = [packager.Source(name, text) for name, text in zip(names, modules, strict=False)]
    return packager._join(sources, sources[-1].name)


def test_imports_are_hoisted_and_names_of_the_same_file_are_not_imported():
    text = join(
        '"""First.\n\nMore."""\n\nimport math\n\nfrom torch import nn\n\nONE = math.pi\n',
        '"""Last."""\n\nfrom torch import Tensor\nfrom ..scan.linear_scan import linear_scan\n'
        "from .a import ONE, nn as network\n\n\ndef f():\n    from .a import ONE\n    from ..scan.tiling import g\n"
        "    return g, ONE, linear_scan, network, Tensor\n",
    )
    assert text.startswith('"""Last.\n\nGathered')
    assert "import math\nfrom torch import nn\nfrom torch import Tensor" not in text
    assert "import math\nfrom torch import nn, Tensor\nfrom .recurrent_shared import linear_scan\n" in text
    assert "# ---- room.a: First.\n\nONE = math.pi\n" in text
    assert "network = nn\n" in text and "def f():\n    pass\n    from .recurrent_shared import g\n" in text


def bindings(text: str) -> Iterator[tuple[str, str]]:
    """Names that a module binds at its top level, each with what is bound."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, ast.dump(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from ((name.id, ast.dump(node)) for name in ast.walk(target) if isinstance(name, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield (
                    alias.asname or first,
                    f"{getattr(node, 'module', None)}: {alias.name if alias.asname else first}",
                )


@pytest.mark.parametrize("family", MODELS)
def test_joined_modules_bind_each_name_to_the_same_thing(family):
    files = gathered_files(module_of("modeling", family))
    for text in (*files.values(), gathered_files(f"{MODELING}.tokenizer.tokenization_byte")["tokenization_byte.py"]):
        bound = {}
        for name, what in bindings(text):
            assert bound.setdefault(name, what) == what, f"{name!r} is bound twice; rename one"
