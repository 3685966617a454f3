"""The Gradio app of examples/gradio_space: header, requirements, and the app itself where gradio is installed."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from model_cases import tiny_model

from hf_recurrent import ByteTokenizer

ROOT = Path(__file__).parents[2]
SPACE = ROOT / "examples" / "gradio_space"
HEADER = yaml.safe_load((SPACE / "README.md").read_text(encoding="utf-8").split("---\n")[1])


def test_the_header_is_one_of_a_space():
    assert HEADER["sdk"] == "gradio" and (SPACE / HEADER["app_file"]).is_file()
    assert len(HEADER["short_description"]) <= 60 and re.fullmatch(r"\d+\.\d+\.\d+", HEADER["sdk_version"])


def test_it_requires_what_the_package_requires():
    required = (SPACE / "requirements.txt").read_text().split()
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert set(required) <= set(tomllib.load(file)["project"]["dependencies"])


@pytest.fixture
def client(tmp_path):
    """A client of the app, whose model is a small one in a repository with its code; gradio is no part of an extra."""
    gradio_client = pytest.importorskip("gradio_client", reason="gradio is not installed")
    if importlib.util.find_spec("gradio") is None:
        pytest.skip("gradio is not installed")
    tiny_model("memora").save_pretrained(tmp_path / "tiny")
    ByteTokenizer().save_pretrained(tmp_path / "tiny")
    program = (
        "import sys; sys.modules['hf_recurrent'] = None; import runpy; runpy.run_path('app.py', run_name='__main__')"
    )
    environment = os.environ | {
        "MODEL": str(tmp_path / "tiny"), "TRUST_REMOTE_CODE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path),
        "GRADIO_ANALYTICS_ENABLED": "False", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=SPACE, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = next(found[0] for line in process.stdout if (found := re.search(r"http://127\S+", line)))
            yield gradio_client.Client(address, verbose=False)
        finally:
            process.kill()


@pytest.mark.long
def test_it_reads_continues_and_forgets_without_the_package(client):
    text = "def naïve 日本"
    pieces = client.predict(text, api_name="/surprise")
    assert "".join(piece["token"] for piece in pieces) == text
    assert {piece["class_or_confidence"] for piece in pieces} <= {None, "unexpected", "surprising"}

    def written(text: str) -> str:
        return client.predict(text, 40, 0, api_name="/continue_text")

    first, after = written(text), written("b")
    assert client.predict(api_name="/forget") == ("", [])
    assert [written(text), written("b")] == [first, after]  # the same from an empty memory
    client.predict(api_name="/forget")
    assert written("b") != after  # which was read after the first text
    client.predict(api_name="/forget")
    with pytest.raises(Exception, match="Write a text first"):
        written("")


@pytest.mark.long
def test_without_a_model_it_says_what_to_set():
    program = (
        "import sys, types; sys.modules['gradio'] = types.ModuleType('gradio'); import runpy; runpy.run_path('app.py')"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("MODEL", "TRUST_REMOTE_CODE")}
    done = subprocess.run([sys.executable, "-c", program], cwd=SPACE, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "Set the variable MODEL to a checkpoint" in done.stderr
