"""mGRADE against TCNs and minGRU of equal parameters, on images read pixel by pixel (mGRADE, section 5.2)."""

from papers.engine.experiment import Settings
from papers.mgrade.pixel_classification import PixelClassification

# Label → preset, and at the small size what replaces its fields: delays for rows of 14 pixels instead of 28.
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
# Data set → its name in the paper, its name in the presets, and its default folder.
DATASETS = {"mnist": ("sMNIST", "smnist", "data/mnist"), "cifar": ("grey sCIFAR", "scifar", "data/cifar10")}


def preset_of(family: str, row: str) -> str:
    """Name of a preset: ("tcn-exponential", "smnist") → "tcn-smnist-exponential"."""
    name, *kind = family.split("-")
    return "-".join([name, row, *kind])


class PixelTable(PixelClassification):
    paper = {
        f"{DATASETS[dataset][0]}: {label}": numbers[place]
        for place, dataset in enumerate(DATASETS)
        for label, numbers in PRINTED.items()
    }

    def rows(self, size: str) -> list[Settings]:
        small = size == "small"
        return [
            {
                "label": f"{name}: {label}",
                "preset": preset_of(preset, row),
                "options": small_options if small else {},
                "dataset": dataset,
                "data": folder,
                **self.sizes[size],
            }
            for dataset, (name, row, folder) in DATASETS.items()
            if dataset == "mnist" or not small
            for label, (preset, small_options) in MODELS.items()
        ]
