"""`hf-recurrent compress` and `decompress`."""

import json
import os
import subprocess
import sys

import pytest

from hf_recurrent.cli import compress, decompress
from hf_recurrent.cli.main import main

TEXT = b"".join(b"line %d of a file\n" % number for number in range(20))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture(autouse=True)
def small_preset(monkeypatch):
    """Presets of a few weights."""
    from hf_recurrent.cli import loading

    build = loading.build_new_model
    sizes = ("hidden_size=16", "state_size=16", "num_hidden_layers=1")
    monkeypatch.setattr(loading, "build_new_model", lambda auto, preset, flag, _: build(auto, preset, flag, sizes))


def test_there_and_back(file, capsys):
    main(["compress", "memora-tiny", str(file), "--learn", "--stride", "16", "--learning-rate", "1e-2"])
    archive = file.with_name("notes.txt.hfr")
    summary = capsys.readouterr().err
    assert f"{len(TEXT)} → {archive.stat().st_size} bytes" in summary and "xz -9e: " in summary
    assert archive.stat().st_size < len(TEXT)
    copy = file.with_name("copy.txt")
    main(["decompress", "memora-tiny", str(archive), "--output", str(copy), "--quiet"])
    assert copy.read_bytes() == TEXT
    assert sorted(path.name for path in file.parent.iterdir()) == ["copy.txt", "notes.txt", "notes.txt.hfr"]


def test_counts_alone(file, capsys):
    main(["compress", str(file)])
    archive = file.with_name("notes.txt.hfr")
    assert archive.stat().st_size < len(TEXT) / 2 and "xz -9e: " in capsys.readouterr().err
    file.unlink()
    main(["decompress", str(archive), "--quiet"])
    assert file.read_bytes() == TEXT


def test_a_new_network_learns(file):
    main(["compress", str(file), "--learn", "--quiet"])
    file.unlink()
    main(["decompress", f"{file}.hfr", "--quiet"])
    assert file.read_bytes() == TEXT


@pytest.mark.parametrize(
    "words", [["--learn", "MODEL", "FILE"], ["MODEL", "--learn", "FILE"], ["MODEL", "FILE", "--learn"]]
)
def test_flags_stand_anywhere(words):
    parsed = compress.build_parser().parse_args(words)
    assert (parsed.model, str(parsed.file), parsed.learn) == ("MODEL", "FILE", True)
    assert compress.build_parser().parse_args(["--quiet", "FILE"]).model is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["FILE", "--no_mix"], "`--no_mix` is given without MODEL and --learn"),
        (["FILE", "--stride", "4"], "`--stride` is given; it is used only with --learn"),
        (["FILE", "--streams", "4"], "`--streams` is given without MODEL and --learn"),
        (["memora-tiny", "FILE"], "whose new weights predict nothing; add --learn"),
        (["memora-tiny", "FILE", "--stride", "4"], "`--stride` is given; it is used only with --learn"),
        (["memora-tiny", "missing"], "`FILE` is 'missing'; file not found"),
        (["memora-tiny", "FILE", "--learn", "--streams", "2"], "a model that learns reads one stream"),
        (["memora-tiny", "FILE", "--learn", "--stride", "0"], "`--stride` is 0"),
        (["memora-tiny", "FILE", "--learn", "--output", "FOLDER"], "must be a file, not a directory"),
        (["./none", "FILE"], "directory not found"),
    ],
)
def test_mistakes_of_compress(file, capsys, words, message):
    words = [word.replace("FILE", str(file)).replace("FOLDER", str(file.parent)) for word in words]
    with pytest.raises(SystemExit) as stop:
        main(["compress", *words])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_an_output_that_exists_is_kept(file, capsys):
    archive = file.with_name("notes.txt.hfr")
    archive.write_bytes(b"mine")
    with pytest.raises(SystemExit):
        main(["compress", "memora-tiny", str(file), "--learn"])
    assert "which exists; add --force" in capsys.readouterr().err and archive.read_bytes() == b"mine"


def test_unfinished_work_is_continued_on_request(file, capsys):
    file.with_name("notes.txt.hfr.partial").mkdir()
    with pytest.raises(SystemExit):
        main(["compress", "memora-tiny", str(file), "--learn"])
    assert "add --resume to continue it" in capsys.readouterr().err
    main(["compress", "memora-tiny", str(file), "--learn", "--resume", "--quiet"])
    assert file.with_name("notes.txt.hfr").exists()


