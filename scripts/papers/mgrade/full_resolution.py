"""mGRADE and TCNs on long sequences of pixels, of which a TCN sees a part (mGRADE, section 5.2 and table 1)."""

from papers.engine.experiment import Settings
from papers.mgrade.pixel_classification import PixelClassification
from papers.mgrade.table1 import DATASETS, MODELS, preset_of

# Format → data set that names the presets, pixels added at each side of a digit.
FORMATS = {"28 by 28": ("mnist", 0), "32 by 32, as grey sCIFAR": ("cifar", 2)}


class FullResolution(PixelClassification):
    sizes = {
        "small": {"pooling": 1, "epochs": 1, "batch_size": 32, "learning_rate": 1e-2, "warmup_share": 0.2},
        "paper": PixelClassification.sizes["paper"],
    }

    def rows(self, size: str) -> list[Settings]:
        return [
            {
                "label": f"{name}: {label}",
                "preset": preset_of(preset, DATASETS[names][1]),
                "options": {},
                "dataset": "mnist",
                "data": "data/mnist",
                "padding": padding,
                **self.sizes[size],
            }
            for name, (names, padding) in FORMATS.items()
            for label, (preset, _) in MODELS.items()
            if label in ("minGRU", "TCN-EID", "mGRADE-EID")
        ]
