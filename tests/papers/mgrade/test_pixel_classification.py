"""Tables 1 and 2: accuracy, and the sizes of their models."""

from types import SimpleNamespace

import numpy as np

from hf_recurrent import MgradeForSequenceClassification, PixelSequences, config_from_preset
from papers import load_experiment
from papers.mgrade.pixel_classification import accuracy


def test_accuracy_counts_all_images():
    class Brightest:
        device = "cpu"

        def eval(self):
            pass

        def __call__(self, input_values):
            return SimpleNamespace(logits=input_values[..., 0])

    images = np.eye(10, dtype=np.uint8)[np.arange(7)].reshape(7, 10, 1) * 200
    assert accuracy(Brightest(), PixelSequences(images, np.array([0, 1, 2, 3, 4, 9, 9])), batch_size=3) == 5 / 7


def test_small_and_paper_sizes_are_those_of_the_tables():
    """Table 1's models have equal parameters, and at the paper's size its presets."""
    for name, low, high in (("mgrade-table1", 2_800, 3_300), ("mgrade-table2", 3_000, 3_900)):
        for row in load_experiment(name).rows("small"):
            model = MgradeForSequenceClassification(config_from_preset(row["preset"], **row["options"]))
            assert low < model.num_parameters() < high, row["label"]
    paper = {row["label"]: row["preset"] for row in load_experiment("mgrade-table1").rows("paper")}
    assert paper["grey sCIFAR: TCN-EID"] == "tcn-scifar-exponential" and paper["sMNIST: minGRU"] == "mingru-smnist"
    assert len(paper) == 10
