"""The files around the code parse, and say what the code says."""

import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest
import yaml

import hf_recurrent

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def read_yaml(path: Path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_there_are_workflows_for_tests_wheels_and_docs():
    assert [path.stem for path in WORKFLOWS] == ["docs", "tests", "wheels"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows(path):
    workflow = read_yaml(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow[True], "YAML 1.1 reads the key `on` as true"
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job["timeout-minutes"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert "uses" not in step or re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]), (
                "pinned to a major version"
            )
            for name in re.findall(r"(?:^|\s)(\.ci/\w+|\w+/\w+\.py|bootstrap\.py)", step.get("run", "")):
                assert (ROOT / name).is_file(), name


def test_wheels_are_built_for_three_systems():
    matrix = read_yaml(ROOT / ".github/workflows/wheels.yml")["jobs"]["wheels"]["strategy"]["matrix"]
    assert {name.split("-")[0] for name in matrix["os"]} == {"ubuntu", "macos", "windows"}
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=").replace(".", "")
    assert PROJECT["tool"]["cibuildwheel"]["build"] == f"cp{oldest}-*"


def test_issue_templates():
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    assert read_yaml(folder / "config.yml") == {"blank_issues_enabled": True}
    for name in ("bug_report", "feature_request"):
        template = read_yaml(folder / f"{name}.yml")
        assert template["name"] and template["description"]
        ids = [part["id"] for part in template["body"]]
        assert len(set(ids)) == len(ids) and all(part["attributes"]["label"] for part in template["body"])


def test_hooks_use_the_declared_ruff():
    (ruff, *_) = read_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    assert [hook["id"] for hook in ruff["hooks"]] == ["ruff-check", "ruff-format"]
    (declared,) = (name for name in PROJECT["project"]["optional-dependencies"]["dev"] if name.startswith("ruff"))
    assert ruff["rev"].removeprefix("v").startswith(re.search(r">=([\d.]+)", declared)[1])


def test_citation():
    citation = read_yaml(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["message"] and citation["authors"]
    assert citation["version"] == hf_recurrent.__version__ == PROJECT["project"]["version"]
    assert citation["license"] == PROJECT["project"]["license"]
    for reference in citation["references"]:
        assert reference["type"] and reference["title"] and reference["authors"]


def test_the_readme_is_short_and_its_numbers_are_the_recorded_ones():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    results = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) < 175
    for number in ("2.027", "1.704", "1.595", "1.588", "1.458"):
        assert number in readme and number in results


def test_the_picture_is_drawn_from_the_recorded_rows():
    script = runpy.run_path(str(ROOT / "scripts" / "draw_readme_picture.py"))
    rows = json.loads((ROOT / "docs" / "results" / "stride_sweep_small.json").read_text(encoding="utf-8"))
    lines = script["bits_per_byte"](rows)
    picture = script["PICTURE"].read_text(encoding="utf-8")
    assert picture == script["draw"](lines, re.search(r"<title>(.*)</title>", picture)[1])
    assert script["PICTURE"].relative_to(ROOT).as_posix() in (ROOT / "README.md").read_text(encoding="utf-8")
    assert lines["Memora, streams"][2] < lines["Memora, IID"][2]


def test_the_public_address_is_named_in_one_place():
    """Nobody has chosen it yet: OWNER stands for it."""
    assert all("OWNER" in url for url in PROJECT["project"]["urls"].values())
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "CITATION.cff", *WORKFLOWS]
    assert not [page.name for page in pages if "github.com/OWNER" in page.read_text(encoding="utf-8")]
