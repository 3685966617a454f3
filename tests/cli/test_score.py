"""`hf-recurrent score`: log-probabilities of bytes, lines and documents."""

import gc
import gzip
import io
import json
import math
import os
import random
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_server import redirected, run_command
from transformers import AutoModelForCausalLM

from hf_recurrent import ByteTokenizer, config_from_preset
from hf_recurrent.cli import evaluate
from hf_recurrent.cli.main import main
from hf_recurrent.cli.score import main as score
from hf_recurrent.data.quantities import with_unit
from hf_recurrent.data.token_encoding import TokenEncoding
from hf_recurrent.evaluation.scores import document_blocks, score_blocks

SIZES = {"hidden_size": 16, "state_size": 16, "num_hidden_layers": 1}
TEXTS = {
    "a.txt": "One line.\nAnother line,\n\nand a last one without an end",
    "b.txt": "x",
    "c.txt": "\n",
    "d.txt": "".join(f"line {number} of many\n" for number in range(30)),
    "e.txt": "é\nè\n",
}


def save(path, family="hawk", **fields):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_from_preset(f"{family}-tiny", **SIZES | fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(path)
    ByteTokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=["hawk", "memora"])
def model(request, tmp_path_factory):
    return save(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_bytes(text.encode())
    return [f"texts/{name}" for name in TEXTS]


def rows_of(capsys, *words) -> list[dict]:
    score([*map(str, words), "--quiet"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def forward(path: str, data: bytes) -> list[float]:
    """Log-probability of every byte but the first and of the end byte, by one forward pass in float64."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    ids = torch.tensor([list(data)])
    with torch.no_grad():
        log = model(ids).logits.log_softmax(-1)[0]
    return log.gather(1, torch.tensor([*data[1:], 0])[:, None])[:, 0].tolist()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("block_size", [1, 7, 4096])
def test_bytes_equal_one_forward_pass_in_float64(model, files, block_size, capsys):
    rows = rows_of(capsys, model, *files, "--per", "byte", "--dtype", "float64", "--block_size", block_size)
    for name, text in TEXTS.items():
        data = text.encode()
        found = [row for row in rows if row["document"] == f"texts/{name}"]
        assert [row["offset"] for row in found] == list(range(len(data) + 1))
        assert [row["byte"] for row in found] == [*data, 0]
        assert found[0]["log_probability"] is None
        scores = [row["log_probability"] for row in found[1:]]
        assert scores == pytest.approx(forward(model, data), rel=1e-7, abs=1e-8)
    assert len(rows) == sum(len(text.encode()) + 1 for text in TEXTS.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("block_size", [1, 5, 64, 4096])
def test_lines_and_documents_are_sums_of_bytes(model, files, block_size, capsys):
    options = ["--dtype", "float64", "--block_size", block_size]
    lines = rows_of(capsys, model, *files, "--per", "line", *options)
    documents = rows_of(capsys, model, *files, *options)
    assert [row["document"] for row in documents] == files
    for row, (name, text) in zip(documents, TEXTS.items(), strict=True):
        data, scores = text.encode(), forward(model, text.encode())
        assert row["bytes"] == len(data)
        assert row["log_probability"] == pytest.approx(sum(scores), rel=1e-7)
        assert row["bits_per_byte"] == pytest.approx(-sum(scores) / math.log(2) / len(data), rel=1e-7)
        found, offset = [row for row in lines if row["document"] == f"texts/{name}"], 0
        pieces = data.splitlines(keepends=True)
        assert len(found) == len(pieces)
        for number, (line, piece) in enumerate(zip(found, pieces, strict=True), 1):
            last = number == len(pieces)
            expected = sum(scores[max(offset - 1, 0) : offset + len(piece) - 1 + last])
            assert (line["line"], line["offset"], line["bytes"]) == (number, offset, len(piece))
            assert line["log_probability"] == pytest.approx(expected, rel=1e-7, abs=1e-8)
            offset += len(piece)


def test_the_sum_is_that_of_evaluate(model, files, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", os.fspath(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", os.fspath(tmp_path / "home"))
    evaluate.main(
        [model, "--corpus", "texts", "--split", "all", "--no_compressors", "--quiet", "--output", "found.json"]
    )
    capsys.readouterr()
    rows = rows_of(capsys, model, "texts")
    found = json.loads(Path("found.json").read_text())
    assert -sum(row["log_probability"] for row in rows) == pytest.approx(found["nats"], rel=1e-5)
    assert sum(row["bytes"] for row in rows) == found["num_bytes"]
    score([model, "texts"])
    assert (
        f"5 documents, {with_unit(found['num_bytes'], 'B')}: {found['bits_per_byte']:.4f}" in capsys.readouterr().err
    )


def test_other_formats_and_standard_input(model, files, capsys, monkeypatch):
    text = TEXTS["a.txt"]
    Path("a.jsonl").write_text(json.dumps({"story": text}) + "\n" + json.dumps({"story": ""}) + "\n")
    Path("a.txt.gz").write_bytes(gzip.compress(text.encode()))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    found = rows_of(capsys, model, "a.jsonl", "a.txt.gz", "-", "--text_column", "story")
    assert [row["document"] for row in found] == ["a.jsonl, line 1", "a.txt.gz", "-"]
    assert len({row["log_probability"] for row in found}) == 1


def test_binary_documents_have_no_end(model, files, capsys):
    Path("data.bin").write_bytes(bytes([1, 0, 2]))
    rows = rows_of(capsys, model, "data.bin", "--per", "byte", "--binary")
    assert [row["byte"] for row in rows] == [1, 0, 2]
    (total,) = rows_of(capsys, model, "data.bin", "--binary")
    assert total["log_probability"] == pytest.approx(sum(row["log_probability"] for row in rows[1:]), rel=1e-6)


def test_an_output_is_complete_or_absent(model, files, capsys):
    score([model, *files, "--output", "scores.jsonl"])
    assert len(Path("scores.jsonl").read_text().splitlines()) == len(files)
    assert capsys.readouterr().out == ""
    Path("bad.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(SystemExit) as stop:
        score([model, *files, "bad.txt", "--output", "others.jsonl"])
    assert stop.value.code == 2 and "bad.txt is not UTF-8 text" in capsys.readouterr().err
    assert not list(Path().glob("others*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent.txt"], "`FILE` is 'absent.txt', which does not exist"),
        (["texts/a.txt", "--block_size", "0"], "`--block_size` is 0; it must be at least 1."),
        (["texts/a.txt", "--output", "no/such.jsonl"], "`--output` is 'no/such.jsonl'; directory 'no' not found."),
        (["texts/a.txt", "--output", "texts"], "`--output` is 'texts'; it must be a file, not a directory."),
        (["-", "-"], "`FILE` is - more than once"),
        (["empty.txt"], "`FILE` is empty.txt, which is empty"),
        (["texts/a.txt", "--per", "word"], "invalid choice: 'word'"),
        ([], "the following arguments are required: FILE"),
    ],
)
def test_mistakes(model, files, words, message, capsys):
    Path("empty.txt").touch()
    with pytest.raises(SystemExit) as stop:
        main(["score", model, *words, "--quiet"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("\n") == 1, error


def test_a_model_without_a_state(files, tmp_path, capsys):
    sizes = {"num_attention_heads": 2, "hidden_size": 16, "num_hidden_layers": 1}
    AutoModelForCausalLM.from_config(config_from_preset("llama-s0", **sizes)).save_pretrained(tmp_path / "llama")
    ByteTokenizer().save_pretrained(tmp_path / "llama")
    with pytest.raises(SystemExit):
        score([str(tmp_path / "llama"), *files])
    assert "a LlamaForCausalLM without a recurrent state" in capsys.readouterr().err


def test_blocks_of_random_documents():
    generator = random.Random(0)
    for _ in range(50):
        documents = [bytes(generator.choices(range(1, 9), k=generator.randint(0, 30))) for _ in range(8)]
        chunked = [(str(number), cut(generator, data)) for number, data in enumerate(documents)]
        blocks = list(document_blocks(chunked, TokenEncoding(), size := generator.randint(1, 20)))
        assert all(len(block.inputs) == size for block in blocks[:-1])
        inputs, targets = (b"".join(bytes(getattr(block, part).tolist()) for block in blocks) for part in PARTS)
        assert inputs == b"".join(documents)
        assert targets == b"".join(data[1:] + b"\0" for data in documents if data)
        offsets = [offset for block in blocks for offset in block.offsets.tolist()]
        assert offsets == [offset for data in documents for offset in range(len(data))]
        assert sum(block.ends.sum() for block in blocks) == sum(map(bool, documents))
        names = [name for block in blocks for name in block.names]
        assert list(dict.fromkeys(names)) == [str(number) for number, data in enumerate(documents) if data]


PARTS = ("inputs", "targets")


def cut(generator: random.Random, data: bytes) -> list[bytes]:
    """The data in chunks of 0 to 9 bytes."""
    chunks = []
    while data:
        size = generator.randint(0, 9)
        chunks, data = [*chunks, data[:size]], data[size:]
    return chunks


@pytest.mark.long
def test_memory_does_not_grow_with_a_document(model):
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()

    def chunks(number: int) -> Iterator[bytes]:
        for chunk in range(number):
            if chunk % 25 == 0:
                gc.collect()  # or the moments of the automatic collections decide the peak
            yield b"All work and no play.\n" * 40

    def peak(number: int) -> int:
        tracemalloc.reset_peak()
        scores = score_blocks(loaded, [("long", chunks(number))], TokenEncoding(), 512)
        assert sum(len(score) for _, score in scores) == number * 880
        return tracemalloc.get_traced_memory()[1]

    tracemalloc.start()
    peak(100)  # what the first pass keeps for all
    short, long = peak(100), peak(500)
    tracemalloc.stop()
    assert long < short + 100_000 < short + 400 * 880


def test_the_reader_of_the_output_may_end(model, files, commands, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    words = ["score", model, "texts", "--per", "byte", "--quiet"]
    streams = [os.devnull, str(tmp_path / "pipe"), str(tmp_path / "errors")]
    child = commands.start(redirected, os.getcwd(), streams, {}, run_command, (words,))
    with open(tmp_path / "pipe", "rb") as pipe:
        assert b"log_probability" in pipe.readline()
    assert child.wait() in (0, 1) and (tmp_path / "errors").read_bytes() == b""
