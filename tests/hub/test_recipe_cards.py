"""model_cards/ has a card of every recipe, and no number that was not measured."""

import re
from pathlib import Path

import pytest

from hf_recurrent.cli.recipes import recipe_names

ROOT = Path(__file__).parents[2]


def test_every_recipe_has_a_card():
    assert sorted(path.stem for path in (ROOT / "model_cards").glob("*.md")) == recipe_names()


@pytest.mark.parametrize("name", recipe_names())
def test_its_numbers_were_measured(name):
    text = (ROOT / "model_cards" / f"{name}.md").read_text(encoding="utf-8")
    assert f"Run it with `hf-recurrent pretrain --recipe {name}`." in text
    pages = [ROOT / "docs" / "performance.md", ROOT / "hf_recurrent" / "recipes" / f"{name}.yaml"]
    measured = "".join(page.read_text(encoding="utf-8") for page in pages)
    numbers = re.findall(r"\*\*([\d.]+) bits per byte\*\*", text)
    assert numbers or "No finished run of this recipe is recorded" in text
    assert all(number in measured for number in numbers)
