"""Results as data: `.eval_results/*.yaml`, which the Hub shows on the model's page and on a benchmark's leaderboard.

Only recorded measurements of the present weights on held-out data of a dataset of the Hub are written; the card's
`model-index` also has those on local data. Format: https://huggingface.co/docs/hub/eval-results.
"""

import os
from pathlib import Path

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

from hf_recurrent.checkpoints.atomic_files import atomic_file
from hf_recurrent.checkpoints.privacy import hub_name
from hf_recurrent.checkpoints.records import Provenance, Result
from hf_recurrent.hub.model_card_training import measured_size, metric_label, shown_metrics, split_of

EVAL_RESULTS_FILE = ".eval_results/hf_recurrent.yaml"
_DIGITS = 6


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
        if split_of(result) == "validation" and (dataset := _dataset_of(result)) is not None
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


def _dataset_of(result: Result) -> str | None:
    """The dataset's name on the Hub; None for other data, and for mixtures, which have no leaderboard."""
    name = result.data.name
    return hub_name(name.removeprefix("hub:")) if name.startswith("hub:") else None


def _notes(name: str, result: Result) -> str:
    """The metric and how it was measured."""
    parts = [metric_label(name, result), f"held-out data{measured_size(result)}"]
    if (carried := result.settings.get("state_carried")) is not None:
        parts.append("the state carried" if carried else "no state carried")
    return ", ".join(parts)
