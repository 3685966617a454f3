"""Images and tasks on the command line: trained, saved, evaluated again."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from hf_recurrent import evaluate_task, task_from_name
from hf_recurrent.cli.evaluate import main as evaluate
from hf_recurrent.cli.pretrain import main as pretrain

SHORT = ["--use_cpu", "--max_steps", "2", "--disable_tqdm", "true", "--per_device_train_batch_size", "4"]
TINY = ["--config_overrides", "hidden_size=8", "state_size=8", "num_hidden_layers=1"]
SCORED = ["--quiet", "--device", "cpu", "--output", "result.json"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", os.fspath(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    pretrain([*SHORT, *TINY, *arguments])


def printed_evaluation(out):
    command = next(line for line in out.splitlines() if "hf-recurrent evaluate" in line).split()[2:]
    evaluate([*command, *SCORED])
    return json.loads(Path("result.json").read_text())


def test_a_task(capsys):
    name = "task:retrieval,length=12,vocab_size=6,label_noise=0.2,num_validation_examples=40"
    run("--corpus", name)
    out = capsys.readouterr().out
    directory = Path("runs/memora-tiny-retrieval")
    assert "retrieval: endless examples of 12 symbols to train on; 40 examples of 12 symbols held out" in out
    assert "of 40 held-out examples" in out and "hf-recurrent generate" not in out and "sample after" not in out
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.vocab_size == 6 and model.config.eos_token_id is None
    metrics = json.loads((directory / "eval_results.json").read_text())
    again = printed_evaluation(out)
    for metric in ("accuracy", "exact_match", "loss", "num_answers"):
        assert again[metric] == pytest.approx(metrics[f"eval_{metric}"], rel=1e-5)
    assert again["loss"] == pytest.approx(evaluate_task(model, task_from_name(name.removeprefix("task:")))["loss"])
    assert "40 examples of 12 symbols" in capsys.readouterr().out
    # Trained at one length, asked at another, with fewer examples.
    run("--corpus", name, "--validation_corpus", "task:retrieval,length=30,vocab_size=6", "--max_eval_bytes", "100")
    out = capsys.readouterr().out
    assert "3 examples of 30 symbols held out" in out and printed_evaluation(out)["num_examples"] == 3


def idx(array):
    shape = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + shape + array.tobytes()


def test_digits(capsys):
    pillow = pytest.importorskip("PIL.Image")
    Path("digits").mkdir()
    images = np.random.default_rng(0).integers(0, 2, (6, 28, 28), np.uint8) * 255
    Path("digits/train-images-idx3-ubyte").write_bytes(idx(images))
    Path("digits/t10k-images-idx3-ubyte").write_bytes(idx(images[:2]))
    run("--corpus", "mnist:digits")
    out = capsys.readouterr().out
    directory = Path("runs/memora-tiny-digits")
    assert "mnist:digits: 6 documents, 4.7 kB to train on; 2 documents, 1.6 kB held out" in out
    metrics = json.loads((directory / "eval_results.json").read_text())
    again = printed_evaluation(out)
    assert again["bits_per_byte"] == pytest.approx(metrics["eval_bits_per_byte"], rel=1e-5)
    assert again["num_episodes"] == 2
    with pillow.open(directory / "samples.png") as sheet:
        assert sheet.size == (8 * 58 + 2, 4 * 58 + 2) and sheet.mode == "L"


def test_a_folder_of_images(capsys, monkeypatch):
    pillow = pytest.importorskip("PIL.Image")
    Path("drawings").mkdir()
    for number in range(4):
        pillow.new("L", (80, 80), 255 * (number % 2)).save(f"drawings/{number}.png")
    monkeypatch.setattr("hf_recurrent.cli.pretrain_report._IMAGES_DRAWN", 2)
    run("--corpus", "images:drawings")
    out = capsys.readouterr().out
    assert "3 documents, 3.1 kB to train on; 1 document, 1.0 kB held out" in out
    directory = Path("runs/memora-tiny-drawings")
    assert AutoModelForCausalLM.from_pretrained(directory).config.vocab_size == 16
    with pillow.open(directory / "samples.png") as sheet:
        assert sheet.size == (2 * 130 + 2, 132)
    assert printed_evaluation(out)["num_bytes"] == 1024


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--corpus", "task:retreival"], "`task` is 'retreival'; it must be one of associative_recall"),
        (["--corpus", "task:parity,size=3"], "`task` 'parity' has no setting 'size=3'; it must be one of"),
        (
            ["--corpus", "task:parity", "python"],
            "`--corpus` is task:parity python; a task: cannot be combined with other sources.",
        ),
        (["--corpus", "task:parity", "--tokenizer", "dna"], "`--tokenizer` is 'dna', but `--corpus` is not text"),
        (
            ["--corpus", "task:parity", "--validation_corpus", "python"],
            "`--validation_corpus` is ['python']; if `--corpus` is a task, it must be one.",
        ),
        (["--corpus", "mnist:nowhere"], "`--corpus` is 'mnist:nowhere'; directory not found: nowhere"),
        (
            ["--corpus", "mnist:nowhere", "python"],
            "`--corpus` is mnist:nowhere, python; mnist: and images: sources must not be mixed with others.",
        ),
    ],
)
def test_bad_input_ends_with_one_sentence(capsys, arguments, words):
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and words in error and "Traceback" not in error
