"""The commands of docs/tasks/serving.md, against a running server."""

import json
import re
import subprocess
from pathlib import Path

from running_server import running_server

PAGE = (Path(__file__).parents[2] / "docs/tasks/serving.md").read_text(encoding="utf-8")


def test_the_page(tmp_path, capsys):
    example, alike = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    (script,) = (code for code in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) if "curl" in code)
    with running_server(name="memora-s0-python") as server:
        names: dict = {}
        exec(example.replace(":8000", f":{server.port}"), names)
        expected = server.post(
            "/v1/completions", {"model": "memora-s0-python", "prompt": "def main(", "max_tokens": 100, "seed": 1}
        )
        assert capsys.readouterr().out == expected["choices"][0]["text"]
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
