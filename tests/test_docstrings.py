"""Docstrings begin with a verb or a noun, and shape letters mean the same in every file."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEGEND_PAGE = "docs/architecture.md"
LEGEND_LINE = re.compile(r"Shape letters:\s+([^.]*)\.")
SHAPE = re.compile(r"\((?:B|T)(?:, [^(),]+)+\)")
FILES = sorted(
    path
    for folder in ("hf_recurrent", "modeling", "trainers", "scripts", "metrics")
    for path in (ROOT / folder).rglob("*.py")
    if path.relative_to(ROOT).parts[1] not in ("modeling", "trainers")  # links
)


def docstrings():
    """Every docstring with the place where it stands."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path.relative_to(ROOT)}:{node.body[0].lineno}", text


def letters(text: str) -> dict[str, str]:
    """The letters of a line such as "Shape letters: B batch, T steps.", with their meanings and without remarks."""
    line = LEGEND_LINE.search(re.sub(r"\s+\([^)]*\)", "", text))
    entries = re.split("[,;] ", " ".join(line[1].split())) if line else []
    return dict(entry.partition(" ")[::2] for entry in entries)


LEGEND = letters((ROOT / LEGEND_PAGE).read_text(encoding="utf-8"))


def test_no_docstring_begins_with_what_or_whether():
    wrong = [f"{place}: {text.splitlines()[0]}" for place, text in docstrings() if re.match(r"What\b|Whether\b", text)]
    assert not wrong, f"{len(wrong)} docstrings, which should begin with a verb or a noun:\n" + "\n".join(wrong)


def test_shape_letters_are_those_of_the_legend():
    assert LEGEND.get("T") == "steps", (
        f"{LEGEND_PAGE} needs a line such as 'Shape letters: B streams or batch, T steps.'"
    )
    wrong = []
    for place, text in docstrings():
        for letter, meaning in letters(text).items():
            allowed = LEGEND.get(letter)
            if allowed is None:
                wrong.append(f"{place}: {letter} {meaning!r} is not in the legend of {LEGEND_PAGE}")
            elif set(meaning.split(" or ")) - set(allowed.split(" or ")):
                wrong.append(f"{place}: {letter} is {meaning!r}, but {allowed!r} in the legend of {LEGEND_PAGE}")
    assert not wrong, "\n".join(wrong)


def test_shapes_use_the_letters_of_the_legend():
    wrong = []
    for place, text in docstrings():
        for shape in SHAPE.findall(text):
            unknown = set(re.findall(r"\b[A-Z][a-z]?\b", shape)) - LEGEND.keys()
            if unknown:
                wrong.append(f"{place}: {shape} has {', '.join(sorted(unknown))}")
    assert not wrong, f"not in the legend of {LEGEND_PAGE}:\n" + "\n".join(wrong)
