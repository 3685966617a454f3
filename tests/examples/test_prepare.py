"""examples/browser/prepare.py without a network."""

import base64
import hashlib
import importlib.util
import io
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "browser" / "prepare.py"


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """The script, with a folder of its own as the page."""
    spec = importlib.util.spec_from_file_location("prepare", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RUNTIME", tmp_path / "onnxruntime")
    monkeypatch.setattr(module, "MODEL", tmp_path / "model")
    monkeypatch.setattr(module, "PAGE", tmp_path)
    return module


def package(path: Path, names) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            entry = tarfile.TarInfo(f"package/dist/{name}")
            entry.size = len(name)
            archive.addfile(entry, io.BytesIO(name.encode()))
    return path


def test_files_of_the_pinned_archive_are_unpacked_once(prepare, tmp_path, monkeypatch):
    path = package(tmp_path / "package.tgz", [*prepare.FILES, "another.js"])
    monkeypatch.setattr(prepare, "INTEGRITY", base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode())
    prepare.main(["--archive", str(path)])
    assert {file.name for file in prepare.RUNTIME.iterdir()} == {*prepare.FILES, "VERSION"}
    assert (prepare.RUNTIME / prepare.FILES[0]).read_text() == prepare.FILES[0]
    monkeypatch.setattr(prepare, "fetch_archive", lambda: pytest.fail("fetched again"))
    prepare.main([])


def test_another_archive_is_refused(prepare, tmp_path, capsys):
    path = package(tmp_path / "package.tgz", prepare.FILES)
    with pytest.raises(SystemExit):
        prepare.main(["--archive", str(path)])
    assert "differs from the checksum of onnxruntime-web" in capsys.readouterr().err
    assert not prepare.RUNTIME.exists()


def test_a_new_model_takes_the_place_of_the_old_one(prepare, tmp_path, monkeypatch):
    import hf_recurrent.cli.main as cli

    def export(arguments):
        assert arguments[:4] == ["export", "some/checkpoint", "--format", "onnx"] and arguments[-1] == "int8"
        folder = Path(arguments[arguments.index("--output_dir") + 1])
        folder.mkdir()
        (folder / "step.onnx").write_text("new")

    monkeypatch.setattr(cli, "main", export)
    prepare.MODEL.mkdir()
    (prepare.MODEL / "old").write_text("old")
    prepare.export_model("some/checkpoint", "int8")
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["step.onnx"]
    monkeypatch.setattr(cli, "main", lambda _: sys.exit(2))
    with pytest.raises(SystemExit):
        prepare.export_model("some/checkpoint", "int8")
    assert (prepare.MODEL / "step.onnx").read_text() == "new"
