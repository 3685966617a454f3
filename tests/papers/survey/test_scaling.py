"""Power laws of the scaling experiment: fits, intervals, what counts save."""

import math

import pytest

from papers import load_experiment
from papers.survey.scaling import FAMILIES, SCALES, fit_power_law, laws_of


def bits(parameters, num_bytes, scale=20.0, p=0.1, b=0.15):
    return scale * parameters**-p * num_bytes**-b


def rows_of(family, seeds=(0, 1, 2), scales=(0.1, 0.3), **law):
    places = (65_536, 262_144, 524_288)
    return [
        {"family": family, "scale": scale, "seed": seed, "dense_parameters": int(scale * 1e6),
         "value": {str(n): bits(scale * 1e6, n, **law) * (1 + seed / 100) for n in places}}
        for seed in seeds
        for scale in scales
    ]  # fmt: skip


def test_the_exponents_of_an_exact_law():
    law = fit_power_law([(n, d, bits(n, d)) for n in (1e5, 3e5, 1e6) for d in (1e5, 1e6)])
    assert law["parameters"] == pytest.approx(0.1) and law["bytes"] == pytest.approx(0.15)
    assert math.exp(law["log_C"]) == pytest.approx(20) and law["residual"] < 1e-9
    one_size = fit_power_law([(1e5, d, bits(1e5, d)) for d in (1e5, 3e5, 1e6)])
    assert math.isnan(one_size["parameters"]) and one_size["bytes"] == pytest.approx(0.15)


def test_a_scale_that_one_seed_lacks_is_not_fitted():
    rows = [*rows_of("Hawk"), *rows_of("Hawk", seeds=(0,), scales=(1.0,), scale=99.0)]
    assert {round(law["parameters"], 6) for law in laws_of(rows).values()} == {0.1}


def test_the_table_has_intervals_and_where_counts_save_nothing():
    rows = rows_of("Memora", scale=60.0)
    # Half a bit less for each tenfold of bytes, and 0.2 more for each tenfold of parameters.
    mixed = [
        row | {"family": "Memora with counts and n-grams", "value": {
            n: bits - (4 - 0.5 * math.log10(int(n)) + 0.2 * math.log10(row["dense_parameters"] / 1e5))
            for n, bits in row["value"].items()
        }}
        for row in rows
    ]  # fmt: skip
    table = load_experiment("scaling").own_table([*rows, *mixed])
    assert "| Memora | 5" not in table and "| 0.100 [0.100, 0.100] | 0.150 [0.150, 0.150] |" in table
    assert table.count("| -0.500 [-0.500, -0.500] |") == 2
    assert "| -0.500 [-0.500, -0.500] | 8.000 [8.000, 8.000] |" in table
    assert "| per tenfold parameters | 0.200 [0.200, 0.200] |" in table
    assert "per tenfold" not in load_experiment("scaling").own_table(rows)


def test_a_family_is_tuned_once_at_the_smallest_scale():
    from papers.engine.tuning import tuning_rows

    experiment = load_experiment("scaling")
    rows = experiment.rows("small")
    assert len(rows) == sum(len(family["widths"]) for family in FAMILIES.values()) and len(SCALES) == 4
    trials = {str(trial) for row in rows for trial in tuning_rows(experiment, "small", row)}
    assert len(trials) == len(experiment.rates) * len(FAMILIES)
