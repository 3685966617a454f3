"""The Space of examples/space: the command of its Dockerfile, started as a Space starts it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from model_cases import tiny_model
from running_server import Client

from hf_recurrent import ByteTokenizer

SPACE = Path(__file__).parents[2] / "examples" / "space"
HEADER = yaml.safe_load((SPACE / "README.md").read_text(encoding="utf-8").split("---\n")[1])
COMMAND = json.loads(re.search(r"^CMD (.*)", (SPACE / "Dockerfile").read_text().replace("\\\n", ""), re.M)[1])


def test_the_header_is_one_of_a_space():
    assert HEADER["sdk"] == "docker" and len(HEADER["short_description"]) <= 60
    assert f"--port {HEADER['app_port']} " in COMMAND[2] and "--host 0.0.0.0 " in COMMAND[2]


@pytest.mark.long
def test_strangers_share_a_server(tmp_path):
    folder = tmp_path / "tiny"
    tiny_model("memora").save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    script = COMMAND[2].replace("hf-recurrent", f'"{sys.executable}" -m hf_recurrent.cli.main')
    script = script.replace("--port 7860", "--port 0").replace("--max_sessions 5000", "--max_sessions 3")
    environment = {name: value for name, value in os.environ.items() if name != "HF_RECURRENT_API_KEY"}
    without = subprocess.run([*COMMAND[:2], script], env=environment | {"MODEL": ""}, capture_output=True, text=True)
    assert without.returncode and "Set the variable MODEL" in without.stderr
    environment |= {"MODEL": str(folder), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen([*COMMAND[:2], script], env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = next(line for line in process.stderr if "is served on" in line)
            client = Client(int(re.search(r":(\d+)/v1", line)[1]))
            # A Space has a name of its own, and is shown in a page of the Hub.
            for headers in ({"host": "you-space.hf.space", "origin": "https://you-space.hf.space"}, {}):
                assert client.request("GET", "/", headers=headers).status == 200
            sessions = [client.new_session() for _ in range(3)]
            client.read(sessions[0], "abc")
            reply = client.request("GET", "/v1/sessions")
            assert reply.status == 403 and not any(each in str(reply.body) for each in sessions)
            new = client.new_session()
            found = {each: client.request("GET", f"/v1/sessions/{each}").status for each in [*sessions, new]}
            assert list(found.values()) == [200, 404, 200, 200]  # the least recently used one made room
        finally:
            process.terminate()
            assert process.wait(30) in (0, -15)
