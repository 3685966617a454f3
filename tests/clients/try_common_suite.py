"""Run transformers' common test suite of models with ours.

    python tests/clients/try_common_suite.py                             # pip fetches the installed version's source
    python tests/clients/try_common_suite.py --archive transformers-5.23.0.tar.gz
    python tests/clients/try_common_suite.py --tests ~/transformers/tests -- -k Hawk   # of a clone, with generation

Arguments after `--` are pytest's. The suite needs the packages pytest and parameterized.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

CASES = Path(__file__).with_name("common_suite.py")
# Modules that a source distribution lacks → the class that is imported from them.
LACKING = {"exporters/test_export.py": "ExportTesterMixin", "generation/test_utils.py": "GenerationTesterMixin"}


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", type=Path, help="source distribution of transformers")
    parser.add_argument("--tests", type=Path, help="folder `tests` of a clone of transformers")
    parser.add_argument("words", nargs="*", metavar="ARGUMENT", help="arguments of pytest")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="common-suite-") as folder:
        work = Path(folder)
        tests = work / "tests"
        if options.tests is not None:
            shutil.copytree(options.tests, tests)
        else:
            extract(options.archive or fetch(work), work)
        for name, mixin in LACKING.items():
            if not (tests / name).exists():
                (tests / name).parent.mkdir(exist_ok=True)
                (tests / name).write_text(f"class {mixin}:\n    pass\n", encoding="utf-8")
        for package in (tests, *(tests / name for name in LACKING)):
            (package if package.is_dir() else package.parent).joinpath("__init__.py").touch()
        shutil.copy(CASES, work / "test_ours.py")
        environment = os.environ | {"PYTHONPATH": folder, "HF_HUB_OFFLINE": "1", "OUR_ROOT": str(CASES.parents[2])}
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:warnings", "test_ours.py", *options.words]
        raise SystemExit(subprocess.run(command, cwd=work, env=environment).returncode)


def fetch(folder: Path) -> Path:
    """Let pip download the source distribution of the installed version."""
    words = ["--quiet", "--no-deps", "--no-binary", ":all:", f"transformers=={version('transformers')}"]
    subprocess.run([sys.executable, "-m", "pip", "download", *words, "--dest", str(folder)], check=True)
    return next(folder.glob("transformers-*.tar.gz"))


def extract(archive: Path, folder: Path) -> None:
    """Write the archive's folder `tests` to `folder/tests`."""
    with tarfile.open(archive) as file:
        for member in file.getmembers():
            parts = Path(member.name).parts
            if len(parts) > 2 and parts[1] == "tests" and member.isfile():
                member.name = str(Path(*parts[1:]))
                file.extract(member, folder, filter="data")


if __name__ == "__main__":
    main()
