"""Studies of causes: one setting at a time, on top of the recorded rows."""

import math

import pytest
import torch

from papers import STUDIES, load_experiment
from papers.engine.experiment import Experiment
from papers.engine.factors import FactorStudy
from papers.engine.rows_file import read_rows
from papers.engine.runner import Workers, reproduce
from papers.engine.tables import confidence_interval


class Weighed(Experiment):
    """Two scales; the value is the weight, the rate, and the seed's error."""

    name, source, claim, metric, note = "weighed", "Nobody, Table 2", "Heavy is heavy.", "held-out kilograms", ""
    optional = ("extra",)

    def __init__(self):
        self.ran = []

    def rows(self, size):
        candidates = [{"rate": 1}, {"rate": 2}]
        return [{"label": name, "weight": weight, "candidates": candidates} for name, weight in (("a", 1), ("b", 3))]

    def run(self, settings):
        self.ran.append(settings)
        value = settings["weight"] * settings["rate"] + settings.get("extra", 0) + settings["seed"] / 10
        return {"value": value, "seconds": 1.0, "device": "paper"}


@pytest.fixture
def weighed():
    return Weighed()


def study(experiment, **options):
    fixed = {"a": {"rate": 1}, "b": {"rate": 1}}
    factors = {"weight": {"5": {"weight": 5}}, "rate": {"2": {"rate": 2}}}
    settings = {"first": ("a", None), "second": ("b", None), "factors": factors, "fixed": fixed} | options
    made = FactorStudy(name="why-weighed", rows_of="weighed", claim="Why?", **settings)
    made.attach(experiment)
    return made


def test_recorded_rows_are_not_run_again_and_levels_do_not_replace_them(weighed, tmp_path):
    reproduce(weighed, "small", [0, 1], tmp_path)
    count = len(weighed.ran)
    rows = reproduce(study(weighed, seeds=(0, 1)), "small", None, tmp_path)
    levels = [(row["label"], row["level"]) for row in weighed.ran[count:] if row["seed"] == 0]
    assert levels == [(label, level) for level in ("weight 5", "rate 2") for label in ("a", "b")]
    assert len(rows) == 12 and all(row["commit"] is None or len(row["commit"]) >= 12 for row in rows)
    assert [row["value"] for row in reproduce(weighed, "small", [0, 1], tmp_path)] == [1.0, 3.0, 1.1, 3.1]
    assert len(weighed.ran) == count + 8
    assert len(read_rows(tmp_path / "weighed_small.json")) == 12
    table = (tmp_path / "why_weighed_small.md").read_text()
    assert "| as recorded | 1.050 | 3.050 | +2.000 [+2.000, +2.000] | 2 |" in table
    assert "| weight 5 | 5.050 | 5.050 | +0.000 [+0.000, +0.000] | 2 |" in table
    assert "| rate 2 | 2.050 | 6.050 | +4.000 [+4.000, +4.000] | 2 |" in table
    assert (tmp_path / "why_weighed_small.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "weighed_small.png").samefile(tmp_path / "why_weighed_small.png")


def test_a_factor_that_affects_one_row_compares_it_with_the_recorded_other(weighed, tmp_path):
    factors = {"extra": {"4": {"extra": 4}}}
    rows = reproduce(
        study(weighed, factors=factors, affected={"extra": ["b"]}, seeds=(0, 1, 2)), "small", None, tmp_path
    )
    assert [row["label"] for row in rows if "level" in row] == ["b"] * 3
    assert "| extra 4 | 1.100 | 7.100 | +6.000 " in (tmp_path / "why_weighed_small.md").read_text()


def test_a_level_replaces_entries_of_a_setting_that_is_a_table(weighed):
    depths = {"a": 1, "b": 2}
    weighed.rows = lambda size: [{"label": label, "sizes": {"width": 1, "depth": depths[label]}} for label in depths]
    levels = study(weighed, factors={"width": {"3": {"sizes": {"width": 3}}}}).rows("small")[2:]
    assert [row["sizes"] for row in levels] == [{"width": 3, "depth": 1}, {"width": 3, "depth": 2}]


def test_another_number_of_the_rows_may_be_compared(weighed, tmp_path):
    made = study(weighed, factors={}, key="rate", metric="rate")
    reproduce(made, "small", [0], tmp_path)
    assert made.metric == "rate"
    assert "| as recorded | 1.000 | 1.000 | +0.000 " in (tmp_path / "why_weighed_small.md").read_text()


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({"factors": {"height": {"2": {"height": 2}}}}, "small", r"'height 2' of `why-weighed` sets \['height'\]"),
        ({}, "paper", "size is 'paper'; `why-weighed` has the size 'small' only"),
    ],
)
def test_what_a_study_cannot_run_is_named(weighed, options, size, message):
    with pytest.raises(ValueError, match=message):
        study(weighed, **options).rows(size)


def test_no_row_begins_after_the_hours(weighed, tmp_path, capsys):
    assert reproduce(weighed, "small", [0], tmp_path, workers=Workers(deadline=-math.inf)) == []
    assert weighed.ran == [] and "the time is over" in capsys.readouterr().out
    assert len(reproduce(weighed, "small", [0], tmp_path)) == 2


def test_intervals_cover_the_mean_as_often_as_they_say():
    assert confidence_interval([1.0]) is None
    generator = torch.Generator().manual_seed(0)
    for count in (2, 3, 5, 10):
        draws = torch.randn(4000, count, generator=generator, dtype=torch.float64).tolist()
        bounds = [confidence_interval(values) for values in draws]
        assert abs(sum(low < 0 < high for low, high in bounds) / len(draws) - 0.95) < 0.012


@pytest.mark.parametrize("name", STUDIES)
def test_each_study_compares_points_that_its_experiment_has(name):
    study = load_experiment(name)
    rows = study.rows("small")
    assert study is STUDIES[name]
    assert {row["label"] for row in rows} == set(study.fixed)
    assert all(set(labels) <= set(study.fixed) for labels in study.affected.values())
    chosen = {row["label"]: row["candidates"][0].keys() for row in study.base.rows("small") if "candidates" in row}
    assert all(chosen.get(row["label"], set()) <= row.keys() for row in rows if "level" in row), "fix what was chosen"
