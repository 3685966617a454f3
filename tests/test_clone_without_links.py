"""A clone made with `core.symlinks=false`, as on Windows, has text files in place of the links, and works."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("modeling", "trainers")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The sources with uncommitted changes, as such a clone has them."""
    folder = tmp_path_factory.mktemp("clone")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    for name in LINKS:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copytree(
        ROOT / "hf_recurrent",
        folder / "hf_recurrent",
        ignore=lambda path, names: {*ignored(path, names), *(LINKS if Path(path).name == "hf_recurrent" else ())},
    )
    for name in LINKS:
        (folder / "hf_recurrent" / name).write_text(f"../{name}", encoding="utf-8")
    return folder


def run_python(clone: Path, work: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"HF_HOME": str(work / "home"), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=work, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_every_module_is_found_once_under_its_name_and_loads_without_kernels(clone, tmp_path):
    code = f"""
import importlib, sys
from pathlib import Path
root = Path({str(clone)!r})
for folder in ("hf_recurrent", *{LINKS!r}):
    for path in sorted(root.joinpath(folder).rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        name = name if folder == "hf_recurrent" else f"hf_recurrent.{{name}}"
        try:
            module = importlib.import_module(name)
        except ImportError:
            # Not built, or Triton or lm_eval is not installed, as in test_private_names.py.
            assert "kernels" in path.parts or path.name == "lm_eval_model.py"
            continue
        assert Path(module.__file__).samefile(path), (name, module.__file__)
loaded = [Path(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
ours = [str(path) for path in loaded if root in path.parents]
assert len(ours) == len(set(ours)) > 100
assert not {set(LINKS)!r} & sys.modules.keys()
"""
    run_python(clone, tmp_path, "-c", code)


@pytest.mark.long
def test_it_trains_and_its_checkpoint_loads_without_the_package(clone, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    for number in range(8):
        (notes / f"{number}.txt").write_text("All work and no play makes Jack a dull boy.\n" * (number + 1))
    sizes = ["--block_size", "16", "--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "2"]
    small = ["--config_overrides", "hidden_size=16", "state_size=16", "num_hidden_layers=1"]
    quiet = ["--use_cpu", "--disable_tqdm", "true", "--sample_every", "0"]
    arguments = ["--corpus", str(notes), "--output_dir", "run", "--max_steps", "3", *sizes, *small, *quiet]
    run_python(clone, tmp_path, "-m", "hf_recurrent.cli.main", "pretrain", *arguments)
    assert (tmp_path / "run" / "checkpoint-3" / "model.safetensors").is_file()
    code = """
import sys
sys.modules["hf_recurrent"] = None  # importing it fails
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("run", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("run", trust_remote_code=True)
assert model(torch.tensor([tokenizer.encode("All work")])).logits.shape == (1, 8, 256)
"""
    run_python(tmp_path / "nowhere", tmp_path, "-c", code)


@pytest.mark.long
def test_the_wheel_and_the_editable_installation_hold_the_folders(clone, tmp_path):
    pytest.importorskip("setuptools", reason="builds with setuptools")
    build = "import setuptools.build_meta as build; print(build.{}('wheels', {{}}))"
    copy = shutil.copytree(clone, tmp_path / "copy")
    # Without a compiler, for speed: the kernels are optional.
    without_compiler = "import os; os.environ.update(CC='/absent', LDSHARED='/absent'); "
    for kind in ("build_wheel", "build_editable"):
        run_python(copy, copy, "-c", without_compiler + build.format(kind))
    wheel, editable = sorted(Path(copy, "wheels").glob("*.whl"), key=lambda path: "editable" in path.name)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"hf_recurrent/modeling/scan/linear_scan.py", "hf_recurrent/trainers/__init__.py"} <= names
    assert not {f"hf_recurrent/{name}" for name in LINKS} & names
    with zipfile.ZipFile(editable) as archive:
        (finder,) = (name for name in archive.namelist() if name.endswith("finder.py"))
        mapping = archive.read(finder).decode()
    assert all(f"'hf_recurrent.{name}': {str(copy / name)!r}" in mapping for name in LINKS)
