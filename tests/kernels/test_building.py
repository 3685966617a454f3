"""Life without the compiled kernel of the scan, its versions, and building it."""

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_linear_scan_cpu import kernels, needs_kernel

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_KERNEL = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.endswith("._linear_scan_cpu"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Absent())
"""


@pytest.mark.long
def test_everything_works_without_the_kernel(bare_python, tmp_path):
    code = """
import torch
import hf_recurrent
from hf_recurrent.cli import env
from hf_recurrent.modeling.scan.linear_scan import available_backends, linear_scan
from transformers import AutoModelForCausalLM
assert "cpu" not in available_backends(), available_backends()
for steps in (1, 5):
    linear_scan(torch.rand(2, steps, 3), torch.rand(2, steps, 3))
    try:
        linear_scan(torch.rand(2, steps, 3), torch.rand(2, steps, 3), backend="cpu")
    except ImportError as error:
        assert "'cpu' is not installed" in str(error) and "C compiler" in str(error), error
    else:
        raise AssertionError("it ran")
config = hf_recurrent.config_from_preset("memora-tiny", hidden_size=8, state_size=8, num_hidden_layers=1)
ids = torch.randint(0, 256, (2, 7))
AutoModelForCausalLM.from_config(config)(input_ids=ids, labels=ids).loss.backward()
env.main([])
"""
    done = bare_python.python(["-c", WITHOUT_KERNEL + code], tmp_path, environment={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("CPU scan kernel"))
    assert "not available" in line and "C compiler" in line


@needs_kernel
def test_env_names_the_instructions(capsys):
    from hf_recurrent.cli import env

    env.main([])
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("CPU scan kernel"))
    assert kernels.instruction_set() in line


@needs_kernel
def test_a_kernel_of_another_version_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "_VERSION", kernels._VERSION + 1)
    with pytest.raises(ImportError, match="build it again"):
        kernels._load()
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(broken)))
    with pytest.raises(ImportError, match="cannot be loaded"):
        kernels._load()


def copy_of_sources(tmp_path):
    pytest.importorskip("setuptools", reason="builds with setuptools")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if not (ROOT / name).exists():
            pytest.skip("the sources are not here")
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("hf_recurrent", "modeling", "trainers"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)


def setup_py(folder, *arguments, **environment):
    command = [sys.executable, "setup.py", "-q", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_building_without_a_compiler_goes_on_without_the_kernel(tmp_path):
    copy_of_sources(tmp_path)
    absent = str(tmp_path / "no-such-compiler")
    message = setup_py(tmp_path, "build_ext", "--inplace", CC=absent, LDSHARED=absent)
    assert "_linear_scan_cpu" in message and "failed" in message
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.long
@pytest.mark.skipif(
    shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]) is None or sys.platform == "win32",
    reason="no C compiler here",
)
def test_building_with_a_compiler(tmp_path):
    """Without optimisation, which is most of the time of a build."""
    copy_of_sources(tmp_path)
    setup = tmp_path / "setup.py"
    setup.write_text(setup.read_text().replace('"-O3"', '"-O0", "-Werror"'))
    setup_py(tmp_path, "build_ext", "--inplace")
    (library,) = (tmp_path / "hf_recurrent" / "kernels").glob("_linear_scan_cpu*")
    assert library.name.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))
