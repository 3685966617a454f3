"""Runner: rows run once; table, plot and section of the page are written; errors name the input."""

import hashlib
import json
import re

import pytest

from hf_recurrent.cli.reproduce import main
from papers import EXPERIMENTS, load_experiment
from papers.engine.durations import overview, write_times
from papers.engine.experiment import Experiment
from papers.engine.report import command_line, filled_note, markdown_table, section, update_section
from papers.engine.row_checkpoints import row_checkpoints
from papers.engine.rows_file import read_rows
from papers.engine.runner import reproduce
from papers.engine.tuning import TUNING_SEED


class Halves(Experiment):
    name, source, claim, metric = "halves", "Nobody, Table 1", "A half is a half.", "size"
    note = "Factor {factor}, widths {sizes[width]:,}."
    paper = {"first": "0.5"}  # noqa: RUF012
    seeds = (0,)

    def __init__(self):
        self.ran = []

    def rows(self, size):
        return [{"label": label, "factor": 1, "sizes": {"width": 8}} for label in ("first", "second")]

    def run(self, settings):
        self.ran.append(settings)
        value = settings["factor"] / (2 + settings["seed"])
        return {"value": value, "seconds": 60.0, "device": "paper", "num_parameters": 1234}


@pytest.fixture
def halves():
    return Halves()


def test_rows_run_once(halves, tmp_path):
    rows = reproduce(halves, "small", [0], tmp_path)
    assert [row["value"] for row in rows] == [0.5, 0.5]
    assert json.loads((tmp_path / "halves_small.json").read_text()) == rows
    again = reproduce(halves, "small", [0, 1], tmp_path)
    assert again[:2] == rows
    assert [(row["label"], row["seed"]) for row in halves.ran] == [
        ("first", 0),
        ("second", 0),
        ("first", 1),
        ("second", 1),
    ]
    table = (tmp_path / "halves_small.md").read_text()
    assert "| first | 0.417 ± 1.059 | 0.5 | 1,234 |" in table
    assert "| second | 0.417 ± 1.059 | - | 1,234 |" in table
    assert (tmp_path / "halves_small.png").read_bytes().startswith(b"\x89PNG")


def test_the_time_left_is_that_of_rows_with_the_same_settings(halves, tmp_path, capsys):
    slow = {"label": "first", "factor": 5, "sizes": {"width": 8}, "seed": 0, "value": 1.0, "seconds": 36_000.0}
    (tmp_path / "halves_small.json").write_text(json.dumps([slow]))
    halves.run = lambda settings: {"value": 0.5, "seconds": 60.0, "core_seconds": 60.0, "device": "paper"}
    reproduce(halves, "small", [0], tmp_path)
    assert re.search(r"\[1/2\] first, seed 0: .*, 60.0 s; about 0 s left", capsys.readouterr().out)


def test_overrides_are_other_rows(halves, tmp_path):
    reproduce(halves, "small", [0], tmp_path)
    rows = reproduce(halves, "small", [0], tmp_path, overrides={"factor": 3}, only=["sec"])
    assert [(row["label"], row["value"]) for row in rows] == [("second", 1.5)]
    assert len(read_rows(tmp_path / "halves_small.json")) == 3


def test_rows_that_an_override_makes_the_same_run_once(halves, tmp_path):
    rows = reproduce(halves, "small", [0], tmp_path, overrides={"label": "both"})
    assert [row["label"] for row in rows] == ["both"]
    assert len(halves.ran) == 1


def test_the_page_has_one_section_an_experiment(halves, tmp_path):
    page = tmp_path / "results.md"
    page.write_text("# Results\n\nBy hand.\n")
    reproduce(halves, "small", [0], tmp_path / "results", page=page)
    update_section(page, "other", "other text\n")
    reproduce(halves, "small", [0, 1], tmp_path / "results", page=page)
    text = page.read_text()
    assert text.startswith("# Results\n\nBy hand.\n")
    assert text.count("## Nobody, Table 1: halves") == 1
    assert "2 seeds, mean ± half its 95 % interval" in text
    assert "\npython scripts/reproduce.py halves --seeds 0 1\n" in text
    assert "![halves](results/halves_small.png)" in text
    assert text.endswith("<!-- reproduce: other -->\nother text\n<!-- end of other -->\n")


def test_values_over_an_axis_are_columns():
    experiment = Halves()
    experiment.x_label = "T ="
    values = {"value": {"2": 1.0, "8": 2.0}, "seconds": 1.0, "device": "paper", "factor": 1, "sizes": {"width": 8}}
    rows = [{"label": "|line|", "seed": 0, **values}]
    assert "|  | T = 2 | T = 8 |" in markdown_table(experiment, rows)
    assert r"| \|line\| | 1.000 | 2.000 |" in section(experiment, "paper", rows, "x.png", "command")


