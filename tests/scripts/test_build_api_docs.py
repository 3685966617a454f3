"""The checks of the pages of the API: links, anchors and search. The pages themselves are built by .ci/run."""

import importlib.util
import json
from pathlib import Path

import pytest

import hf_recurrent

SCRIPT = Path(__file__).parents[2] / "scripts/build_api_docs.py"


@pytest.fixture
def script():
    specification = importlib.util.spec_from_file_location("build_api_docs", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_links(script, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/b.html").write_text('<a href="../a.html#here">x</a><a href="c.html">x</a>')
    (tmp_path / "a.html").write_text(
        '<p id="here"></p><a href="#here">x</a><a href="#there">x</a><a href="sub/b.html">x</a>'
        '<a href="sub/b.html#none">x</a><a href="https://huggingface.co/none#x">x</a><script src="s.js"></script>'
    )
    faults = script.broken_links(tmp_path)
    assert len(faults) == 4
    for link in ("#there", "sub/b.html#none", "s.js", "c.html"):
        assert any(repr(link) in fault for fault in faults), link


def test_links_to_members_that_are_not_described_are_text(script):
    page = '<p id="a.b"></p><code><a href="#a.b">b</a> <a href="#a.c">c()</a></code>'
    assert script.without_dead_links(page) == '<p id="a.b"></p><code><a href="#a.b">b</a> c()</code>'


@pytest.mark.parametrize("compiled", [False, True])
def test_search(script, tmp_path, compiled):
    (tmp_path / "hf_recurrent.html").write_text("<p></p>")
    assert script.unsearchable_names(tmp_path) == ["The page has no search."]
    (tmp_path / "hf_recurrent.html").write_text('<input type="search"><script src="search.js"></script>')
    names = [f"hf_recurrent.{name}" for name in hf_recurrent.__all__ if name != "Corpus"]
    docs = {"documentStore": {"docs": dict.fromkeys(names)}} if compiled else [{"fullname": name} for name in names]
    (tmp_path / "search.js").write_text(f"    /** index */const docs = {json.dumps(docs)};\n")
    assert script.unsearchable_names(tmp_path) == ["The search does not find `hf_recurrent.Corpus`."]
