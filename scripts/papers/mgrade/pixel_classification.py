"""Images read pixel by pixel: mGRADE, TCNs and minGRU of equal parameters, learned positions of the taps against fixed
ones, and sequences of which a TCN sees a part (mGRADE, sections 5.2 and 5.4, tables 1 and 2)."""

from collections.abc import Sequence
from typing import Any

from papers.engine.experiment import Experiment, Settings
from papers.engine.images import load_pixels
from papers.engine.labelled_sequences import accuracy
from papers.engine.supervised import train_supervised
from papers.engine.training import new_classifier

# Data set → its name in the paper, its name in the presets, and its default folder.
DATASETS = {"mnist": ("sMNIST", "smnist", "data/mnist"), "cifar": ("grey sCIFAR", "scifar", "data/cifar10")}
# Table 1: label → preset, and at the small size what replaces its fields: delays for rows of 14 pixels instead of 28.
MODELS = {
    "minGRU": ("mingru", {}),
    "TCN-CD": ("tcn", {"dilation": 8}),
    "mGRADE-CD": ("mgrade", {"dilation": 8}),
    "TCN-EID": ("tcn-exponential", {}),
    "mGRADE-EID": ("mgrade-exponential", {"dilation": 2}),
}
# Label → test accuracy on sMNIST, on grey sCIFAR.
PRINTED = {
    "minGRU": ("98.13 ± 0.12", "63.6 ± 0.4"),
    "TCN-CD": ("97.03 ± 0.01", "77.1 ± 0.6"),
    "mGRADE-CD": ("98.68 ± 0.1", "81.9 ± 0.4"),
    "TCN-EID": ("98.28 ± 0.07", "81.6 ± 0.3"),
    "mGRADE-EID": ("98.63 ± 0.19", "82.6 ± 0.1"),
}
# Format of digits at their full size → data set that names the presets, pixels added at each side.
FORMATS = {"28 by 28": ("mnist", 0), "32 by 32, as grey sCIFAR": ("cifar", 2)}
_LEARNED = {"spacing": "learned", "dilation": None}
# Table 2: label → preset at the paper's size, its accuracy there, and fields for digits of 14 × 14 pixels.
POSITIONS = {
    "mGRADE-CD, fixed": ("mgrade-scifar", "81.9 ± 0.4", {"spacing": "constant", "conv_kernel": 4, "dilation": 8}),
    "mGRADE-L, dilated at first": (
        "mgrade-scifar-learned",
        "82.9 ± 0.6",
        _LEARNED | {"conv_kernel": 4, "receptive_field": 32},
    ),
    "mGRADE-L, uniform at first": (
        "mgrade-scifar-learned-uniform",
        "81.8 ± 0.6",
        _LEARNED | {"conv_kernel": 8, "receptive_field": 16, "position_init": "uniform"},
    ),
}


class PixelClassification(Experiment):
    """A table of test accuracies, whose rows have `preset`, `options` and the settings below."""

    # The paper's size has the settings of appendix C for sCIFAR.
    sizes = {
        "small": {
            "dataset": "mnist", "data": "data/mnist", "pooling": 2,
            "epochs": 15, "batch_size": 32, "learning_rate": 1e-2, "warmup_share": 0.2,
        },
        "paper": {
            "dataset": "cifar", "data": "data/cifar10", "pooling": 1,
            "epochs": 100, "batch_size": 32, "learning_rate": 4e-3, "warmup_share": 0.5,
        },
    }  # fmt: skip

    def run(self, settings: Settings) -> dict[str, Any]:
        train, test, words = load_pixels(settings)
        model = self.build(settings)
        results = train_supervised(model, train, settings, warmup_share=settings["warmup_share"])
        results |= {"data_used": words, "total_memory": model.memory_footprint().total}
        return {**results, "value": accuracy(model, test, len(test), batch_size=250)}

    def build(self, settings: Settings) -> Any:
        """A row's new model."""
        return new_classifier(settings)

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        return {**super().details(rows), "floats at inference": f"{rows[-1]['total_memory']:,}"}


def preset_of(family: str, row: str) -> str:
    """Name of a preset: ("tcn-exponential", "smnist") → "tcn-smnist-exponential"."""
    name, *kind = family.split("-")
    return "-".join([name, row, *kind])


class PixelTable(PixelClassification):
    paper = {
        f"{name}: {label}": numbers[place]
        for place, (name, *_) in enumerate(DATASETS.values())
        for label, numbers in PRINTED.items()
    }

    def rows(self, size: str) -> list[Settings]:
        small = size == "small"
        return [
            {
                "label": f"{name}: {label}",
                "preset": preset_of(preset, row),
                "options": small_options if small else {},
                **self.sizes[size],
                "dataset": dataset,
                "data": folder,
            }
            for dataset, (name, row, folder) in DATASETS.items()
            if dataset == "mnist" or not small
            for label, (preset, small_options) in MODELS.items()
        ]


class FullResolution(PixelClassification):
    sizes = {
        "small": PixelClassification.sizes["small"] | {"pooling": 1, "epochs": 1},
        "paper": PixelClassification.sizes["paper"] | {"dataset": "mnist", "data": "data/mnist"},
    }

    def rows(self, size: str) -> list[Settings]:
        return [
            {
                "label": f"{name}: {label}",
                "preset": preset_of(MODELS[label][0], DATASETS[names][1]),
                "options": {},
                "padding": padding,
                **self.sizes[size],
            }
            for name, (names, padding) in FORMATS.items()
            for label in ("minGRU", "TCN-EID", "mGRADE-EID")
        ]


class PositionsTable(PixelClassification):
    # On the paper's images only.
    paper = {f"grey sCIFAR: {label}": printed for label, (_, printed, _) in POSITIONS.items()}

    def rows(self, size: str) -> list[Settings]:
        small = size == "small"
        return [
            {
                "label": label if small else f"grey sCIFAR: {label}",
                "preset": "mgrade-smnist" if small else preset,
                "options": small_options if small else {},
                **self.sizes[size],
            }
            for label, (preset, _, small_options) in POSITIONS.items()
        ]
