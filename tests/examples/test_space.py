"""The Space of examples/space, started as a Space starts it."""

import os
import re
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from model_cases import tiny_model
from packaging.requirements import Requirement
from packaging.version import Version
from running_server import Client

from hf_recurrent import ByteTokenizer

SPACE = Path(__file__).parents[2] / "examples" / "space"


def test_the_header_is_one_of_a_space():
    header = yaml.safe_load((SPACE / "README.md").read_text(encoding="utf-8").split("---\n")[1])
    assert (
        header["sdk"] == "gradio" and (SPACE / header["app_file"]).is_file() and len(header["short_description"]) <= 60
    )
    project = (SPACE.parents[1] / "pyproject.toml").read_text()
    tested = Requirement(re.search(r'"(gradio>=[^"]*)"', project)[1]).specifier
    assert Version(header["sdk_version"]) in tested


@pytest.mark.long
def test_it_serves_the_page_alone(tmp_path):
    pytest.importorskip("gradio", reason="Gradio is not installed")
    folder = tmp_path / "tiny"
    tiny_model("memora").save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"MODEL": str(folder), "GRADIO_SERVER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SPACE / "app.py")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line == f"tiny is served on http://0.0.0.0:{port}/\n"
            client = Client(port)
            assert "tiny: a model that remembers" in client.request("GET", "/").body.decode()
            # A Space has a name of its own, and is shown in a page of the Hub.
            for headers in ({"host": "you-space.hf.space", "origin": "https://you-space.hf.space"}, {}):
                assert client.request("GET", "/config", headers=headers).status == 200
            for path in ("/v1/models", "/v1/sessions", "/v1/completions", "/v1/learning", "/metrics"):
                assert client.request("GET", path).status == 404
        finally:
            process.terminate()
            assert process.wait(30) in (0, -15)
    without = subprocess.run(command, env=environment | {"MODEL": ""}, capture_output=True, text=True)
    assert without.returncode == 1 and "Set the variable MODEL" in without.stderr and version("gradio")
