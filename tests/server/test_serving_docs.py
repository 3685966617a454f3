"""The commands of docs/tasks/serving.md, against a running server."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from running_server import running_server

from hf_recurrent import CHAT_TEMPLATE, ByteTokenizer

PAGE = (Path(__file__).parents[2] / "docs/tasks/serving.md").read_text(encoding="utf-8")


def test_the_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("xgrammar")
    example, forms, alike, sessions = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    (script,) = (code for code in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) if "curl" in code)
    tokenizer = ByteTokenizer(chat_template=CHAT_TEMPLATE)
    with running_server(name="memora-s0-python", tokenizer=tokenizer) as server:
        names: dict = {}
        exec(example.replace(":8000", f":{server.port}"), names)
        expected = server.post(
            "/v1/completions", {"model": "memora-s0-python", "prompt": "def main(", "max_tokens": 100, "seed": 1}
        )
        assert capsys.readouterr().out == expected["choices"][0]["text"]
        exec(forms.replace(":8000", f":{server.port}"), names)
        usage, form, arguments = capsys.readouterr().out.splitlines()
        given, cached = map(int, usage.split())
        assert 0 < given - cached <= len("\0user\nAnd then?\0assistant\n") + 1
        for found in map(json.loads, (form, arguments)):
            assert found["animal"] in ("cat", "dog") and isinstance(found["is_small"], bool)
        exec(sessions.replace(":8000", f":{server.port}"), names)
        assert capsys.readouterr().out == "True 39\n"
        exec(alike, names)
        first, second = (line.split() for line in capsys.readouterr().out.splitlines())
        assert first == ["52", "0"] and int(second[0]) > 60 and int(second[1]) >= 51
        # Every answer on a line of its own.
        script = script.replace(":8000", f":{server.port}").replace("curl -s", "curl -s -w '\\n'")
        done = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line]
    assert done.returncode == 0 and len(answers) == 7 and not any("error" in answer for answer in answers)
    read, marked, completion, rewound, fork, moved, deleted = answers
    assert len(read["bits"]) == 19 and marked["marks"] == {"night": 19} and completion["usage"]["prompt_tokens"] == 5
    assert rewound["bytes_read"] == fork["bytes_read"] == 19 and moved["bytes_read"] == 0 and deleted["deleted"]
