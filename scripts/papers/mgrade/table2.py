"""Learned positions of the taps against fixed ones (mGRADE, section 5.4)."""

from papers.engine.experiment import Settings
from papers.mgrade.pixel_classification import PixelClassification

_LEARNED = {"spacing": "learned", "dilation": None}
# Label → preset at the paper's size, its accuracy there, and fields for digits of 14 × 14 pixels.
MODELS = {
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


class PositionsTable(PixelClassification):
    # On the paper's images only.
    paper = {f"grey sCIFAR: {label}": printed for label, (_, printed, _) in MODELS.items()}

    def rows(self, size: str) -> list[Settings]:
        small = size == "small"
        data = {"dataset": "mnist", "data": "data/mnist"} if small else {"dataset": "cifar", "data": "data/cifar10"}
        return [
            {
                "label": label if small else f"grey sCIFAR: {label}",
                "preset": "mgrade-smnist" if small else preset,
                "options": small_options if small else {},
                **data,
                **self.sizes[size],
            }
            for label, (preset, _, small_options) in MODELS.items()
        ]
