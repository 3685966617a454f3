"""Every experiment trains, measures and reports: one row of each, a few steps."""

import math

import pytest

from papers import EXPERIMENTS, load_experiment
from papers.engine.experiment import Experiment
from papers.engine.pictures import unpack
from papers.engine.report import markdown_table, plot, section
from papers.engine.tuning import tuned

_SHAPE = {
    "hidden_size": 8, "num_memory_tokens": 2, "num_attention_heads": 2, "num_hidden_layers": 1, "num_readout_layers": 1
}  # fmt: skip
_SMT = {"steps": 2, "dmt_steps": 1, "batch_size": 2, "eval_windows": 2, "num_tested": 2, "sizes": _SHAPE}
# Settings that make a row of each experiment short.
SHORT = {
    "selective-copying": {"steps": 2, "length": 24, "num_tokens": 4, "batch_size": 4, "num_tested": 20},
    "stride-sweep": {"bytes": 2048, "step_bytes": 1024, "eval_bytes": 2000},
    "glru-alternatives": {"bytes": 1024, "streams": 4, "block_size": 64, "eval_bytes": 2000},
    "memora-against-hawk": {"bytes": 1024, "streams": 4, "block_size": 64, "eval_bytes": 2000},
    "rolling-window": {"bytes": 1024, "streams": 4, "window": 64, "eval_bytes": 2000},
    "online-memora": {"steps": 2, "eval_bytes": 2000, "streams": 2},
    "online-copy": {"steps": 1, "num_tokens": 3, "batch_size": 2, "num_examples": 4},
    "gradient-alignment": {"steps": 1, "num_tokens": 3, "batch_size": 2, "num_examples": 4, "num_measured": 4},
    "online-copy-curves": {"steps": 1, "num_tokens": 3, "batch_size": 2, "num_examples": 4},
    "online-long-range": {"steps": 2, "batch_size": 4, "num_tested": 20, "num_examples": 20, "length": 16},
    "drift": {"segment_bytes": 80, "window": 40},
    "drift-rules": {"segment_bytes": 80, "window": 40},
    "task-rules": {"stream_bytes": 200, "num_tested": 4},
    "carried-state": {
        "bytes": 1024,
        "tested": 400,
        "lengths": [16, 200],
        "distances": [40, 100],
        "passage": 20,
        "passages": 2,
    },
    "scaling": {"bytes": 2048, "eval_bytes": 2000},
    "parity": {"steps": 2, "batch_size": 4, "longest": 80, "num_tested": 20},
    "recall": {"steps": 2, "batch_size": 4, "num_tested": 20},
    "string-copying": {"steps": 2, "batch_size": 4, "lengths": [4, 6], "num_tested": 20},
    "long-range-arena": {"steps": 2, "batch_size": 4, "num_tested": 20, "num_examples": 20, "length": 16},
    "mgrade-table1": {"epochs": 1, "batch_size": 8},
    "mgrade-table2": {"epochs": 1, "batch_size": 8},
    "mgrade-full-resolution": {"epochs": 1, "batch_size": 8},
    "mgrade-memory": {},
    "mgrade-memory-accuracy": {"epochs": 1, "batch_size": 16},
    "flip-flop": {"steps": 2, "batch_size": 4, "length": 32, "num_tested": 20},
    "lorenz": {"epochs": 1, "batch_size": 4, "num_trajectories": 8, "num_steps": 40, "num_tested": 4},
    "lorenz-components": {"epochs": 1, "batch_size": 4, "num_trajectories": 8, "num_steps": 40, "num_tested": 6},
    "smt-tasks": _SMT,
    "smt-pixels": _SMT | {"crop": 1},
    "smt-text": _SMT | {"eval_bytes": 2000},
    "smt-task-sweeps": _SMT,
    "smt-sketches": _SMT,
    "smt-backbones": _SMT | {"eval_bytes": 2000, "sizes": _SHAPE | {"backbone": "gru"}},
    "smt-scaling": _SMT | {"eval_bytes": 2000},
    "smt-compression": _SMT | {"eval_bytes": 2000, "dmt_steps": 0},
    "smt-loss-weights": _SMT | {"eval_bytes": 2000},
    "smt-cost": {"lengths": [2, 3], "future_length": 2},
    "smt-drift": _SMT,
    "smt-future-length": _SMT,
    "smt-gradients": {"length": 6, "batch_size": 2},
    "smt-length-generalization": _SMT | {"factors": [1, 2]},
    "smt-memory-space": _SMT | {"sizes": _SHAPE | {"num_memory_tokens": 1, "memory_size": 2}},
}


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"story {number}: " + "once upon a time. " * 20)
    (tmp_path / "texts.txt").write_text("once upon a time. " * 1000)
    return str(texts)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_kind_of_row_runs(name, corpus, write_digits, tmp_path, monkeypatch):
    # The garbage collection at the start of the Trainer would take most of the time of a few steps.
    monkeypatch.setattr("gc.collect", lambda *generation: 0)
    experiment = load_experiment(name)
    rows, seen = [], set()
    for settings in experiment.rows("small"):
        # One row per line of the table, or per grid of a figure; SMT's rows differ only in their data.
        kind = settings.get("architecture", settings["label"])
        if (
            kind in seen
            or settings["label"].endswith("of the bytes")
            or (name.startswith("smt-") and len(seen) == 2)
            or settings.get("layers") in (2, 3)
            or settings.get("r_min") in (0.5, 0.75)
            or (name == "online-long-range" and settings["rule"] not in ("rtrl", "snap1"))
            or (name == "long-range-arena" and not settings["label"].endswith(("(Llama)", "LRU")))
        ):
            continue
        seen.add(kind)
        settings = tuned(experiment, {**settings, **SHORT[name], "seed": 0}, [])
        if "corpus" in settings:
            settings["corpus"] = corpus
        if "python" in settings:
            settings["python"] = corpus
        if settings.get("text") == "book.txt":
            settings["text"] = f"{corpus}.txt"
        if "data" in settings:
            settings["data"] = write_digits("t10k", 40, side=8)
        rows.append({**settings, **experiment.run(settings)})
    for row in rows:
        values = row["value"].values() if isinstance(row["value"], dict) else [row["value"]]
        assert values
        assert all(math.isfinite(value) for value in values)
        assert row["num_parameters"] > 0
        assert row["seconds"] > 0 or name == "mgrade-memory"  # counted, in less than the hundredth that is kept
        if "images" in row:  # the start token is no pixel
            assert unpack(row["images"]).max() < row["levels"]
    curves = experiment.curves(rows)
    # The sizes of a family are one curve.
    assert (sum(map(len, curves.values())) if name == "scaling" else len(curves)) >= len(seen)
    text = section(experiment, "small", rows, "picture.png", "command")
    assert experiment.claim in text and markdown_table(experiment, rows) in text
    assert "{" not in text and "None" not in text
    if type(experiment).draw is not Experiment.draw:
        plot(experiment, rows, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.parametrize("size", ["small", "paper"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_method_has_as_many_candidates(name, size):
    panels: dict[str | None, set[int]] = {}
    for row in load_experiment(name).rows(size):  # of a figure with panels, the rows of a panel are compared
        panels.setdefault(row.get("panel"), set()).add(len(row.get("candidates", [])))
    assert all(len(counts) == 1 for counts in panels.values())


@pytest.mark.parametrize(
    "name, of_seed, cell",
    [
        ("flip-flop", lambda seed: {"right_sets": {"100": 0.5 + seed / 10}}, "60.00"),
        (
            "drift",
            lambda seed: {"after_switch": [3.0 + seed, 2.0], "before_switch": [1.0, 1.0 + seed]},
            "4.00 → 1.00, 2.00 → 2.00",
        ),
        ("smt-future-length", lambda seed: {"x": 8, "measured_smt": {"drift": seed / 10}}, "0.100"),
        (
            "smt-drift",
            lambda seed: {
                key: {"accuracy": seed / 4, "teacher_accuracy": 1.0} for key in ("measured_smt", "measured")
            },
            "25.0% → 25.0%",
        ),
    ],
)
def test_cells_beside_the_values_are_means_of_the_seeds(name, of_seed, cell):
    rows = [{"seed": seed, **of_seed(seed)} for seed in (0, 2)]
    assert cell in load_experiment(name).details(rows).values()
