"""model_cards/ has a card of every recipe, and no number that was not measured."""

import importlib.util
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_recurrent.cli.recipes import recipe_names

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("write_recipe_cards", ROOT / "scripts" / "write_recipe_cards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_recipe_has_a_card():
    assert sorted(path.stem for path in (ROOT / "model_cards").glob("*.md")) == recipe_names()


@pytest.mark.parametrize("name", recipe_names())
def test_cards_are_up_to_date_and_their_numbers_measured(name, script):
    path = ROOT / "model_cards" / f"{name}.md"
    assert path.read_text(encoding="utf-8") == script.card_of(name).content, "run scripts/write_recipe_cards.py"
    results = ModelCard.load(path, ignore_metadata_errors=False).data.eval_results
    if not results:
        assert "No finished run of this recipe is recorded" in path.read_text(encoding="utf-8")
        return
    pages = [ROOT / "docs" / "performance.md", ROOT / "hf_recurrent" / "recipes" / f"{name}.yaml"]
    measured = "".join(page.read_text(encoding="utf-8") for page in pages)
    for result in results:
        assert f"{result.metric_value:g}" in measured or (path.parent / "provenance" / f"{name}.json").is_file()
