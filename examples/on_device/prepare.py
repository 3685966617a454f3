"""Put a learner's C files and its weights, as a C array, into an example's folder.

python prepare.py arduino              # a small model of bytes, which knows nothing
python prepare.py esp-idf CHECKPOINT   # one that was trained
python prepare.py arduino --inputs 1   # a learner of one sensor
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hf_recurrent.cli.main import main as hf_recurrent

HERE = Path(__file__).resolve().parent
FOLDERS = {"arduino": HERE / "arduino" / "on_device_learner", "esp-idf": HERE / "esp-idf" / "main"}
NEW = ["memora-tiny", "--optim", "rmsprop", "--learning_rate", "3e-3"]
NEW += ["--config_overrides", "hidden_size=16", "state_size=16", "num_hidden_layers=1"]


def as_array(content: bytes) -> str:
    """A C header with bytes in read-only memory."""
    rows = [", ".join(map(str, content[at : at + 24])) for at in range(0, len(content), 24)]
    body = ",\n    ".join(rows)
    return f"static const unsigned char model_weights[{len(content)}] = {{\n    {body},\n}};\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script with `argv`, by default the arguments of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=FOLDERS)
    parser.add_argument("checkpoint", nargs="?", help="a language model of bytes; by default a new one")
    parser.add_argument("--inputs", type=int, help="number of measurements of a new model, used instead")
    parser.add_argument("--output_dir", type=Path, help="instead of the example's folder")
    arguments = parser.parse_args(argv)
    if arguments.inputs is not None and arguments.checkpoint is not None:
        parser.error("--inputs makes a new model; leave out CHECKPOINT.")
    export = [arguments.checkpoint] if arguments.checkpoint else NEW
    if arguments.inputs is not None:
        export = ["--inputs", str(arguments.inputs), "--learning_rate", "3e-3"]
    target = arguments.output_dir or FOLDERS[arguments.example]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "learner")
        hf_recurrent(["export", *export, "--format", "c", "--learn", "--output_dir", os.fspath(folder)])
        for name in ("model.c", "model.h"):
            shutil.copy(folder / name, target / name)
        (target / "model_weights.h").write_text(as_array((folder / "model.weights").read_bytes()))
    print(f"{target}: model.c, model.h, model_weights.h", file=sys.stderr)


if __name__ == "__main__":
    main()
