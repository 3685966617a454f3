"""Parity beyond the training length, with and without negative eigenvalues (Grazzi et al. 2024)."""

from typing import Any

from hf_recurrent import Parity, evaluate_task
from papers.engine.experiment import Experiment, Settings
from papers.engine.training import build_model, train_on_task

UNITS = {"GLRU": "glru", "minGRU": "mingru", "HGRN": "hgrn"}


class ParityLengths(Experiment):
    lines = {
        label + suffix: {"recurrent_unit": unit, "allow_negative_eigenvalues": bool(suffix)}
        for label, unit in UNITS.items()
        for suffix in ("", ", negative eigenvalues")
    }
    shared = {"length": 40, "num_tested": 2000}
    sizes = {
        "small": {"steps": 1500, "batch_size": 64, "learning_rate": 2e-3, "longest": 640},
        "paper": {"steps": 20_000, "batch_size": 256, "learning_rate": 1e-3, "longest": 2560},
    }

    def run(self, settings: Settings) -> dict[str, Any]:
        seed, length = settings["seed"], settings["length"]
        options = {key: settings[key] for key in ("recurrent_unit", "allow_negative_eigenvalues")}
        widths = {"hidden_size": 32, "state_size": 64, "num_hidden_layers": 2}
        model = build_model("memora-tiny", 2, seed, **widths, **options)
        results = train_on_task(model, Parity(length=length, seed=seed), settings)
        value, tested = {}, length
        while tested <= settings["longest"]:
            task = Parity(length=tested, seed=seed, final_only=True)
            measured = evaluate_task(model, task, num_examples=settings["num_tested"], block_size=512)
            value[str(tested)] = measured["accuracy"]
            tested *= 2
        return {**results, "value": value}
