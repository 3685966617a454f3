"""The pages of results are what the recorded rows give, to the digit."""

import re
from pathlib import Path

import pytest

from papers import EXPERIMENTS, STUDIES, load_experiment
from papers.engine.pages import claims_table, computed_section, read_claims, recorded_rows, sections_of, write_pages
from papers.engine.report import markdown_table
from papers.engine.rows_file import read_rows, report_path, write_rows

RESULTS = Path(__file__).parents[3] / "docs" / "results.md"
FOLDER = RESULTS.with_suffix("")
SECTIONS = {name: text for page in FOLDER.glob("*.md") for name, text in sections_of(page).items()}
VERDICTS = r"holds( at larger size)?|needs .+|our setting differed: corrected|does not hold here"


@pytest.mark.parametrize("name", sorted([*EXPERIMENTS, *STUDIES]))
def test_a_section_and_its_table_are_those_of_the_rows(name):
    experiment = load_experiment(name)
    assert computed_section(experiment, FOLDER, SECTIONS[name]) == SECTIONS[name], "run scripts/build_results.py"
    table = report_path(experiment, "small", FOLDER).read_text(encoding="utf-8")
    assert table in SECTIONS[name]
    assert f"]({report_path(experiment, 'small', FOLDER).with_suffix('.png').name})" in SECTIONS[name]


def test_the_table_of_claims_is_that_of_the_rows():
    shown = RESULTS.read_text(encoding="utf-8").split("<!-- reproduce: claims -->\n")[1].split("<!-- end of claims")[0]
    assert claims_table(FOLDER) == shown, "run scripts/build_results.py"
    numbers = re.findall(r"\d+\.\d+", re.sub(r"\([^()]*\)", "", re.sub(r"\[[^\]]*\]\([^)]*\)", "", shown)))
    assert set(numbers) <= {"0.02", "0.1", "0.5", "0.9", "1.5"}, "settings; every measurement is a link to its file"


@pytest.mark.parametrize("claim", read_claims(), ids=lambda claim: claim["claim"])
def test_a_claim_has_a_verdict_and_an_honest_cause(claim):
    assert re.fullmatch(VERDICTS, claim["verdict"])
    assert all(len(claim[key].split()) <= 10 for key in ("seen", "cause"))
    assert claim["cause"] or claim["verdict"] == "holds", "a cause, or 'not known yet'"
    assert "study" in claim or claim["verdict"] != "does not hold here", "the interval is the study's"
    if "level" in claim:
        study = load_experiment(claim["study"])
        assert study.pairs(study.levels(recorded_rows(study, study.seeds, FOLDER))[claim["level"]])


def test_a_changed_row_changes_the_pages(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    for path in [*FOLDER.glob("*.json"), *FOLDER.glob("*.md")]:
        (folder / path.name).write_bytes(path.read_bytes())
    path = folder / "glru_alternatives_small.json"
    rows = read_rows(path)
    write_rows([row | {"value": row["value"] + (row["label"] == "complex GLRU")} for row in rows], path)
    page = tmp_path / "results.md"
    page.write_bytes(RESULTS.read_bytes())
    write_pages(page)
    study = load_experiment("why-complex-units")
    text = (folder / "memora.md").read_text(encoding="utf-8")
    assert markdown_table(study, recorded_rows(study, study.seeds, folder)) in text
    assert computed_section(study, FOLDER) not in text
    assert page.read_text(encoding="utf-8") != RESULTS.read_text(encoding="utf-8")
