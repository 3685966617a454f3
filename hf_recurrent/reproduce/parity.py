"""Parity beyond the training length, with and without negative eigenvalues (Grazzi et al. 2024)."""

from collections.abc import Sequence
from typing import Any

from hf_recurrent.reproduce.experiment import Experiment, Settings
from hf_recurrent.reproduce.training import build_model, train_on_task

# Label → unit, and whether its eigenvalues may be negative.
UNITS = {
    "GLRU": ("glru", False),
    "GLRU, negative eigenvalues": ("glru", True),
    "minGRU": ("mingru", False),
    "minGRU, negative eigenvalues": ("mingru", True),
    "HGRN": ("hgrn", False),
    "HGRN, negative eigenvalues": ("hgrn", True),
}
SIZES: dict[str, Settings] = {
    "small": {
        "length": 40,
        "steps": 1500,
        "batch_size": 64,
        "learning_rate": 2e-3,
        "num_tested": 2000,
        "longest": 640,
    },
    "paper": {
        "length": 40,
        "steps": 20_000,
        "batch_size": 256,
        "learning_rate": 1e-3,
        "num_tested": 2000,
        "longest": 2560,
    },
}


class ParityLengths(Experiment):
    name = "parity"
    source = "Survey, state tracking"
    claim = (
        "Units whose eigenvalues are real and not negative stay at chance (50) beyond the training length; with "
        "negative ones they keep counting."
    )
    metric = "accuracy at the last step"
    x_label = "length"
    logarithmic = True
    percent = True

    def rows(self, size: str) -> list[Settings]:
        return [
            {"label": label, "recurrent_unit": unit, "allow_negative_eigenvalues": negative, **SIZES[size]}
            for label, (unit, negative) in UNITS.items()
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        from hf_recurrent import Parity, evaluate_task

        seed, length = settings["seed"], settings["length"]
        options = {key: settings[key] for key in ("recurrent_unit", "allow_negative_eigenvalues")}
        widths = {"hidden_size": 32, "state_size": 64, "num_hidden_layers": 2}
        model = build_model("memora-tiny", 2, seed, **widths, **options)
        results = train_on_task(model, Parity(length=length, seed=seed), settings)
        value, tested = {}, length
        while tested <= settings["longest"]:
            task = Parity(length=tested, seed=seed, final_only=True)
            value[str(tested)] = evaluate_task(model, task, num_examples=settings["num_tested"], block_size=512)[
                "accuracy"
            ]
            tested *= 2
        return {**results, "value": value}

    def line_style(self, label: str) -> dict[str, Any]:
        colours = {"GLRU": "tab:blue", "minGRU": "tab:orange", "HGRN": "tab:green"}
        return {"color": colours[label.split(",")[0]], "linestyle": "-" if "negative" in label else ":"}

    def note(self, rows: Sequence[Settings]) -> str:
        row = rows[0]
        return (
            f"Memora of 2 layers, M 32, S 64, trained on {row['steps']:,} steps of {row['batch_size']} rows of "
            f"{row['length']} random bits with a target at every step; {row['num_tested']:,} rows of each length to "
            "judge."
        )


EXPERIMENT = ParityLengths()
