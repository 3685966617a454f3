"""Every command of the documentation runs, shortened by the flags that stand above it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from breadth import some_of

ROOT = Path(__file__).parents[1]
PAGE_FOLDERS = ("docs", "docs/tasks", "docs/reference")
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(str(page.relative_to(ROOT)) for folder in PAGE_FOLDERS for page in sorted((ROOT / folder).glob("*.md"))),
    *(f"docs/results/{paper}.md" for paper in ("memora", "mgrade", "online_learning", "smt", "survey")),
]
NOT_RUN = "not run in the tests: "
BLOCK = re.compile(r"(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>bash|python)\n(?P<code>.*?)```", re.DOTALL)


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    """(note above the block, code) of each block of that language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [(m["note"] or "", m["code"]) for m in BLOCK.finditer(text) if m["language"] == language]


def commands_of(page: str) -> list[list[str]]:
    """The commands of a page that run in the tests, in order, each with the flags that shorten it."""
    result = []
    for note, code in blocks(page, "bash"):
        if note.startswith(NOT_RUN):
            continue
        assert note.startswith("run with:"), f"{page}: say above this block how the tests run it:\n{code}"
        extra = shlex.split(note.removeprefix("run with:"))
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                # Of a flag that is given twice, the last one counts.
                result.append([*words, *(extra if "--max_new_tokens" not in words or "0" not in words else [])])
    return result


QUICK = ("docs/quick_start.md", "docs/tasks/generate.md")
COMMANDS = {page: commands_of(page) for page in PAGES}
RUN = some_of([page for page in PAGES if COMMANDS[page]], QUICK)


def test_the_pages_have_commands():
    assert sum(map(len, COMMANDS.values())) >= 40


@pytest.mark.parametrize("page", RUN)
def test_commands_run(page, tmp_path, commands):
    (tmp_path / "stories.jsonl").write_text('{"text": "Once upon a time."}\n{"text": "The end of it."}\n' * 300)
    (tmp_path / "book.txt").write_text("It was a dark night, and the café was closed. " * 50, encoding="utf-8")
    shutil.copy(ROOT / "examples/leaky_unit.py", tmp_path)
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for words in COMMANDS[page]:
        if words[0] == "hf-recurrent":
            result = commands.run(words[1:], tmp_path)
        else:
            result = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, f"{shlex.join(words)}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"


def test_the_docs_show_the_unit_of_the_examples():
    (shown,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs/tasks/extend.md").read_text(encoding="utf-8"), re.DOTALL)
    assert shown in (ROOT / "examples/leaky_unit.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # they save where they are
    for note, code in blocks(page, "python"):
        if note.startswith(NOT_RUN):
            continue
        if "from peft import" in code:
            pytest.importorskip("peft")  # no release works with the newest transformers; see tests/oldest.txt
        exec(compile(code, page, "exec"), {})


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        if name.startswith("https://"):
            continue
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


def test_files_that_the_architecture_names_exist():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    folders = ("hf_recurrent", "modeling", "trainers", "scripts", "tests", "metrics", "model_cards", "examples")
    files = [*ROOT.glob("*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    paths = [f"/{path.relative_to(ROOT).as_posix()}" for path in files]
    for name in re.findall(r"`([\w/*]+(?:\.py|\.c|/))`", text):
        if "NAME" not in name and name != "*.py":
            pattern = re.compile(f"/{name.rstrip('/').replace('.', '[.]').replace('*', '[^/]*')}$")
            assert any(pattern.search(path) for path in paths), name