def test_notes_name_the_settings_of_all_rows():
    rows = [{"factor": 1, "sizes": {"width": 8}}, {"factor": [1, 2], "sizes": {}}, {"sizes": {"width": 1000}}]
    assert filled_note(Halves(), rows) == "Factor 1 or 2, widths 8 or 1,000."
    assert filled_note(Halves(), [{"factor": 3, "sizes": {}}]) == "Factor 3, widths -."
    assert filled_note(Halves(), [{"factor": 3}]) == "Factor 3, widths -.", "rows of another size have other settings"


def test_parts_of_a_value_are_lines_and_details_are_columns():
    class Parts(Halves):
        x_label, part_label = "T =", "{label}: {part}"

        def details(self, rows):
            return {**super().details(rows), "seeds": f"{len(rows)}"}

    rows = [{"label": "a", "x": 4, "seed": n, "value": {"one": n, "two": 2.0}, "num_parameters": 5} for n in range(2)]
    assert list(Parts().curves(rows)) == ["a: one", "a: two"] and Parts().row_name(rows[0]) == "a, T = 4"
    table = markdown_table(Parts(), rows)
    assert "|  | T = 4 | parameters | seeds |" in table and "| a: one | 0.500 ± 6.353 | 5 | 2 |" in table


def test_a_label_that_begins_another_has_its_own_parameters():
    rows = [
        {"label": label, "seed": 0, "value": 1.0, "num_parameters": count}
        for label, count in (("a", 1), ("a, wide", 2))
    ]
    table = markdown_table(Halves(), rows)
    assert "| a | 1.000 | 1 |" in table and "| a, wide | 1.000 | 2 |" in table


def test_the_command_in_the_page_makes_its_rows_again():
    command = command_line(Halves(), "paper", [1, 2], ["sec ond"], {"factor": 3, "data": "/mine/mnist"})
    assert command == (
        "python scripts/reproduce.py halves --size paper --seeds 1 2 --only 'sec ond' --override factor=3 data=FOLDER"
    )
    assert command_line(Halves(), "small", [0], [], {}) == "python scripts/reproduce.py halves"


def test_a_damaged_file_is_not_overwritten(halves, tmp_path):
    path = tmp_path / "halves_small.json"
    path.write_text('[{"label": "fir')
    with pytest.raises(ValueError, match="is damaged"):
        reproduce(halves, "small", [0], tmp_path)
    assert path.read_text() == '[{"label": "fir'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either NAME, or --all, or --overview"),
        (["parity", "--all"], "give either NAME, or --all, or --overview"),
        (["table-9"], "NAME is 'table-9'; the experiments are selective-copying"),
        (["parity", "--override", "stepps=3"], "--override has 'stepps'; the rows' settings are"),
        (["parity", "--override", "steps"], "`--override` has 'steps'; it must be NAME=VALUE"),
        (["parity", "--override", "steps=many"], "--override has steps='many'; it must be of the type of"),
        (["parity", "--override", "steps=2.5"], "--override has steps=2.5; it must be of the type of"),
        (["parity", "--override", "steps=true"], "--override has steps=True; it must be of the type of"),
        (["parity", "--only", "LSTM"], "--only has 'LSTM'; the rows are GLRU"),
        (["parity", "--processes", "0"], "`--processes` is 0; it must be at least 1."),
        (["parity", "--page", "nowhere.md"], "`--page` is 'nowhere.md'; file not found."),
        (["stride-sweep", "--override", "step_bytes=99"], "`step_bytes` is 99; T = 2"),
    ],
)
def test_bad_input_is_named(arguments, message, tmp_path, capsys):
    extra = ["--only", "Llama"] if "step_bytes=99" in arguments else []
    with pytest.raises(SystemExit):
        main([*arguments, *extra, "--output_dir", str(tmp_path)])
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


class Tuned(Halves):
    """The value is the distance of the rate from the row's best one, plus the seed."""

    name, x_label = "tuned", None
    tuning = {"small": {"factor": 0}}  # noqa: RUF012

    def rows(self, size):
        candidates = [{"rate": rate} for rate in (1, 2, 3)]
        shared = {"factor": 1, "rate": 2, "candidates": candidates}  # a rate that is replaced
        return [{"label": label, "best": best, **shared} for label, best in (("a", 3), ("b", 1))]

    def run(self, settings):
        self.ran.append(settings)
        return {"value": float(abs(settings["rate"] - settings["best"]) + settings["seed"]), "seconds": 1.0}


