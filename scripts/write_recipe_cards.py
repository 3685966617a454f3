"""Write model_cards/: one card per recipe, with measured numbers only.

    python scripts/write_recipe_cards.py

A recipe whose run recorded its provenance (model_cards/provenance/RECIPE.json) has the card of that run. One that was
measured before provenance was recorded has its numbers from docs/performance.md. The others say that none is recorded.
"""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_recurrent.checkpoints.records import Provenance, from_json
from hf_recurrent.cli.recipes import load_recipe, recipe_names
from hf_recurrent.hub.model_card import create_model_card, describe_model
from hf_recurrent.hub.model_card_phases import hub_dataset_names
from hf_recurrent.presets import config_from_preset, preset_names

FOLDER = Path(__file__).resolve().parents[1] / "model_cards"
OWNER = "hf-recurrent"
# Numbers of docs/performance.md and of the recipes, on the held-out files of Python 3.11.7's standard library.
_WHOLE = {"num_bytes": 1_551_181, "num_episodes": 88}
_COMPRESSORS = {"gzip -9, each file alone": 1.704, "bz2 -9, each file alone": 1.588, "xz -9, each file alone": 1.595}
MEASURED: dict[str, dict[str, Any]] = {
    "default": {
        "metrics": {"bits_per_byte": 2.027, **_WHOLE},
        "comparisons": _COMPRESSORS,
        "train_steps": 3418,
        "hardware": "two idle CPU cores, 3 min 38 s with the evaluation",
    },
    "memora-s0": {
        "metrics": {"bits_per_byte": 1.458, **_WHOLE},
        "comparisons": _COMPRESSORS,
        "train_steps": 9766,
        "hardware": "one busy CPU core, 63 minutes",
    },
    "smt": {
        "metrics": {"bits_per_byte": 2.57},
        "hardware": "one CPU core, about 5 minutes",
    },
}


def card_of(name: str) -> ModelCard:
    """The card of a recipe."""
    recipe = load_recipe(name)
    model = build_model(recipe["model"])
    recorded = FOLDER / "provenance" / f"{name}.json"
    options = {"repo_id": f"{OWNER}/{name}", "license": "apache-2.0"}
    if recorded.is_file():
        return create_model_card(model, provenance=from_json(json.loads(recorded.read_text())), **options)
    if name in MEASURED:
        stated = {"corpus_name": recipe["corpus"][0], "recipe": name, **MEASURED[name]}
        return create_model_card(model, provenance=Provenance(), **stated, **options)
    return unmeasured_card(name, recipe, model)


def unmeasured_card(name: str, recipe: dict[str, Any], model: PreTrainedModel | None) -> ModelCard:
    """The card of a recipe without a measured run: what it asks for, and no result."""
    data = ModelCardData(
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["hf_recurrent", "byte-level"],
        datasets=hub_dataset_names(recipe["corpus"]) or None,
    )
    lines = [f"---\n{data.to_yaml()}\n---\n", f"# {name}\n"]
    lines.append("**No finished run of this recipe is recorded, so there are no weights and no measured numbers.**\n")
    lines.append(f"```bash\nhf-recurrent pretrain --recipe {name}\n```\n")
    if model is not None:
        lines += ["## Model\n", _table(describe_model(model))]
    lines += ["## Arguments of the recipe\n", _table({f"`{key}`": f"`{value}`" for key, value in recipe.items()})]
    return ModelCard("\n".join(lines), ignore_metadata_errors=True)


def build_model(name: str) -> PreTrainedModel | None:
    """The model of a preset, without weights; None for the name of a saved model."""
    if name not in preset_names():
        return None
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_from_preset(name))


def _table(facts: dict[str, str]) -> str:
    rows = "".join(f"| {label} | {value} |\n" for label, value in facts.items())
    return f"| | |\n|---|---|\n{rows}"


def main() -> None:
    """Write all cards."""
    FOLDER.mkdir(exist_ok=True)
    for name in recipe_names():
        FOLDER.joinpath(f"{name}.md").write_text(card_of(name).content, encoding="utf-8")


if __name__ == "__main__":
    main()