def test_a_foreign_archive(file, capsys):
    for words in (["memora-tiny", str(file)], ["memora-tiny", str(file), "--output", str(file) + ".out"]):
        with pytest.raises(SystemExit):
            main(["decompress", *words])
    errors = capsys.readouterr().err
    assert "does not end in .hfr; add --output" in errors and "it is not an archive of hf-recurrent compress" in errors


def test_help_has_examples(capsys):
    for module in (compress, decompress):
        text = module.build_parser().format_help()
        assert "example" in text and max(map(len, text.splitlines())) <= 80


def test_the_dtype_and_device_of_a_preset_are_those_given(file, capsys):
    with pytest.raises(SystemExit):
        main(["compress", "memora-tiny", str(file), "--learn", "--device", "nowhere"])
    assert "`--device` is 'nowhere'; it cannot be used" in capsys.readouterr().err
    parser = compress.build_parser()
    model = compress.load_byte_model(parser.parse_args(["memora-tiny", "file", "--dtype", "float64"]))
    assert str(model.dtype) == "torch.float64"


@pytest.fixture
def run(commands, tmp_path):
    return lambda *words, **options: commands.run(words, tmp_path, text=False, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("words", [[], ["--learn", "memora-tiny"]], ids=["counts", "network"])
def test_pipes(words, file, tmp_path, run):
    packed = run("compress", *words, "-", data=TEXT)
    assert packed.returncode == 0 and b"\r" in packed.stderr and b"xz" not in packed.stderr
    model = words[1:]
    assert run("decompress", *model, "-", "--quiet", data=packed.stdout).stdout == TEXT
    assert run("compress", *words, str(file), "--output", "-", "--quiet").stdout == packed.stdout
    assert run("decompress", *model, "-", "--output", "copy", data=packed.stdout).returncode == 0
    assert (tmp_path / "copy").read_bytes() == TEXT
    assert sorted(os.listdir(tmp_path)) == ["copy", "notes.txt"]


def test_a_pipe_of_processes(tmp_path):
    """Imports write nothing to the standard output."""
    command = [sys.executable, "-m", "hf_recurrent.cli.main"]
    packed = subprocess.run([*command, "compress", "-", "--quiet"], input=TEXT, capture_output=True, check=True)
    found = subprocess.run([*command, "decompress", "-"], input=packed.stdout, capture_output=True, check=True)
    assert found.stdout == TEXT and not packed.stderr


def test_pipes_that_are_empty_full_or_damaged(run):
    packed = run("compress", "-", "--quiet", data=b"").stdout
    assert run("decompress", "-", "--quiet", data=packed).stdout == b""
    failed = run("compress", "-", "--quiet", data=TEXT, stdout="/dev/full")
    assert failed.returncode == 2
    assert failed.stderr.endswith(b"No space left on device: 'standard output'\n") and failed.stderr.count(b"\n") == 1
    packed = run("compress", "-", "--quiet", data=TEXT).stdout
    failed = run("decompress", "-", "--quiet", data=packed[:-1])
    assert failed.returncode == 2 and not failed.stdout and b"`ARCHIVE` is '-': it is damaged" in failed.stderr
    failed = run("decompress", "-", "--resume", "--quiet", data=packed)
    assert failed.returncode == 2 and b"`--resume` cannot be combined with -" in failed.stderr


def test_a_refused_archive_leaves_nothing(file, capsys):
    main(["compress", str(file), "--quiet"])
    archive = file.with_name("notes.txt.hfr")
    archive.write_bytes(archive.read_bytes()[:-1])
    with pytest.raises(SystemExit):
        main(["decompress", str(archive), "--output", str(file.with_name("copy.txt")), "--quiet"])
    assert "it is damaged or cut off" in capsys.readouterr().err
    assert sorted(path.name for path in file.parent.iterdir()) == ["notes.txt", "notes.txt.hfr"]


def test_results_as_json(file, capsys):
    main(["compress", str(file), "--json"])
    results = json.loads(capsys.readouterr().out)
    archive = file.with_name("notes.txt.hfr")
    size = archive.stat().st_size
    assert (results["file"], results["output"]) == (str(file), str(archive))
    assert (results["bytes"], results["archive_bytes"]) == (len(TEXT), size)
    assert results["bits_per_byte"] == 8 * size / len(TEXT) and results["xz_bytes"] > 0

    copy = file.with_name("copy.txt")
    main(["decompress", str(archive), "--json", "--output", str(copy)])
    results = json.loads(capsys.readouterr().out)
    assert results == {"file": str(archive), "output": str(copy), "bytes": len(TEXT)}
    with pytest.raises(SystemExit):
        main(["decompress", str(archive), "--json", "--output", "-"])
    assert "`--json` cannot be combined with the output -" in capsys.readouterr().err