def test_the_best_candidate_of_each_row_runs_with_the_seeds_that_judge(tmp_path, capsys):
    tuned = Tuned()
    rows = reproduce(tuned, "small", [0, 1], tmp_path)
    trials, judged = tuned.ran[:6], tuned.ran[6:]
    assert all(row["is_tuning"] and row["seed"] == TUNING_SEED and row["factor"] == 0 for row in trials)
    assert [(row["label"], row["seed"], row["rate"]) for row in judged] == [
        ("a", 0, 3),
        ("b", 0, 1),
        ("a", 1, 3),
        ("b", 1, 1),
    ]
    assert not any("is_tuning" in row for row in judged)
    assert [row["value"] for row in rows] == [0, 0, 1, 1]
    assert "candidate [6/6] b, seed 1000: 1002.0000 size, 1.0 s\n" in capsys.readouterr().out
    reproduce(tuned, "small", [0, 1, 2], tmp_path)
    assert len(tuned.ran) == 12  # candidates are compared once
    assert not (tmp_path / ".unfinished").exists()


def test_overrides_hold_for_candidates_too(tmp_path):
    tuned = Tuned()
    reproduce(tuned, "small", [0], tmp_path, overrides={"factor": 7}, only=["a"])
    assert {row["factor"] for row in tuned.ran} == {7}


def test_differences_are_those_of_each_seed():
    experiment = Halves()
    experiment.reference = "a"
    rows = [
        {"label": label, "seed": seed, "value": seed + extra}
        for label, extra in (("a", 0), ("b", 0.25))
        for seed in (0, 1)
    ]
    table = markdown_table(experiment, rows)
    assert "| a | 0.500 ± 6.353 | - |" in table and "| b | 0.750 ± 6.353 | +0.250 ± 0.000 |" in table


def test_a_row_that_another_process_runs_is_left_to_it(halves, tmp_path, capsys):
    row = {**halves.rows("small")[0], "seed": 0}
    key = hashlib.blake2b(json.dumps(row, sort_keys=True).encode(), digest_size=8).hexdigest()
    with row_checkpoints(tmp_path / ".unfinished" / "halves_small" / key, "first"):
        rows = reproduce(halves, "small", [0], tmp_path)
    assert [row["label"] for row in rows] == ["second"]
    assert "first, seed 0: another process has it" in capsys.readouterr().out


def test_the_overview_has_recorded_and_estimated_times(halves, tmp_path):
    class More(Halves):
        seeds = (0, 1, 2)

    reproduce(halves, "small", [0], tmp_path)
    for path in tmp_path.glob("*.json"):
        path.write_text(re.sub(r'"core_seconds": [0-9.]+', '"core_seconds": 150.0', path.read_text()))
    text = overview({"halves": More(), "never": Tuned()}, "small", tmp_path)
    assert "| halves | 6 | 2 | 5 min | 10 min | 15 min |" in text
    assert "| never | 2 | 0 | 0 s | ? | ? |" in text and "Never run, so without an estimate: never." in text
    assert "| together | | | 5 min | 10 min | 15 min |" in text


def test_the_overview_reads_estimates_of_rows_that_had_no_candidates(tmp_path):
    write_times({"never": {"another": {"row": "a", "seconds": 30.0}}}, "small", tmp_path)
    assert "| never | 2 | 0 | 0 s | ? | ? |" in overview({"never": Tuned()}, "small", tmp_path)


def test_all_experiments_run_and_failures_are_named_at_the_end(tmp_path, monkeypatch, capsys):
    class Failing(Halves):
        name = "failing"

        def run(self, settings):
            raise FileNotFoundError("`data` is 'nowhere'")

    made = {"failing": Failing(), "halves": Halves()}
    monkeypatch.setattr("papers.EXPERIMENTS", dict.fromkeys(made, ("module", "description")))
    monkeypatch.setattr("papers.load_experiment", made.get)
    with pytest.raises(SystemExit):
        main(["--all", "--output_dir", str(tmp_path), "--override", "factor=2"])
    captured = capsys.readouterr()
    assert "`data` is 'nowhere'" in captured.err and "not finished: failing" in captured.err.splitlines()[-1]
    assert [row["factor"] for row in made["halves"].ran] == [2, 2]


@pytest.mark.parametrize("size", ["small", "paper"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_rows_are_json_and_tell_each_other_apart(name, size):
    rows = load_experiment(name).rows(size)
    assert json.loads(json.dumps(rows)) == rows
    assert len({json.dumps(row, sort_keys=True) for row in rows}) == len(rows) > 1
