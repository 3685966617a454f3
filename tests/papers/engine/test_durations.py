"""Times of rows that have not run."""

import itertools

import pytest

from papers.engine import durations
from papers.engine.durations import RowsOfASize, read_times, row_seconds, time_row, write_times
from papers.engine.experiment import Experiment
from papers.engine.rows_file import row_key
from papers.online_learning.bit_copier import BitCopier, CopiedBits, train_bit_copier


class Bits(Experiment):
    """Two trainings of a tiny model."""

    name = "bits"
    tuning = {"small": {"steps": 100}}  # noqa: RUF012

    def rows(self, size):
        candidates = [{"learning_rate": rate} for rate in (1e-3, 1e-2)]
        return [{"label": "a", "steps": 1000, "batch_size": 2, "candidates": candidates}]

    def run(self, settings):
        data, self.losses = CopiedBits(2, 4, settings["seed"]), []
        for _ in range(2):
            model = BitCopier({"hidden_size": 4, "state_size": 4, "num_hidden_layers": 1}, "bptt")
            train_bit_copier(model, data, settings, self.losses)
        return {"value": 0.0}


@pytest.fixture
def clock(monkeypatch):
    """Every look at the clock takes a second."""
    seconds = itertools.count()
    monkeypatch.setattr(durations.time, "process_time", lambda: float(next(seconds)))


def test_a_row_is_estimated_from_its_first_steps(clock):
    experiment = Bits()
    settings = {**experiment.rows("small")[0], "learning_rate": 1e-3, "seed": 0}
    seconds = row_seconds(experiment, settings)
    assert len(experiment.losses) == 2 * 3
    assert seconds == 2 * 1000 + 1  # all steps, and the end


def test_candidates_count_by_their_length(clock, tmp_path):
    experiment = Bits()
    (row,) = experiment.rows("small")
    entry = time_row(experiment, "small", row)
    assert entry["row"] == "a" and entry["candidate_seconds"] == round(entry["seconds"] / 10, 2)
    write_times({"bits": {row_key(row): entry}}, "small", tmp_path)
    rows = RowsOfASize(experiment, "small", tmp_path, read_times("small", tmp_path)["bits"])
    assert rows.whole == rows.left == pytest.approx(3 * entry["seconds"] + 2 * entry["candidate_seconds"])
