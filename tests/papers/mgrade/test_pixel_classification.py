"""Tables 1 and 2: the sizes of their models."""

from hf_recurrent import MgradeForSequenceClassification, config_from_preset
from papers import load_experiment


def test_small_and_paper_sizes_are_those_of_the_tables():
    """Table 1's models have equal parameters, and at the paper's size its presets."""
    for name, low, high in (("mgrade-table1", 2_800, 3_300), ("mgrade-table2", 3_000, 3_900)):
        for row in load_experiment(name).rows("small"):
            model = MgradeForSequenceClassification(config_from_preset(row["preset"], **row["options"]))
            assert low < model.num_parameters() < high, row["label"]
    paper = {row["label"]: row["preset"] for row in load_experiment("mgrade-table1").rows("paper")}
    assert paper["grey sCIFAR: TCN-EID"] == "tcn-scifar-exponential" and paper["sMNIST: minGRU"] == "mingru-smnist"
    assert len(paper) == 10
