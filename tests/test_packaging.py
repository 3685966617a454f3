"""The wheel holds the whole package except the experiments, and importing it is cheap."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "hf_recurrent", "modeling", "trainers")
LINKS = ("modeling", "trainers")
OPTIONAL = ("datasets", "triton", "matplotlib", "evaluate", "peft", "zstandard", "tensorboard", "torch")


def run_python(code: str, *, path: Path | None = None, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path) if path else "", "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def files_for_users() -> set[str]:
    """Code and package data, by their paths in the wheel."""
    found = {}
    for folder, name in {"hf_recurrent": "hf_recurrent", **{name: f"hf_recurrent/{name}" for name in LINKS}}.items():
        for path in (ROOT / folder).rglob("*"):
            found[f"{name}/{path.relative_to(ROOT / folder).as_posix()}"] = path
    links = tuple(f"hf_recurrent/{name}" for name in LINKS)
    return {
        name
        for name, path in found.items()
        if path.is_file() and path.suffix not in (".pyc", ".so") and name not in links
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that the build leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, copy / name)
    target = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, "--wheel-dir", str(target), str(copy)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = target.glob("hf_recurrent-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    return target


@pytest.mark.long
def test_the_wheel_has_one_top_level_name_and_every_file_for_users(wheel, record_property):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hf_recurrent"}
    kernels = {name for name in names if name.endswith(".so")}
    assert {name for name in names if name.startswith("hf_recurrent/")} - kernels == files_for_users()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "hf_recurrent/hub/model_card_template.md" in names
    kilobytes = wheel.stat().st_size / 1000
    record_property("wheel_kilobytes", round(kilobytes))
    print(f"wheel: {kilobytes:.0f} kB in {len(names)} files")


def test_the_wheel_holds_no_experiments_benchmarks_or_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if re.search(r"(^|/)(papers/|tests?/|test_|benchmark)", name)]


@pytest.mark.long
def test_the_installed_wheel_works_away_from_the_checkout(installed, tmp_path, bare_python):
    code = """
import hf_recurrent, importlib
from hf_recurrent.hub.model_card import create_model_card
from transformers import AutoConfig, AutoModelForCausalLM
config = hf_recurrent.config_from_preset("memora-tiny", hidden_size=8, state_size=8, num_hidden_layers=1)
assert "not evaluated" in create_model_card(AutoModelForCausalLM.from_config(config)).content
for name in hf_recurrent.__all__:
    getattr(hf_recurrent, name)
for name in ("modeling", "trainers"):
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise AssertionError(f"{name} is importable by its generic name")
print(hf_recurrent.__file__)
"""
    done = bare_python.python(["-c", code], tmp_path, environment={"PYTHONPATH": str(installed)})
    assert done.stdout.startswith(str(installed)), done.stderr


@pytest.mark.long
def test_without_experiments_the_command_says_how_to_get_them(installed, tmp_path):
    code = """
import sys
# An editable installation of a clone would find them.
sys.meta_path = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
from hf_recurrent.cli.main import main
main(["reproduce", "--help"])
"""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2 and done.stderr == (
        "hf-recurrent reproduce: error: experiments are not part of the installed wheel; clone the repository and run "
        "`pip install -e .` in it.\n"
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["MemoraForCausalLM", "HawkModel", "MultiStreamTrainer"])
def test_a_public_name_may_be_the_first_import(tmp_path, name, bare_python):
    environment = {"PYTHONPATH": str(ROOT)}
    done = bare_python.python(["-c", f"from hf_recurrent import {name}"], tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_touches_no_optional_dependency(tmp_path):
    code = f"""
import sys
import transformers
before = set(sys.modules)
import hf_recurrent
dir(hf_recurrent)
print(sorted({set(OPTIONAL)!r} & (set(sys.modules) - before)))
"""
    assert run_python(code, path=ROOT, cwd=tmp_path) == "[]"


def test_importing_the_package_is_cheap(tmp_path):
    code = """
import sys
import transformers
before = set(sys.modules)
import hf_recurrent
print(*sorted(set(sys.modules) - before - set(sys.stdlib_module_names)))
"""
    loaded = run_python(code, path=ROOT, cwd=tmp_path).split()
    assert loaded[0] == "hf_recurrent" and len(loaded) <= 3  # all else is imported when it is asked for
    assert all(name.rpartition(".")[0] in ("", "hf_recurrent") for name in loaded)


def test_the_links_lead_to_the_folders():
    for name in LINKS:
        link = ROOT / "hf_recurrent" / name
        if link.is_file():  # a clone without symbolic links
            assert link.read_text(encoding="utf-8") == f"../{name}"
        else:
            assert link.samefile(ROOT / name)
        listed = subprocess.run(["git", "ls-files", "-s", str(link)], capture_output=True, text=True, cwd=ROOT)
        if listed.returncode == 0 and listed.stdout:  # in a clone, and not in an unpacked archive
            assert listed.stdout.startswith("120000 ")


@pytest.mark.parametrize("name", ["modeling", "trainers"])
def test_importing_a_folder_from_the_root_raises(name):
    code = f"try:\n    import {name}\nexcept ImportError as error:\n    print(error)"
    assert f"import hf_recurrent.{name}" in run_python(code, cwd=ROOT)
