"""The job scripts of `examples/jobs/`: their headers, and runs against a Hub on 127.0.0.1."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "examples" / "jobs"
sys.path.append(str(ROOT / "tests" / "hub"))
from hub_process import TOKEN, run_words  # noqa: E402
from loopback_hub import LoopbackHub  # noqa: E402

# The reference expression of PEP 723.
HEADER = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
SHORT = ["--block_size", "8", "--per_device_train_batch_size", "2", "--max_eval_bytes", "500", "--sample_bytes", "4"]
SHORT += ["--report_to", "none"]


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.py")), ids=lambda path: path.stem)
def test_the_header_names_what_a_job_needs(path):
    (header,) = HEADER.finditer(path.read_text(encoding="utf-8"))
    lines = header["content"].splitlines()
    content = tomllib.loads("\n".join(line.removeprefix("#").removeprefix(" ") for line in lines))
    (own,) = content["dependencies"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    name, wanted = re.fullmatch(r"([\w-]+)\[([\w,-]+)\]", own).groups()
    assert name == "hf-recurrent" and set(wanted.split(",")) <= extras.keys()
    assert content["tool"]["hf-jobs"]["secrets"] == ["HF_TOKEN"]
    header_module = pytest.importorskip("huggingface_hub.cli._uv_script_header")
    assert content["tool"]["hf-jobs"].keys() <= set(header_module.VALID_KEYS)


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"Story {number} of a night in which nobody came. " * 12)
    return folder


@pytest.mark.long
def test_a_job_continues_where_the_last_one_was_stopped(tmp_path, texts):
    command = [str(JOBS / "pretrain.py"), "tester/job", "--recipe", "none", "--model", "hawk-tiny"]
    command += ["--corpus", str(texts)]
    command += ["--save_steps", "2", "--max_steps", "4", *SHORT]
    with LoopbackHub(TOKEN) as hub:
        assert "continuing" not in run_words(command, hub, tmp_path, home="one")
        repository, whole = hub.repositories["tester/job"], hub.files("tester/job")
        assert {"model.safetensors", "README.md", "last-checkpoint/trainer_state.json"} <= whole.keys()
        # As if the job had been stopped after its first checkpoint.
        kept = repository.titles.index("Training in progress, step 2, checkpoint") + 1
        repository.commits = dict(list(repository.commits.items())[:kept])
        other = tmp_path / "other machine"
        other.mkdir()
        assert "continuing from checkpoint-2 of tester/job" in run_words(command, hub, other, home="two")
        resumed = hub.files("tester/job")
        assert resumed["model.safetensors"].content == whole["model.safetensors"].content
        assert b'"global_step": 4' in resumed["last-checkpoint/trainer_state.json"].content


@pytest.mark.long
@pytest.mark.parametrize("how", ["all", "lora", "read"])
def test_a_model_of_the_hub_is_adapted_to_a_folder(how, tmp_path, texts):
    if how == "lora":
        pytest.importorskip("peft")
    more = ["--max_steps", "2", *SHORT] if how != "read" else []
    with LoopbackHub(TOKEN) as hub:
        base = [str(JOBS / "pretrain.py"), "tester/base", "--recipe", "none", "--model", "hawk-tiny"]
        run_words([*base, "--corpus", str(texts), "--max_steps", "2", *SHORT], hub, tmp_path, home="one")
        command = [str(JOBS / "adapt.py"), "tester/base", "tester/adapted", str(texts), "--how", how, *more]
        run_words(command, hub, tmp_path, home="two")
        files = hub.files("tester/adapted")
        weights = "adapter_model.safetensors" if how == "lora" else "model.safetensors"
        assert weights in files and (how != "lora" or "model.safetensors" not in files)
        assert b"base_model: tester/base" in files["README.md"].content
