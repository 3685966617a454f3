"""Sequential operations of a training step (SMT, section 3.3)."""

from typing import Any

from papers.engine.experiment import Experiment, Settings
from papers.engine.training import measured_run
from papers.smt.models import BPTT, DMT, PAPER_MODEL, SMALL_MODEL, SMT, build_pair
from papers.smt.operations import step_operations


class SequentialCost(Experiment):
    lines = {BPTT: {}, SMT: {}, DMT: {}}
    shared = {"vocab_size": 256, "future_length": 64}
    sizes = {
        "small": {"sizes": SMALL_MODEL, "lengths": [16, 32, 64, 128]},
        "paper": {"sizes": PAPER_MODEL, "lengths": [64, 128, 256, 512]},
    }

    def run(self, settings: Settings) -> dict[str, Any]:
        with measured_run() as record:
            pair = build_pair(settings["sizes"], settings["vocab_size"], settings["seed"])
            value = {
                str(length): step_operations(*pair, settings["label"], length, settings["future_length"])
                for length in settings["lengths"]
            }
        trained = pair[:1] if settings["label"] == BPTT else pair
        parameters = sum(model.num_parameters() for model in trained)
        return {**record, "device": "the CPU", "value": value, "num_parameters": parameters}
