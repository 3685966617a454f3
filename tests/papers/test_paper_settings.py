"""docs/reference/paper_settings.md has the hyperparameters that experiments and recipes really train with."""

from functools import cache
from pathlib import Path

import pytest
from effective_settings import effective_settings, recipe_settings

from hf_recurrent.cli.recipes import recipe_names
from papers import EXPERIMENTS

PAGE = Path(__file__).parents[2] / "docs/reference/paper_settings.md"
WITHOUT_TABLE = {
    "carried-state", "drift", "drift-rules", "mgrade-memory", "scaling", "smt-cost", "smt-gradients", "task-rules",
}  # fmt: skip


@cache
def tables() -> dict[str, list[list[str]]]:
    """Title of a section → the cells of its table, without the header."""
    _, *sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    result = {}
    for section in sections:
        title, *lines = section.splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        result[title] = rows[2:]
    return result


def column(title: str, number: int) -> dict[str, str]:
    return {row[0]: row[number] for row in tables()[title]}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(EXPERIMENTS.keys() - WITHOUT_TABLE))
@pytest.mark.parametrize("size", ["paper", "small"])
def test_the_page_has_the_settings_of_an_experiment(name, size):
    assert name in tables(), f"print its table by `python tests/papers/effective_settings.py {name}`"
    assert column(name, 3 + (size == "small")) == effective_settings(name, size)


@pytest.mark.parametrize("name", ["tinystories", "fineweb-edu", "hg38"])
def test_the_page_has_the_settings_of_a_recipe(name):
    assert name in recipe_names()
    assert column(f"Recipe {name}", 3) == recipe_settings(name)


def test_a_difference_from_the_paper_has_a_reason():
    for title, rows in tables().items():
        for key, printed, place, ours, *_, reason in rows:
            assert printed in ("-", ours) or reason, (title, key)
            assert (place == "-") == (printed == "-"), (title, key)


def test_each_experiment_has_a_section():
    text = PAGE.read_text(encoding="utf-8")
    assert EXPERIMENTS.keys() - WITHOUT_TABLE <= tables().keys()
    assert all(f"`{name}`" in text for name in WITHOUT_TABLE)
