"""What a training step costs one operation after another, and in tokens (SMT, section 3.3)."""

import time
from collections.abc import Sequence
from typing import Any

from hf_recurrent.reproduce.experiment import Experiment, Settings
from hf_recurrent.reproduce.smt_sizes import BPTT, DMT, PAPER_MODEL, SMALL_MODEL, SMT

LENGTHS = {"small": (16, 32, 64, 128), "paper": (64, 128, 256, 512)}


class SequentialCost(Experiment):
    name = "smt-cost"
    source = "SMT, Table 1, sequential operations"
    claim = (
        "The operations of a step that have to follow one another do not grow with the length in SMT; in BPTT and DMT "
        "they grow in proportion to it."
    )
    metric = "operations one after another in an optimizer step"
    x_label = "T ="
    logarithmic = True
    scientific = True

    def rows(self, size: str) -> list[Settings]:
        sizes = SMALL_MODEL if size == "small" else PAPER_MODEL
        shared = {"sizes": sizes, "vocab_size": 256, "lengths": list(LENGTHS[size]), "future_length": 64}
        return [{"label": method, **shared} for method in (BPTT, SMT, DMT)]

    def run(self, settings: Settings) -> dict[str, Any]:
        from hf_recurrent.reproduce.smt_operations import step_operations
        from hf_recurrent.reproduce.smt_training import build_pair

        start = time.perf_counter()
        rnn, teacher = build_pair(settings["sizes"], settings["vocab_size"], settings["seed"])
        value = {
            str(length): step_operations(rnn, teacher, settings["label"], length, settings["future_length"])
            for length in settings["lengths"]
        }
        return {
            "value": value,
            "num_parameters": rnn.num_parameters() + (0 if settings["label"] == BPTT else teacher.num_parameters()),
            "seconds": round(time.perf_counter() - start, 2),
            "device": "the CPU",
        }

    def note(self, rows: Sequence[Settings]) -> str:
        row = rows[0]
        sizes = row["sizes"]
        exact = "; ".join(
            f"{each['label']} {', '.join(f'{count:,}' for count in each['value'].values())}" for each in rows
        )
        return (
            "Counted in PyTorch's own graph of gradients, forwards and backwards; what only moves numbers counts "
            f"nothing. Exactly: {exact}. RNN and encoder have {sizes['num_hidden_layers']} layers, readout and "
            f"decoder {sizes['num_readout_layers']}; Tc = T, Tf = {row['future_length']}. Tokens that a step reads "
            "from each sequence: T in BPTT, Tc + Tf in SMT, Tc and what it unrolls in DMT; of a task an example in "
            "all three."
        )


EXPERIMENT = SequentialCost()
