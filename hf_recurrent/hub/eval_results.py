"""Results as data: `.eval_results/*.yaml`, which the Hub shows on the model's page and on a benchmark's leaderboard.

Only recorded measurements of the present weights on held-out data of a dataset of the Hub are written; the card's
`model-index` also has those on local data. Format: https://huggingface.co/docs/hub/eval-results.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResultEntry, ModelCard, eval_result_entries_to_yaml
from transformers import PreTrainedModel

from hf_recurrent.checkpoints.atomic_files import atomic_file
from hf_recurrent.checkpoints.privacy import hub_name
from hf_recurrent.checkpoints.provenance_files import find_provenance, write_provenance
from hf_recurrent.checkpoints.records import Data, Provenance, Result
from hf_recurrent.data.episode_source import EpisodeSource
from hf_recurrent.hub.model_card import Statements, create_model_card
from hf_recurrent.hub.model_card_training import measured_size, metric_label, shown_metrics, split_of

EVAL_RESULTS_FILE = ".eval_results/hf_recurrent.yaml"
_DIGITS = 6
_EVALUATION = re.compile(r"^## Evaluation\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
_COMPARISON = re.compile(r"^\| ([^*|]+) \| ([\d.]+) \|$", re.MULTILINE)  # a row that an author stated


def eval_result_entries(provenance: Provenance) -> list[EvalResultEntry]:
    """An entry for each metric of the present weights on a dataset of the Hub; the task's id is the metric's name."""
    return [
        EvalResultEntry(
            dataset_id=dataset,
            task_id=name,
            value=round(float(value), _DIGITS),
            notes=_notes(name, result),
        )
        for result in provenance.current_results()
        # Mixtures have no leaderboard.
        if split_of(result) == "validation" and result.data.name.startswith("hub:")
        if (dataset := hub_name(result.data.name.removeprefix("hub:"))) is not None
        for name, value in shown_metrics(result).items()
    ]


def write_eval_results(provenance: Provenance, directory: str | os.PathLike) -> bool:
    """Write the file into a checkpoint's directory; without entries, delete an older one. True if it was written."""
    path, entries = Path(directory, EVAL_RESULTS_FILE), eval_result_entries(provenance)
    if not entries:
        path.unlink(missing_ok=True)
        return False
    path.parent.mkdir(exist_ok=True)
    text = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return True


def record_evaluation(
    model: PreTrainedModel,
    directory: str | os.PathLike,
    source: EpisodeSource,
    metrics: Mapping[str, Any],
    settings: dict[str, Any],
) -> None:
    """Write a result into the directory of the checkpoint that `model` was loaded from.

    Of a card that exists, only the section on evaluation and the metadata change. A result of the same weights on the
    same data with the same settings is replaced.

    Args:
        metrics: those that are finite numbers are recorded.
        settings: how it was measured: `split` ("validation" or "train"), `state_carried`, `block_size`.
    """
    provenance = find_provenance(model)
    provenance.add_metrics(provenance.weights, Data.of(source), metrics, settings)
    write_provenance(provenance, directory)
    write_eval_results(provenance, directory)
    path = Path(directory, "README.md")
    if not path.is_file():
        return
    old = ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True)
    before = _EVALUATION.search(old.text)
    others = {} if before is None else {name: float(value) for name, value in _COMPARISON.findall(before[0])}
    new = create_model_card(model, provenance, Statements(comparisons=others))
    # The front matter names the model; without a name, `huggingface_hub` writes no results.
    old.data.model_name = getattr(old.data, "model_name", None) or new.data.model_name
    old.data.eval_results = new.data.eval_results
    if before is not None:
        old.text = old.text.replace(before[0], _EVALUATION.search(new.content)[0])
    with atomic_file(path) as partial:
        partial.write_text(old.content, encoding="utf-8")


def _notes(name: str, result: Result) -> str:
    """The metric and how it was measured."""
    parts = [metric_label(name, result), f"held-out data{measured_size(result)}"]
    if (carried := result.settings.get("state_carried")) is not None:
        parts.append("the state carried" if carried else "no state carried")
    return ", ".join(parts)
