"""`--import FILE`: own units, tasks and sources on every command, in workers and in several processes."""

import itertools
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from own_parts_state import restored_parts, without_example
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from hf_recurrent import task_from_name
from hf_recurrent.cli.main import COMMANDS, main
from hf_recurrent.cli.user_code import import_user_code
from hf_recurrent.modeling.units.recurrent_units import RECURRENT_UNITS

ROOT = Path(__file__).resolve().parents[2]
UNIT = (ROOT / "examples/leaky_unit.py").read_text()
IMPORT = ["--import", "leaky_unit.py"]
TRAIN = ["--use_cpu", "--block_size", "8", "--sample_bytes", "2", "--disable_tqdm", "true", "--report_to", "none"]
TRAIN += ["--per_device_train_batch_size", "2", "--logging_steps", "2", "--save_steps", "2"]
TRAIN += ["--lr_scheduler_type", "constant"]
SIZES = ["recurrent_unit=leaky", "hidden_size=8", "state_size=8", "num_hidden_layers=1"]
OWN = [*IMPORT, "--config_overrides", *SIZES]
TASK = """
from dataclasses import dataclass
import os
import numpy as np
from hf_recurrent import Task, register_task

@register_task("repeat")
@dataclass(frozen=True, kw_only=True)
class Repeat(Task):
    vocab_size = 9
    length = 8
    def generate(self, draws):
        with open(f"process-{os.getpid()}", "w"):
            pass
        letters = draws.integers("letters", 8, 9)
        return letters, letters
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    Path("leaky_unit.py").write_text(UNIT)
    Path("notes").mkdir()
    for number in range(4):
        Path(f"notes/{number}.txt").write_text("to be or not to be, that is the question. " * 9)
    with restored_parts(tmp_path):
        without_example()
        yield


def error_of(capsys, *words: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and "Traceback" not in "".join(lines)
    return lines[-1]


# ---- The flag ----

NEEDED = {
    "reproduce": ["parity"],
    "learn": ["memora-tiny", "--source", "notes/0.txt"],
    "push-to-hub": ["run", "me/run"],
    "score": ["run", "notes/0.txt"],
    "pretrain": [],
    "env": [],
    "plan": [],
    "compress": ["run", "notes/0.txt"],
    "decompress": ["run", "notes/0.txt"],
    "completion": ["bash"],
    "transformers": ["env"],
    "hf-extension": [],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_it(command, capsys):
    words = [command, *NEEDED.get(command, ["run"])]
    assert "`--import` is 'absent.py'; file not found." in error_of(capsys, *words, "--import", "absent.py")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("broken.py", "import torch\nx = = 3\n", "it fails: SyntaxError: invalid syntax (broken.py, line 2)"),
        ("broken.py", "import os\n\ndef f():\n    return y\n\nf()\n", "it fails in line 4: NameError: name 'y'"),
        ("broken.py", "raise SystemExit(0)\n", "it fails in line 1: SystemExit: 0"),
        ("broken.py", "import not_installed\n", "it fails in line 1: ModuleNotFoundError: No module named 'not_inst"),
        ("broken.py", UNIT.replace('"leaky"', '"glru"'), ": 'glru' is a recurrent unit of this package; choose"),
        ("random.py", "", "another module is named `random`"),
        ("my-unit.py", "", "it must be a Python file with a name such as my_units.py"),
        ("unit.txt", "", "it must be a Python file with a name such as my_units.py"),
        ("./absent/unit.py", None, "file not found."),
        ("no_such_module", None, "module not found."),
        ("leaky_unit.units", None, "it fails: ModuleNotFoundError"),
        ("broken", None, "module not found; did you mean broken.py?"),
    ],
)
def test_files_that_cannot_be_imported(name, text, message, capsys):
    if name == "broken":
        Path("broken.py").write_text("")
    if name.startswith("leaky"):
        sys.path.append(".")
        message = "`--import` is 'leaky_unit.units'; "
    if text is not None:
        Path(name).write_text(text)
    error = error_of(capsys, "env", "--import", name)
    assert error.startswith(f"hf-recurrent env: error: `--import` is {name!r}") and message in error


def test_files_and_modules_may_be_repeated(capsys):
    for name in ("first", "second"):
        Path("own").mkdir(exist_ok=True)
        Path(f"own/{name}_unit.py").write_text(UNIT.replace('"leaky"', f'"{name}"'))
    Path("package").mkdir()
    Path("package/units.py").write_text(UNIT.replace('"leaky"', '"third"'))
    sys.path.append(str(Path.cwd()))
    main(["env", "--import", "own/first_unit.py", "--import=own/second_unit.py", "--import", "package.units"])
    assert {"first", "second", "third"} <= set(RECURRENT_UNITS)
    import_user_code(["own/first_unit.py"])  # again, without an effect


def test_help_names_it(capsys):
    for command in ("pretrain", "generate"):
        with pytest.raises(SystemExit) if command == "generate" else open(os.devnull):
            main([command, "--help"])
        assert "--import" in capsys.readouterr().out


# ---- A unit, from training to the Hub ----


def weights(directory):
    return load_file(Path(directory, "model.safetensors"))


@pytest.mark.long
@pytest.mark.parametrize("method", ["bptt", "rtrl"])
def test_a_unit_in_a_file_is_trained_and_resumed(method, capsys):
    train = ["pretrain", *TRAIN, "--corpus", "notes", "--method", method]
    main([*train, *OWN, "--max_steps", "4", "--output_dir", "whole"])
    shown = capsys.readouterr().out
    assert (
        "generate whole --import leaky_unit.py --prompt" in shown and "evaluate whole --import leaky_unit.py" in shown
    )
    assert (
        Path("whole/leaky_unit.py").is_file()
        and "import LeakyIntegrator" in Path("whole/checkpoint-2/modeling_memora.py").read_text()
    )
    # Resumed in a new process.
    shutil.copytree("whole/checkpoint-2", "half/checkpoint-2")
    without_example()
    resume = ["--max_steps", "4", "--output_dir", "half", "--resume_from_checkpoint", "true"]
    assert "`recurrent_unit` is 'leaky'; it must be one of" in error_of(capsys, *train, *OWN[2:], *resume)
    main([*train, *OWN, *resume])
    for name, tensor in weights("whole").items():
        assert torch.equal(tensor, weights("half")[name]), name


@pytest.mark.long
def test_all_commands_take_the_file_or_the_trusted_code_of_the_checkpoint(capsys):
    main(["pretrain", *TRAIN, *OWN, "--corpus", "notes", "--max_steps", "1", "--output_dir", "whole"])
    commands = (
        ["evaluate", "whole", "--corpus", "notes", "--no_compressors", "--quiet"],
        ["generate", "whole", "--prompt", "to", "--max_new_tokens", "3"],
        ["push-to-hub", "whole", "me/leaky", "--dry_run"],
        ["learn", "whole", "--source", "notes/0.txt", "--stride", "64", "--quiet"],
        ["pretrain", *TRAIN, "--model", "whole", "--corpus", "notes", "--max_steps", "1"],
    )
    for words in commands:
        for number, trust in enumerate(([], IMPORT, ["--trust_remote_code"])):
            without_example()
            output = ["--output_dir", f"{words[0]}-{number}"] if words[0] in ("learn", "pretrain") else []
            if trust:
                main([*words, *output, *trust])
                continue
            error = error_of(capsys, *words)
            assert "whose code is the file `leaky_unit.py` of the checkpoint; it is run only with `trust_rem" in error
    assert "leaky_unit.py" in capsys.readouterr().out  # of the dry run
    assert Path("learn-1/leaky_unit.py").read_text() == Path("whole/leaky_unit.py").read_text()
    assert Path("pretrain-2/leaky_unit.py").read_text() == Path("whole/leaky_unit.py").read_text()
    without_example()
    resumed = ["learn", "whole", "--source", "notes/0.txt", "--stride", "64", "--output_dir", "learn-1", "--resume"]
    assert "`leaky_unit.py`" in error_of(capsys, *resumed)
    main([*resumed, *IMPORT])


def test_code_of_a_checkpoint_is_not_executed_unless_it_is_trusted(capsys):
    main(["pretrain", *TRAIN, *OWN, "--corpus", "notes", "--max_steps", "1", "--output_dir", "run"])
    for name in ("leaky_unit", "modeling_memora"):
        with open(f"run/{name}.py", "a") as file:
            file.write("open('executed', 'w').close()\n")
    without_example()
    for words in (
        ["evaluate", "run", "--corpus", "notes"],
        ["generate", "run", "--prompt", "a"],
        ["push-to-hub", "run", "me/run", "--dry_run"],
        ["learn", "run", "--source", "notes/0.txt"],
        ["pretrain", *TRAIN, "--model", "run", "--corpus", "notes"],
    ):
        assert "`leaky_unit.py`" in error_of(capsys, *words)
        without_example()
        if words[0] in ("evaluate", "generate"):
            main([*words, *IMPORT])  # the user's own copy is executed, not this one
            without_example()
        assert not Path("executed").exists()


# ---- Other processes ----


@pytest.mark.long
def test_a_worker_that_is_started_anew_imports_it_too():
    """As on macOS and Windows: its memory is no copy of ours."""
    Path("my_tasks.py").write_text(TASK)
    import_user_code(["my_tasks.py"])
    streams = task_from_name("repeat").blocks(2, 8)
    (batch,) = itertools.islice(DataLoader(streams, None, num_workers=1, multiprocessing_context="spawn"), 1)
    assert torch.equal(batch["input_ids"], batch["shift_labels"])
    assert made_by() and str(os.getpid()) not in made_by()


@pytest.mark.long
def test_every_process_of_a_run_imports_it():
    Path("my_tasks.py").write_text(TASK)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words = [*TRAIN, *OWN, "--import", "my_tasks.py", "--corpus", "task:repeat,num_validation_examples=4"]
    words += ["--max_steps", "2", "--output_dir", "run"]
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    settings |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "scripts/pretrain.py"), *words],
            env=os.environ | settings | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert made_by() == {str(process.pid) for process in processes}
    assert Path("run/leaky_unit.py").is_file()


def made_by() -> set[str]:
    """Numbers of the processes that have made examples of the task."""
    return {name.removeprefix("process-") for name in os.listdir() if name.startswith("process-")}
