"""Learning rules on sCIFAR, IMDB and ListOps (Online learning of long-range dependencies, Tables 2 and 3)."""

from typing import Any

import torch

from hf_recurrent import SequenceRule
from papers.engine.experiment import Experiment, Settings
from papers.engine.labelled_sequences import DATA, train_and_test
from papers.engine.supervised import Wrapper
from papers.engine.training import new_classifier
from papers.online_learning.bit_copier import WITHOUT_CLIPPING

RULES = {"spatial": "spatial", "truncated": "truncated", "ours": "rtrl", "BPTT": "bptt"}
# Table 3 has no BPTT.
DENSE_RULES = {"spatial": "spatial", "truncated": "truncated", "SnAp-1": "snap1"}
# Tables 2 and 3, in the order of the rules.
PRINTED = {
    "sCIFAR": ("58.2 ± 0.7", "60.0 ± 1.3", "79.6 ± 1.0", "83.4 ± 1.5"),
    "IMDB": ("83.5 ± 0.2", "84.0 ± 0.5", "86.5 ± 0.4", "87.7 ± 0.4"),
    "ListOps": ("32.0 ± 0.3", "31.9 ± 0.6", "37.6 ± 0.7", "39.8 ± 0.2"),
    "sCIFAR, linear RNN": ("50.6 ± 0.2", "50.5 ± 0.4", "63.7 ± 0.3"),
}
_SMALL_MODEL: Settings = {"hidden_size": 64, "state_size": 64, "num_hidden_layers": 2, "dropout": 0.0}
_CANDIDATES = [{"learning_rate": rate, "options": {"r_min": low}} for rate in (1e-3, 3e-3) for low in (0.0, 0.9)]
# Size → task → its settings. The paper's are in Table 6, where a grid was searched the candidates.
TASKS: dict[str, dict[str, Settings]] = {
    "small": {
        "sCIFAR": {**DATA["small"]["pixels"], "preset": "lru-scifar", "options": _SMALL_MODEL | {"input_size": 1}},
        "IMDB": {**DATA["small"]["texts"], "preset": "lru-imdb", "options": _SMALL_MODEL},
        "ListOps": {**DATA["small"]["list_ops"], "preset": "lru-listops", "options": _SMALL_MODEL},
    },
    "paper": {
        "sCIFAR": {
            **DATA["paper"]["pixels"], "preset": "lru-scifar", "options": {},
            "epochs": 180, "warmup_share": 0.1, "batch_size": 100,
            "candidates": [
                {"learning_rate": rate, "weight_decay": decay} for rate in (1e-3, 4e-3) for decay in (0.1, 0.5)
            ],
        },
        "IMDB": {
            **DATA["paper"]["texts"], "preset": "lru-imdb", "options": {},
            "epochs": 40, "warmup_share": 0.1, "batch_size": 32, "weight_decay": 0.05,
            "candidates": _CANDIDATES,
        },
        "ListOps": {
            **DATA["paper"]["list_ops"], "preset": "lru-listops", "options": {},
            "epochs": 35, "warmup_share": 0.0, "batch_size": 32, "weight_decay": 0.05,
            "candidates": _CANDIDATES,
        },
    },
}  # fmt: skip
# Width of the residual stream with which a linear RNN has as many parameters: appendix B.2.
DENSE_WIDTH = {"small": 80, "paper": 294}


class LongRange(Experiment):
    paper = {
        f"{task}: {rule}": number
        for task, numbers in PRINTED.items()
        for rule, number in zip(DENSE_RULES if "linear" in task else RULES, numbers, strict=True)
    }
    sizes = {
        "small": {
            "steps": 300, "batch_size": 32, "learning_rate": 4e-3, "weight_decay": 0.05, "warmup_share": 0.1,
            "num_tested": 1000,
        },
        "paper": {"num_tested": 2000, "arguments": WITHOUT_CLIPPING},
    }  # fmt: skip

    def rows(self, size: str) -> list[Settings]:
        shared = self.size_settings(size)
        rows = [
            {"label": f"{name}: {label}", "rule": rule, **shared, **task}
            for name, task in TASKS[size].items()
            for label, rule in RULES.items()
        ]
        pixels = TASKS[size]["sCIFAR"]
        dense = {"recurrent_unit": "dense_linear", "state_size": pixels["options"].get("state_size", 256) // 2}
        dense = pixels["options"] | dense | {"hidden_size": DENSE_WIDTH[size]}
        rows += [
            {"label": f"sCIFAR, linear RNN: {label}", "rule": rule, **shared, **pixels, "options": dense}
            for label, rule in DENSE_RULES.items()
        ]
        return rows

    def run(self, settings: Settings) -> dict[str, Any]:
        model = new_classifier(settings)
        return train_and_test(model, settings, RuleClassifier(model, settings["rule"]))


class RuleClassifier(Wrapper):
    """A sequence classifier whose backward pass computes the gradient of a learning rule, see [`SequenceRule`]."""

    inner = "model"

    def __init__(self, model: Any, rule: str):
        super().__init__()
        self.model = model
        self.rule = SequenceRule(rule, model)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> Any:
        """Read tokens (B, T) or values (B, T, I) with labels (B,)."""
        inputs = {"input_ids": input_ids} if input_values is None else {"input_values": input_values}
        with self.rule.block():
            return self.model(**inputs, attention_mask=attention_mask, labels=labels)
