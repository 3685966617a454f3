"""Add an evaluation to a saved checkpoint: to its provenance, its card and its results as data."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import PreTrainedModel

from hf_recurrent.checkpoints.atomic_files import atomic_file
from hf_recurrent.checkpoints.provenance_files import find_provenance, write_provenance
from hf_recurrent.checkpoints.records import Data
from hf_recurrent.data.episode_source import EpisodeSource
from hf_recurrent.hub.eval_results import write_eval_results
from hf_recurrent.hub.model_card import Statements, create_model_card

_EVALUATION = re.compile(r"^## Evaluation\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
_COMPARISON = re.compile(r"^\| ([^*|]+) \| ([\d.]+) \|$", re.MULTILINE)  # a row that an author stated


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
