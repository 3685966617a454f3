"""The decisions of bootstrap.py, without installing anything."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PARALLEL = ["-n", "logical", "--dist", "loadfile", "--no-loadscope-reorder"]


@pytest.fixture
def bootstrap(tmp_path, monkeypatch):
    """The module, in a folder of its own that looks like the project."""
    for name in ("bootstrap.py", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    spec = importlib.util.spec_from_file_location("bootstrap", tmp_path / "bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec.loader.exec_module(module)
    assert tmp_path.resolve() == Path(module.ROOT).resolve()
    return module


def pretend_environment(bootstrap) -> Path:
    """An environment that exists: its Python is this one."""
    environment = Path(bootstrap.ROOT, ".venv")
    python = Path(bootstrap.venv_python(str(environment)))
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    return environment


def stamp(bootstrap, extra: str) -> None:
    environment = os.path.join(bootstrap.ROOT, ".venv")
    Path(bootstrap.stamp_path(environment, extra)).write_text(bootstrap.fingerprint(bootstrap.ROOT, extra))


def printed(bootstrap, capsys, *arguments: str) -> list[list[str]]:
    assert bootstrap.main(["--print", *arguments]) == 0
    return [shlex.split(line.removeprefix("+ ")) for line in capsys.readouterr().out.splitlines()]


def test_from_nothing_torch_comes_first_and_the_job_last(bootstrap, capsys):
    create, torch, project, job = printed(bootstrap, capsys, "train", "--max_steps", "5", "--corpus", "my files/*.txt")
    assert create[1:3] == ["-m", "venv"] and create[3] == os.path.join(bootstrap.ROOT, ".venv")
    assert torch[-1] == "torch==2.13.0" and "--index-url" not in torch
    assert project[-2:] == ["--editable", f"{bootstrap.ROOT}[baselines]"]
    assert Path(job[0]).stem == "hf-recurrent"
    assert job[1:] == ["pretrain", "--max_steps", "5", "--corpus", "my files/*.txt"]
    assert not Path(bootstrap.ROOT, ".venv").exists()


def test_the_tests_need_all_extras(bootstrap, capsys):
    *_, project, job = printed(bootstrap, capsys, "test", "-k", "scan and not slow")
    assert project[-1] == f"{bootstrap.ROOT}[dev]"
    assert job[1:] == ["-m", "pytest", *PARALLEL, "-k", "scan and not slow"]


def test_what_is_installed_is_not_installed_again(bootstrap, capsys):
    pretend_environment(bootstrap)
    stamp(bootstrap, "baselines")
    assert len(printed(bootstrap, capsys, "train")) == 1
    assert len(printed(bootstrap, capsys, "test")) > 1  # the extras are missing
    stamp(bootstrap, "dev")
    assert len(printed(bootstrap, capsys, "test")) == 1


def test_all_extras_are_enough_to_train(bootstrap, capsys):
    pretend_environment(bootstrap)
    stamp(bootstrap, "dev")
    assert len(printed(bootstrap, capsys, "train")) == 1


@pytest.mark.parametrize("change", ["project", "torch", "environment"])
def test_a_change_installs_again(bootstrap, capsys, monkeypatch, change):
    environment = pretend_environment(bootstrap)
    stamp(bootstrap, "dev")
    if change == "project":
        with open(os.path.join(bootstrap.ROOT, "pyproject.toml"), "a") as file:
            file.write("# another dependency\n")
    elif change == "torch":
        monkeypatch.setattr(bootstrap, "TORCH", "torch==2.14.0")
    else:
        Path(bootstrap.venv_python(str(environment))).unlink()
    assert len(printed(bootstrap, capsys, "test")) > 1


def test_the_oldest_versions_are_the_lower_bounds(bootstrap, capsys):
    create, torch, project, job = printed(bootstrap, capsys, "test-oldest")
    assert create[-1] == os.path.join(bootstrap.ROOT, ".venv-oldest") and job[0].startswith(create[-1])
    bounds = re.findall(r'"([\w-]+)(?:\[.*\])?>=([\d.]+)', Path(bootstrap.ROOT, "pyproject.toml").read_text())
    pins = [torch[-1], *project[project.index(f"{bootstrap.ROOT}[dev]") + 1 :]]
    expected = {"==".join(bound) for bound in bounds if bound[0] != "setuptools"}
    assert {pin.split(";")[0] for pin in pins} == expected
    assert torch[-1].startswith("torch==") and len(pins) > 10


def test_the_oldest_versions_run_the_short_suite_unless_arguments_are_given(bootstrap, capsys):
    assert printed(bootstrap, capsys, "test-oldest")[-1][-1] == "@tests/oldest.txt"
    assert printed(bootstrap, capsys, "test-oldest", "-x")[-1][-2:] == [PARALLEL[-1], "-x"]


def test_the_smoke_run_is_a_list_of_tests(bootstrap, capsys):
    assert printed(bootstrap, capsys, "test", "--smoke", "-x")[-1][-2:] == ["@tests/smoke.txt", "-x"]


@pytest.mark.parametrize("name", ["smoke", "oldest"])
def test_listed_tests_exist(name):
    for line in (ROOT / "tests" / f"{name}.txt").read_text().splitlines():
        file, _, test = line.partition("[")[0].partition("::")
        assert f"def {test}(" in (ROOT / file).read_text() if test else (ROOT / file).is_file(), line


def test_a_dependency_without_a_lower_bound_is_named(bootstrap):
    pyproject = Path(bootstrap.ROOT, "pyproject.toml")
    pyproject.write_text(pyproject.read_text().replace('"numpy>=', '"numpy", "tqdm>='))
    with pytest.raises(SystemExit, match="'numpy' needs a lower bound"):
        bootstrap.main(["--print", "test-oldest"])


def test_the_environments_do_not_mix(bootstrap, capsys):
    pretend_environment(bootstrap)
    stamp(bootstrap, "dev")
    assert len(printed(bootstrap, capsys, "test-oldest")) == 4


def test_a_failing_step_is_named_and_leaves_no_stamp(bootstrap, monkeypatch, capfd):
    environment = pretend_environment(bootstrap)
    failing = [sys.executable, "-c", "import sys; print('no such package'); sys.exit(3)"]
    monkeypatch.setattr(bootstrap, "install_commands", lambda *_: [("Installing torch", failing)])
    with pytest.raises(SystemExit, match="Installing torch failed with status 3"):
        bootstrap.main(["train"])
    assert "no such package" in capfd.readouterr().out
    assert not list(environment.glob("installed-*"))


def test_a_complete_installation_is_stamped_and_becomes_the_job(bootstrap, monkeypatch):
    pretend_environment(bootstrap)
    nothing = [sys.executable, "-c", ""]
    started = []
    monkeypatch.setattr(bootstrap, "install_commands", lambda *_: [("Installing torch", nothing)])
    monkeypatch.setattr(bootstrap.os, "execv", lambda path, command: started.append(command))
    monkeypatch.chdir(bootstrap.ROOT)
    bootstrap.main(["test", "-x"])
    assert started and started[0][1:] == ["-m", "pytest", *PARALLEL, "-x"]
    assert bootstrap.is_installed(bootstrap.ROOT, os.path.join(bootstrap.ROOT, ".venv"), "dev")


def test_an_old_python_is_told_so(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 10, 4))
    monkeypatch.setattr(bootstrap.sys, "version", "3.10.4 (main)")
    with pytest.raises(SystemExit, match=r"Python 3\.11 or newer is required; this is 3\.10\.4"):
        bootstrap.main(["train"])


@pytest.mark.parametrize("arguments", [[], ["fly"], ["--print"], ["--print", "fly"]])
def test_an_unknown_word_is_refused(bootstrap, arguments):
    with pytest.raises(SystemExit, match=r"unknown command .* \(choose from train, test, test-oldest\)"):
        bootstrap.main(arguments)


def test_it_needs_the_standard_library_alone():
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "bootstrap.py"), "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "bootstrap.py train" in done.stdout


def test_ci_runs_the_readme_command_after_the_style_checks():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = script.read_text().splitlines()
    assert "set -euo pipefail" in lines
    assert lines[-4] == "python3 bootstrap.py test"
    assert lines[-3] == "python3 bootstrap.py test -m long"
    assert "sanitize_kernels.py" in lines[-2]
    assert lines[-1] == "python3 bootstrap.py test-oldest"
