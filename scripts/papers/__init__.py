"""The tables and figures of the papers, each an experiment that `scripts/reproduce.py NAME` runs.

An experiment is one class in a module, which runs its rows, and one table of the `experiments.toml` beside it, which
says what it checks and how it is reported. It uses public names of `hf_recurrent` only. `STUDIES` look for the cause
of a result: they run an experiment again with one setting at a time changed.
"""

import importlib
import tomllib
from pathlib import Path
from typing import Any

from papers.engine.experiment import Experiment
from papers.engine.factors import FactorStudy

_FOLDER = Path(__file__).parent
_PAPERS = ("memora", "survey", "online_learning", "learner", "mgrade", "smt")


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((_FOLDER / name).read_text(encoding="utf-8"))


def _described(paper: str) -> dict[str, dict[str, Any]]:
    """Name of each experiment of a paper → its table, with the path of its class and its whole note."""
    tables = _read(f"{paper}/experiments.toml")
    parts = tables.pop("parts", {})
    for name, table in tables.items():
        table |= {"name": name, "kind": f"papers.{paper}.{table['kind']}"}
        for part, text in parts.items():
            table["note"] = table["note"].replace(f"{{{part}}}", text)
    return tables


_TABLES = {name: table for paper in _PAPERS for name, table in _described(paper).items()}
# Name → class, imported on first use, and description.
EXPERIMENTS = {name: (table.pop("kind"), table.pop("summary")) for name, table in _TABLES.items()}
STUDIES = {table["name"]: FactorStudy(**table) for table in _read("causes.toml")["studies"]}


def load_experiment(name: str) -> Experiment:
    """The experiment or study of that name.

    Raises:
        ValueError: unknown name; the message lists the experiments and studies.
    """
    if name in STUDIES:
        study = STUDIES[name]
        study.attach(load_experiment(study.rows_of))
        return study
    if name not in EXPERIMENTS:
        raise ValueError(
            f"NAME is {name!r}; the experiments are {', '.join(EXPERIMENTS)}; studies: {', '.join(STUDIES)}."
        )
    module, _, kind = EXPERIMENTS[name][0].rpartition(".")
    experiment = getattr(importlib.import_module(module), kind)()
    vars(experiment).update(_TABLES[name])
    return experiment
