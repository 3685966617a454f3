"""`hf-recurrent evaluate`: the table, the file of results, and messages on bad input."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_recurrent import ByteTokenizer, config_from_preset, evaluate_bits_per_byte, load_corpus
from hf_recurrent.cli.evaluate import main
from hf_recurrent.evaluation.compressors import compressed_bits_per_byte


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (directory / f"{number}.txt").write_text(f"story {number}: " + "once upon a time. " * (number + 1))
    return str(directory)


def save(config, path) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    ByteTokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = config_from_preset("memora-tiny", hidden_size=16, state_size=24, num_hidden_layers=1)
    return save(config, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(autouse=True)
def packed_corpora_here(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path_factory.getbasetemp() / "home"))


def run(capsys, *arguments: str) -> str:
    main([*arguments, "--quiet", "--device", "cpu"])
    return capsys.readouterr().out


def test_table_and_results_are_those_of_the_held_out_files(checkpoint, texts, tmp_path, capsys):
    output = tmp_path / "results.json"
    table = run(capsys, checkpoint, "--corpus", texts, "--output", str(output), "--validation_fraction", "0.2")
    held_out = load_corpus(texts).split(0.2, 0)[1]
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = evaluate_bits_per_byte(model, held_out, progress=False)
    results = json.loads(output.read_text())
    assert results["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=1e-6)
    assert results["compressors"] == compressed_bits_per_byte(held_out, progress=False)
    assert (results["num_episodes"], results["split"], results["context"]) == (8, "validation", "whole episode")
    printed = json.loads(run(capsys, checkpoint, "--corpus", texts, "--json", "--validation_fraction", "0.2"))
    assert printed == results
    for name, value in [(checkpoint, results["bits_per_byte"]), *results["compressors"].items()]:
        line = next(line for line in table.splitlines() if line.startswith(name))
        assert line.endswith(f"{value:.4f}")


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    options = {"count_memory_slots": 256, "count_memory_text": 4096, "count_memory_window": 256}
    config = config_from_preset("memora-tiny", hidden_size=16, state_size=24, num_hidden_layers=1, **options)
    return save(config, tmp_path_factory.mktemp("counted"))


def value_of(table: str, name: str) -> float:
    return float(next(line for line in table.splitlines() if line.startswith(name)).split()[-1])


def test_network_alone_and_frozen_stand_below_the_model(counted, texts, tmp_path, capsys):
    output = tmp_path / "results.json"
    table = run(capsys, counted, "--corpus", texts, "--frozen", "--no_compressors", "--output", str(output))
    results = json.loads(output.read_text())
    whole, frozen, network = (value_of(table, name) for name in (counted, "frozen: no short", "network alone"))
    assert whole < frozen and whole < network  # the texts repeat themselves
    assert results["network_bits_per_byte"] == pytest.approx(network, abs=1e-4)
    assert results["frozen"]["bits_per_byte"] == pytest.approx(frozen, abs=1e-4)
    assert "frozen" not in run(capsys, counted, "--corpus", texts, "--no_compressors")


def test_accounts_of_a_model_whose_training_is_not_known(counted, texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_recurrent.evaluation.compressors.has_ppmd", lambda: False)
    output = tmp_path / "results.json"
    table = run(capsys, counted, "--corpus", texts, "--accounts", "--output", str(output))
    words = " ".join(table.split())  # lines are wrapped
    assert "the model was not trained in a single recorded phase." in words and "hf-recurrent[baselines]" in words
    rows = json.loads(output.read_text())["accounts"]["rows"]
    assert list(rows) == ["network alone", "both", "xz -9, each file alone", "gzip -9, each file alone"]
    line = next(line for line in table.splitlines() if line.startswith("both"))
    assert line.split()[1:] == [f"{rows['both'][name]:.3f}" for name in ("adapting", "frozen")]
    assert next(line for line in table.splitlines() if line.startswith("gzip")).split()[-1] == "-"


def test_without_carry_the_window_is_said(checkpoint, texts, capsys):
    table = run(capsys, checkpoint, "--corpus", texts, "--no_carry", "--block_size", "16", "--no_compressors")
    assert "windows of 16 bytes" in table and "gzip" not in table


def test_stock_model(texts, tmp_path, capsys):
    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    table = run(capsys, save(config, tmp_path), "--corpus", texts, "--block_size", "64", "--split", "all")
    assert "windows of 64 bytes" in table and "40 episodes" in table


def test_limit_takes_whole_episodes_and_the_same_ones(texts):
    corpus = load_corpus(texts)
    some = corpus.limit(2000)
    assert 1000 < some.num_bytes <= 2000
    whole = {episode.tobytes() for episode in corpus}
    assert all(episode.tobytes() in whole for episode in some)
    assert [len(episode) for episode in corpus.limit(2000)] == [len(episode) for episode in some]
    assert corpus.limit(10**9) is corpus
    with pytest.raises(ValueError, match="shortest episode has 27 bytes"):
        corpus.limit(5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--corpus", "missing.txt"], "missing.txt"),
        (["--max_bytes", "0"], "`--max_bytes` is 0.0; it must be a whole number of at least 1."),
        (["--output", "missing/results.json"], "`--output` is 'missing/results.json'; directory 'missing' not found."),
        (["--validation_fraction", "2"], "`--validation_fraction` is 2.0; it must be between 0 and 1"),
        (["--block_size", "0"], "`--block_size` is 0; it must be at least 1."),
        (["--frozen"], "`--frozen` needs a count memory; `MODEL`"),
        (["--accounts", "--split", "all"], "`--accounts` cannot be combined with `--split`."),
        (["--accounts", "--no_carry"], "`--accounts` cannot be combined with `--no_carry`."),
        (["--device", "cuda:99"], "`--device` is 'cuda:99'; it cannot be used"),
    ],
)
def test_command_names_bad_input(checkpoint, texts, capsys, arguments, message):
    corpus = [] if "--corpus" in arguments else ["--corpus", texts]
    with pytest.raises(SystemExit):
        main([checkpoint, "--quiet", *corpus, *arguments])
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_command_names_a_missing_model(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none")])
    assert "none'; directory not found." in capsys.readouterr().err
