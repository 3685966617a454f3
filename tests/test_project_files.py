"""The files around the code parse, and agree with the code."""

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


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_files_that_exist(path):
    for job in read_yaml(path)["jobs"].values():
        for step in job["steps"]:
            for name in re.findall(r"(?:^|\s)(\.ci/\w+|\w+/\w+\.py|bootstrap\.py)", step.get("run", "")):
                assert (ROOT / name).is_file(), name


def test_hooks_use_the_declared_ruff():
    (ruff, *_) = read_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    assert [hook["id"] for hook in ruff["hooks"]] == ["ruff-check", "ruff-format"]
    (declared,) = (name for name in PROJECT["project"]["optional-dependencies"]["dev"] if name.startswith("ruff"))
    assert ruff["rev"].removeprefix("v").startswith(re.search(r">=([\d.]+)", declared)[1])


def test_versions_and_licenses_agree():
    citation = read_yaml(ROOT / "CITATION.cff")
    assert citation["version"] == hf_recurrent.__version__ == PROJECT["project"]["version"]
    assert citation["license"] == PROJECT["project"]["license"]


def test_the_picture_is_drawn_from_the_recorded_rows():
    script = runpy.run_path(str(ROOT / "scripts" / "draw_readme_picture.py"))
    rows = json.loads((ROOT / "docs" / "results" / "stride_sweep_small.json").read_text(encoding="utf-8"))
    lines = script["bits_per_byte"](rows)
    picture = script["PICTURE"].read_text(encoding="utf-8")
    assert picture == script["draw"](lines, re.search(r"<title>(.*)</title>", picture)[1])
    assert script["PICTURE"].relative_to(ROOT).as_posix() in (ROOT / "README.md").read_text(encoding="utf-8")
    assert lines["Memora, streams"][2] < lines["Memora, IID"][2]
