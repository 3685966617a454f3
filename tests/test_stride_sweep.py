"""The stride sweep: equal bytes in all rows, nothing trained twice, a table and a plot."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent import Corpus, config_from_preset, evaluate_bits_per_byte

SCRIPT = Path(__file__).parents[1] / "scripts" / "stride_sweep.py"


@pytest.fixture(scope="module")
def sweep():
    spec = importlib.util.spec_from_file_location("stride_sweep", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = {"hidden_size": 16, "num_hidden_layers": 1}
    module.MODELS = {
        "tiny": {
            "memora": ("memora-tiny", small | {"state_size": 24}),
            "hawk": ("hawk-tiny", small | {"state_size": 24}),
            "llama": ("llama-s0", small | {"intermediate_size": 32}),
        }
    }
    return module


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"story {number}: " + "once upon a time. " * 20)
    options = ["--corpus", str(texts), "--bytes", "2048", "--step_bytes", "256", "--eval_bytes", "2000"]
    return [*options, "--output_dir", str(tmp_path / "results")]


def test_sweep_trains_each_row_once(sweep, arguments, tmp_path, monkeypatch, capsys):
    sweep.main([*arguments, "--strides", "8"])
    path = tmp_path / "results" / "stride_sweep_tiny.json"
    rows = json.loads(path.read_text())
    assert [(row["family"], row["regime"]) for row in rows] == [
        ("memora", "multi_stream"),
        ("memora", "iid"),
        ("hawk", "multi_stream"),
        ("hawk", "iid"),
        ("llama", "iid"),
    ]
    assert all(row["steps"] == 8 and row["streams"] == 32 for row in rows)
    for row in rows:
        assert (row["carried"] is None) == (row["family"] == "llama")
        assert (row["zero_state"] is None) == (row["regime"] == "multi_stream")
    table = path.with_suffix(".md").read_text()
    assert f"| Memora, streams | {rows[0]['carried']:.3f} |" in table
    assert f"| Llama, IID | {rows[4]['zero_state']:.3f} |" in table
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    trained = []
    original = sweep.train_row
    monkeypatch.setattr(
        sweep, "train_row", lambda settings, *rest: trained.append(settings) or original(settings, *rest)
    )
    sweep.main([*arguments, "--strides", "8", "32", "--families", "memora"])
    assert [(row["stride"], row["regime"]) for row in trained] == [(32, "multi_stream"), (32, "iid")]
    assert json.loads(path.read_text())[:5] == rows
    assert "T = 8 | T = 32" in path.with_suffix(".md").read_text()


def test_other_settings_are_other_rows(sweep, arguments, tmp_path):
    options = ["--strides", "16", "--families", "llama"]
    sweep.main([*arguments, *options])
    sweep.main([*arguments, *options, "--learning_rate", "1e-3", "--gradient_accumulation_steps", "2"])
    rows = json.loads((tmp_path / "results" / "stride_sweep_tiny.json").read_text())
    assert [row["learning_rate"] for row in rows] == [3e-3, 1e-3]
    assert [row["streams"] for row in rows] == [16, 16]


def test_several_seeds_give_mean_and_half_range(sweep):
    common = {"family": "memora", "regime": "iid", "stride": 2, "num_parameters": 1, "device": "cpu"}
    rows = [
        common | {"seed": 0, "carried": 2.0, "zero_state": 3.0},
        common | {"seed": 1, "carried": 2.5, "zero_state": 3.0},
    ]
    sizes = {"model_size": "tiny", "bytes": 1, "corpus": "python", "step_bytes": 1, "learning_rate": 1e-3}
    table = sweep.markdown(rows, sizes)
    assert "| Memora, IID, state carried | 2.250 ± 0.250 |" in table and "2 seed(s)" in table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strides", "3"], "--strides has 3"),
        (["--bytes", "10"], "--bytes is 10"),
        (["--strides", "8", "--corpus", "missing.txt"], "missing.txt"),
    ],
)
def test_sweep_names_what_is_wrong(sweep, arguments, capsys, options, message):
    with pytest.raises(SystemExit):
        sweep.main([*arguments, *options])
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_damaged_rows_are_not_overwritten(sweep, arguments, tmp_path, capsys):
    path = tmp_path / "results" / "stride_sweep_tiny.json"
    path.parent.mkdir()
    path.write_text('[{"family": "mem')
    with pytest.raises(SystemExit):
        sweep.main([*arguments, "--strides", "8"])
    assert "is damaged" in capsys.readouterr().err
    assert path.read_text() == '[{"family": "mem'


def test_iid_is_measured_with_the_state_carried_and_zero_at_each_block(sweep):
    torch.manual_seed(0)
    config = config_from_preset("memora-tiny", hidden_size=16, state_size=24, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(config)
    corpus = Corpus.from_documents([bytes(range(1, 120)), b"abc" * 30])
    options = {"num_streams": 1, "progress": False}
    carried = evaluate_bits_per_byte(model, corpus, **options)["bits_per_byte"]
    zero_state = evaluate_bits_per_byte(model, corpus, block_size=4, carry_state=False, **options)["bits_per_byte"]
    assert abs(carried - zero_state) > 1e-3
    measured = sweep.measure(model, corpus, "iid", 4)
    assert measured == {"carried": pytest.approx(carried), "zero_state": pytest.approx(zero_state)}
    assert sweep.measure(model, corpus, "multi_stream", 4)["zero_state"] is None
