"""Every row of the table of clients, where its packages are installed; the documentation has the same rows."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from client_rows import Refused, all_rows, refusal

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/clients.md"
ROWS = all_rows()


# These start a server of another process; the tests of `server` have the requests.
LONG = ("transformers_chat", "transformers_serve", "serve_openai")


def marks(row):
    return [pytest.mark.slow] if row.slow else [pytest.mark.long] if row.name in LONG else []


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name, marks=marks(row)) for row in ROWS])
def test_row(row, tmp_path, monkeypatch, request):
    if missing := row.missing_packages():
        pytest.skip(f"not installed: {', '.join(missing)}")
    if row.slow and "slow" not in request.config.option.markexpr:
        pytest.skip("takes minutes: pytest -m slow, or tests/clients/try_clients.py")
    monkeypatch.chdir(tmp_path)
    row.run(tmp_path)


def test_the_documentation_has_the_same_rows():
    table = PAGE.read_text(encoding="utf-8").split("<!-- table of tests/clients/try_clients.py -->\n")[1]
    lines = table.split("<!-- end of the table -->")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    advice = "rerun tests/clients/try_clients.py --environment FOLDER --markdown docs/reference/clients.md"
    assert [(cell[0], cell[2]) for cell in cells] == [(row.client, row.tried) for row in ROWS], advice
    for client, version, tried, result in cells:
        assert re.match("works|refused: ", result) and version, f"{client}, {tried}: {result}"


def test_a_refusal_that_is_none_fails():
    with pytest.raises(Refused, match="a reason"), refusal(ValueError, "text", "a reason"):
        raise ValueError("some text")
    with pytest.raises(ValueError, match="other"), refusal(ValueError, "text", "a reason"):
        raise ValueError("other words")
    with pytest.raises(AssertionError, match="this works now: a reason"), refusal(ValueError, "text", "a reason"):
        pass


def test_the_table_replaces_the_one_of_a_page(tmp_path):
    specification = importlib.util.spec_from_file_location("try_clients", Path(__file__).with_name("try_clients.py"))
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{script.TABLE_BEGINS}old\n{script.TABLE_ENDS}after\n", encoding="utf-8")
    table = script.markdown([("peft", "1", "a | b", script.describe("works", "so"))])
    script.write_markdown(page, table)
    script.write_markdown(page, table)
    lines = page.read_text(encoding="utf-8").splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert lines[2:5] == [
        "| client | version | what was tried | result |",
        "| --- | --- | --- | --- |",
        "| peft | 1 | a \\| b | works: so |",
    ]


@pytest.mark.slow
def test_the_script_prints_a_table(request):
    if "slow" not in request.config.option.markexpr:
        pytest.skip("starts three processes: pytest -m slow")
    command = [sys.executable, str(Path(__file__).with_name("try_clients.py")), "--only", "tokenizers_file"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| tokenizers | " in done.stdout and done.stdout.endswith("1 works\n")
