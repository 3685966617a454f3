"""Projections of memories, and the script that draws them over an image."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from papers.engine.projections import as_colours, project
from papers.smt.models import build_pair

SHAPE = {
    "hidden_size": 8, "num_memory_tokens": 2, "num_attention_heads": 2, "num_hidden_layers": 1, "num_readout_layers": 1
}  # fmt: skip


def test_projections():
    generator = np.random.default_rng(0)
    points = generator.normal(size=(50, 2)) * [5, 1] @ np.linalg.qr(generator.normal(size=(6, 6)))[0][:2] + 3
    flat = project(points, 2)
    assert flat.var(0)[0] > flat.var(0)[1] and abs(np.cov(flat.T)[0, 1]) < 1e-9
    # A rotation in the plane of the points keeps distances.
    assert np.allclose(np.linalg.norm(flat[1:] - flat[:-1], axis=1), np.linalg.norm(points[1:] - points[:-1], axis=1))
    colours = as_colours(flat)
    assert colours.min() == 0 and colours.max() == 1
    with pytest.raises(ValueError, match="method is 'umap', allowed is pca or tsne"):
        project(points, 2, "umap")
    with pytest.raises(ValueError, match="has no 3 dimensions"):
        project(points[:, :2], 3)


def test_tsne_or_what_it_needs():
    points = np.random.default_rng(0).normal(size=(20, 4))
    try:
        import sklearn  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="t-SNE needs the scikit-learn package: pip install scikit-learn"):
            project(points, 2, "tsne")
    else:
        assert project(points, 2, "tsne").shape == (20, 2)


def test_the_memory_over_an_image(write_digits, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    script = Path(__file__).parents[3] / "scripts" / "picture_memory.py"
    build_pair(SHAPE, 256, 0)[0].save_pretrained(tmp_path / "rnn")
    corpus = "mnist:" + write_digits("train", 3, side=28)
    output = tmp_path / "memory.png"
    arguments = [str(tmp_path / "rnn"), corpus, "--output", str(output), "--images"]
    monkeypatch.setattr(sys, "argv", ["picture_memory.py", *arguments, "1"])
    runpy.run_path(str(script), run_name="__main__")
    assert output.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(sys, "argv", ["picture_memory.py", *arguments, "3"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(script), run_name="__main__")
    assert "--images has 3, allowed is 0 to 2" in capsys.readouterr().err
