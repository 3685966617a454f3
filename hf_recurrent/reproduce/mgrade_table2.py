"""Learned positions of the taps against fixed ones (mGRADE, section 5.4)."""

from collections.abc import Sequence
from typing import Any

from hf_recurrent.reproduce import pixel_classification
from hf_recurrent.reproduce.experiment import Experiment, Settings

# Label → preset of the paper's size, its accuracy there, and fields for digits of 14 × 14 pixels.
MODELS = {
    "mGRADE-CD, fixed": ("mgrade-scifar", "81.9 ± 0.4", {"spacing": "constant", "conv_kernel": 4, "dilation": 8}),
    "mGRADE-L, dilated at first": (
        "mgrade-scifar-learned",
        "82.9 ± 0.6",
        {"spacing": "learned", "conv_kernel": 4, "dilation": None, "receptive_field": 32},
    ),
    "mGRADE-L, uniform at first": (
        "mgrade-scifar-learned-uniform",
        "81.8 ± 0.6",
        {
            "spacing": "learned",
            "conv_kernel": 8,
            "dilation": None,
            "receptive_field": 16,
            "position_init": "uniform",
        },
    ),
}
SMALL: Settings = {"pooling": 2, "epochs": 15, "batch_size": 32, "learning_rate": 1e-2, "warmup_share": 0.2}


class PositionsTable(Experiment):
    name = "mgrade-table2"
    source = "mGRADE, Table 2"
    claim = (
        "Learned positions are better than fixed ones of the same number and reach; drawn at random over half the "
        "reach, twice as many of them are as good with a smaller memory."
    )
    metric = "accuracy"
    percent = True
    paper = {label: printed for label, (_, printed, _) in MODELS.items()}  # noqa: RUF012 (read only)

    def rows(self, size: str) -> list[Settings]:
        small = size == "small"
        data = {"dataset": "mnist", "data": "data/mnist"} if small else {"dataset": "cifar", "data": "data/cifar10"}
        training = SMALL if small else {"pooling": 1, **pixel_classification.PAPER_TRAINING}
        return [
            {
                "label": label,
                "preset": "mgrade-smnist" if small else preset,
                "options": small_options if small else {},
                **data,
                **training,
            }
            for label, (preset, _, small_options) in MODELS.items()
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        return pixel_classification.run_row(settings)

    def note(self, rows: Sequence[Settings]) -> str:
        return pixel_classification.note(rows)


EXPERIMENT = PositionsTable()
