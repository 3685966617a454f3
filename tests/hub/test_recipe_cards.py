"""model_cards/ has a card of every recipe, and no number that was not measured."""

import runpy
from pathlib import Path

from hf_recurrent.cli.recipes import recipe_names

ROOT = Path(__file__).parents[2]


def test_every_recipe_has_a_card_and_its_numbers_were_measured():
    script = runpy.run_path(str(ROOT / "scripts" / "write_recipe_cards.py"))
    assert sorted(path.stem for path in (ROOT / "model_cards").glob("*.md")) == recipe_names()
    for name in recipe_names():
        text = (ROOT / "model_cards" / f"{name}.md").read_text(encoding="utf-8")
        assert text == script["card_of"](name), "run scripts/write_recipe_cards.py"
        pages = [ROOT / "docs" / "performance.md", ROOT / "hf_recurrent" / "recipes" / f"{name}.yaml"]
        measured = "".join(page.read_text(encoding="utf-8") for page in pages)
        if name in script["MEASURED"]:
            assert f"{script['MEASURED'][name][0]:g}" in measured
        else:
            assert "No finished run of this recipe is recorded" in text
