"""Classification of images read pixel by pixel, as in mGRADE's tables 1 and 2."""

from collections.abc import Sequence
from typing import Any

from papers.engine.experiment import Experiment, Settings
from papers.engine.images import average_pooled, load_images, padded
from papers.engine.labelled_sequences import accuracy
from papers.engine.supervised import train_supervised
from papers.engine.training import new_classifier
from papers.engine.tuning import is_tuning


class PixelClassification(Experiment):
    """A table of test accuracies, whose rows have `dataset`, `data`, `preset`, `options` and the settings below."""

    # The paper's size has the settings of appendix C for sCIFAR.
    sizes = {
        "small": {"pooling": 2, "epochs": 15, "batch_size": 32, "learning_rate": 1e-2, "warmup_share": 0.2},
        "paper": {"pooling": 1, "epochs": 100, "batch_size": 32, "learning_rate": 4e-3, "warmup_share": 0.5},
    }

    def run(self, settings: Settings) -> dict[str, Any]:
        train, test, words = load_images(settings["dataset"], settings["data"], is_tuning(settings))
        if settings["pooling"] > 1:
            train, test = (average_pooled(data, settings["pooling"]) for data in (train, test))
        if settings.get("padding"):
            train, test = (padded(data, settings["padding"]) for data in (train, test))
        model = self.build(settings)
        results = train_supervised(model, train, settings, warmup_share=settings["warmup_share"])
        results |= {"data_used": words, "total_memory": model.memory_footprint().total}
        return {**results, "value": accuracy(model, test, len(test), batch_size=250)}

    def build(self, settings: Settings) -> Any:
        """A row's new model."""
        return new_classifier(settings)

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        return {**super().details(rows), "floats at inference": f"{rows[-1]['total_memory']:,}"}
