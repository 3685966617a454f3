"""Put a learner of bytes, compiled to WebAssembly, next to the page: learner.wasm and learner.weights.

python prepare.py                      # a small model, which knows nothing
python prepare.py CHECKPOINT           # one that was trained

The compiler is clang with wasi-libc and lld (Debian: clang lld wasi-libc libclang-rt-14-dev-wasm32), or zig: pip
install ziglang.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parent
NEW = ("memora-tiny", "--optim", "rmsprop", "--learning_rate", "3e-3")
NEW += ("--config_overrides", "hidden_size=24", "state_size=24", "num_hidden_layers=1")
TARGET = ("--target=wasm32-wasi", "-mexec-model=reactor")
FLAGS = ("-std=c99", "-O3", "-fno-math-errno", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wl,--no-entry")


def compilers() -> list[list[str]]:
    """Commands that may compile to WebAssembly."""
    found = [[clang] for clang in filter(None, [shutil.which("clang")])]
    if importlib.util.find_spec("ziglang") is not None:
        found.append([sys.executable, "-m", "ziglang", "cc"])
    return found


def compile_page(folder: Path, target: Path) -> None:
    """Compile an exported learner with the page's functions.

    Raises:
        OSError: no compiler is installed, or none works; the text has its message.
    """
    messages = []
    for compiler in compilers():
        command = [*compiler, *TARGET, *FLAGS, "-I", os.fspath(folder), os.fspath(PAGE / "page.c")]
        command += [os.fspath(folder / "model.c"), "-o", os.fspath(target), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return
        messages.append(f"{compiler[-1]}: {done.stderr.strip()[-500:]}")
    raise OSError("; ".join(messages) or "clang with wasi-libc, or zig, is missing: pip install ziglang")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script with `argv`, by default the arguments of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", help="a language model of bytes; by default a new one")
    parser.add_argument("--output_dir", type=Path, default=PAGE, help="by default the folder of the page")
    arguments = parser.parse_args(argv)
    from hf_recurrent.cli.main import main as hf_recurrent

    export = [arguments.checkpoint] if arguments.checkpoint else NEW
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "learner")
        hf_recurrent(["export", *export, "--format", "c", "--learn", "--output_dir", os.fspath(folder)])
        try:
            compile_page(folder, arguments.output_dir / "learner.wasm")
        except OSError as error:
            parser.error(f"the learner was not compiled: {error}")
        shutil.copy(folder / "model.weights", arguments.output_dir / "learner.weights")
    print(
        f"Serve the page: python -m http.server --bind 127.0.0.1 --directory {arguments.output_dir}", file=sys.stderr
    )


if __name__ == "__main__":
    main()
