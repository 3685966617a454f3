"""What mGRADE's experiments train on and how they judge, on cases whose answer is known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_recurrent import FlipFlop, LorenzTrajectories, MgradeConfig, MgradeForSequenceClassification, MgradeModel
from hf_recurrent.reproduce import flip_flop, load_experiment, lorenz
from hf_recurrent.reproduce.pixel_classification import accuracy, average_pooled, load_images
from hf_recurrent.tasks.pixel_sequences import PixelSequences
from hf_recurrent.trainers.parameter_groups import ParameterGroupsTrainer


def test_test_digits_alone_are_divided(write_digits):
    folder = write_digits("t10k", 40)
    train, test, words = load_images("mnist", folder)
    numbers = [data.images[:, 0, 0].tolist() for data in (train, test)]
    assert [len(part) for part in numbers] == [34, 6] and sorted(numbers[0] + numbers[1]) == list(range(40))
    assert numbers[0] != sorted(numbers[0])
    for data in (train, test):
        assert (data.labels == data.images[:, 0, 0] % 10).all()
    assert words == "34 of the 40 test images to train, as the training set is not at hand; 6 others to judge"
    again = load_images("mnist", folder)[0]
    assert np.array_equal(again.images, train.images)


def test_training_files_are_read_where_they_are(write_digits):
    write_digits("t10k", 7)
    train, test, words = load_images("mnist", write_digits("train", 20))
    assert (len(train), len(test), words) == (20, 7, "20 training images; 7 others to judge")


@pytest.mark.parametrize("label", ["sMNIST: mGRADE-CD", "grey sCIFAR: minGRU"])
def test_missing_images_are_named(label, tmp_path):
    row = next(row for row in load_experiment("mgrade-table1").rows("paper") if row["label"] == label)
    folder = str(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"`data` is '.*nothing', but file not found.*--override data=FOLDER"):
        load_experiment("mgrade-table1").run({**row, "data": folder, "seed": 0})


def test_pooling_averages_squares():
    image = np.arange(16, dtype=np.uint8).reshape(1, 16, 1)
    pooled = average_pooled(PixelSequences(image, np.array([3])), 2)
    # Half to even: 2.5, 4.5, 10.5, 12.5.
    assert pooled.images[0, :, 0].tolist() == [2, 4, 10, 12] and pooled.labels.tolist() == [3]
    with pytest.raises(ValueError, match="`pooling` is 3; it must divide the images' side, and they have 16 pixels"):
        average_pooled(PixelSequences(image, np.array([3])), 3)


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
    from hf_recurrent import config_from_preset

    for name, low, high in (("mgrade-table1", 2_800, 3_300), ("mgrade-table2", 3_000, 3_900)):
        for row in load_experiment(name).rows("small"):
            model = MgradeForSequenceClassification(config_from_preset(row["preset"], **row["options"]))
            assert low < model.num_parameters() < high, row["label"]
    paper = {row["label"]: row["preset"] for row in load_experiment("mgrade-table1").rows("paper")}
    assert paper["grey sCIFAR: TCN-EID"] == "tcn-scifar-exponential" and paper["sMNIST: minGRU"] == "mingru-smnist"
    assert len(paper) == 10


def test_flip_flop_is_judged_by_reads_and_whole_sets():
    task = FlipFlop(length=64, p_ignore=0.8)

    class Answers:
        device = "cpu"

        def __init__(self, change):
            self.change = change

        def eval(self):
            pass

        def __call__(self, input_ids, use_cache):
            logits = torch.from_numpy(task.possible_next(input_ids.numpy())).float() * 40 - 20
            self.change(logits, input_ids)
            return SimpleNamespace(logits=logits)

    def always_zero(logits, input_ids):
        logits[input_ids == 3] = torch.tensor([0.9, -0.2, -1.0, -1.0, -1.0])

    assert flip_flop.measure(Answers(lambda logits, ids: None), task, 30) == (1, 1)
    reads, sets = flip_flop.measure(Answers(always_zero), task, 200)
    _, targets = task.examples(np.arange(200), "test")
    assert reads == (targets == 0).sum() / (targets >= 0).sum() and 0.4 < reads < 0.6
    assert sets == pytest.approx(1 - (targets == 1).sum() / targets.size)
    item = flip_flop.PredictionSets(task, 10)[3]
    assert item["labels"].shape == (64, 5) and item["labels"].sum(-1).unique().tolist() == [1, 2, 3]
    assert flip_flop.set_loss(SimpleNamespace(logits=item["labels"] * 40 - 20), item["labels"]) < 1e-8


def test_readout_finds_what_the_states_hold():
    """States that are the dimensions themselves: no error, and all neighbours are kept."""
    train, test = (LorenzTrajectories(4, 60, split, noise=0.0) for split in ("train", "test"))
    following = {tuple(data[index]["input_values"].flatten().tolist()): (data, index) for data in (train, test)
                 for index in range(4)}  # fmt: skip

    class Oracle(torch.nn.Module):
        config = SimpleNamespace(hidden_size=3, input_size=1)

        def forward(self, input_values, use_cache):
            rows = [following.get(tuple(row.flatten().tolist())) for row in input_values]
            states = [row[0].clean[row[1], 1:] if row else np.zeros((60, 3)) for row in rows]
            return SimpleNamespace(last_hidden_state=torch.tensor(np.stack(states)).float())

    measured = lorenz.measure(lorenz.NextStepRegressor(Oracle()), train, test)
    assert measured["value"][lorenz.LINEAR] < 1e-3 and measured["value"][lorenz.QUADRATIC] < 1e-3
    assert measured["value"][lorenz.OBSERVED] > 1
    assert measured["neighbour_overlap"] > 0.8


def test_neighbours():
    points = torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    assert lorenz.neighbour_overlap(points, 3 * points.flip(1)) == 1
    other = torch.randn(300, 5, generator=torch.Generator().manual_seed(1))
    assert lorenz.neighbour_overlap(points, other) == pytest.approx(20 / 299, abs=0.03)


def test_positions_and_biases_are_not_decayed(tmp_path):
    from transformers import TrainingArguments

    backbone = MgradeModel(MgradeConfig(input_size=1, hidden_size=4, num_hidden_layers=1, conv_kernel=2))
    model = lorenz.NextStepRegressor(backbone)
    trainer = ParameterGroupsTrainer(model, TrainingArguments(str(tmp_path), report_to="none", use_cpu=True))
    decayed = trainer.get_decay_parameter_names(model)
    assert "backbone.layers.0.convolution.weight" in decayed and "readout.weight" in decayed
    assert not [name for name in decayed if "positions" in name or "bias" in name or "norm" in name]
