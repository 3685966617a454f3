"""Put onnxruntime-web and an exported checkpoint next to the page, in the folders onnxruntime/ and model/.

python prepare.py CHECKPOINT              # fetches onnxruntime-web with npm, 33 MB
python prepare.py CHECKPOINT --archive onnxruntime-web-1.30.0.tgz
"""

import argparse
import base64
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parent
VERSION = "1.30.0"
ARCHIVE = f"onnxruntime-web-{VERSION}.tgz"
INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="  # SHA-512
FILES = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
RUNTIME, MODEL = PAGE / "onnxruntime", PAGE / "model"


def install_runtime(archive: Path | None) -> None:
    """Unpack the files that the page needs into `onnxruntime/`, unless this version's are there.

    Raises:
        ValueError: the archive differs from its checksum.
        OSError: it cannot be read or fetched.
    """
    stamp = RUNTIME / "VERSION"
    if archive is None and stamp.is_file() and stamp.read_text().strip() == VERSION:
        return
    content = fetch_archive() if archive is None else archive.read_bytes()
    if base64.b64encode(hashlib.sha512(content).digest()).decode() != INTEGRITY:
        raise ValueError(f"{archive or ARCHIVE} differs from the checksum of onnxruntime-web {VERSION}.")
    RUNTIME.mkdir(exist_ok=True)
    stamp.unlink(missing_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as files:
        for name in FILES:
            (RUNTIME / name).write_bytes(files.extractfile(f"package/dist/{name}").read())
    stamp.write_text(VERSION + "\n")


def fetch_archive() -> bytes:
    """The package as npm fetches it, from the registry that npm is set to.

    Raises:
        OSError: npm is not installed or fails.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise OSError(f"npm is not installed; with {ARCHIVE} from another machine, use --archive.")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", f"onnxruntime-web@{VERSION}", "--silent", "--pack-destination", folder]
        print("fetching onnxruntime-web with npm", file=sys.stderr)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"`npm pack` failed: {done.stderr.strip() or done.returncode}")
        return Path(folder, ARCHIVE).read_bytes()


def export_model(checkpoint: str, quantize: str | None) -> None:
    """Export a checkpoint's step into `model/`, in place of an earlier one."""
    from hf_recurrent.cli.main import main as hf_recurrent

    new = PAGE / "model.new"
    shutil.rmtree(new, ignore_errors=True)
    try:
        options = ["--quantize", quantize] if quantize else []
        hf_recurrent(["export", checkpoint, "--format", "onnx", "--output_dir", os.fspath(new), *options])
        shutil.rmtree(MODEL, ignore_errors=True)
        new.rename(MODEL)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script with `argv`, by default the arguments of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", help="a language model of bytes; without it, onnxruntime-web only")
    parser.add_argument("--quantize", choices=["bfloat16", "int8"], help="type that large weights are stored in")
    parser.add_argument("--archive", type=Path, help=f"{ARCHIVE}, instead of fetching it")
    arguments = parser.parse_args(argv)
    try:
        install_runtime(arguments.archive)
    except (OSError, ValueError) as error:
        parser.error(f"onnxruntime-web is not installed: {error}")
    if arguments.checkpoint:
        export_model(arguments.checkpoint, arguments.quantize)
        print(f"Serve the page: python -m http.server --bind 127.0.0.1 --directory {PAGE}", file=sys.stderr)


if __name__ == "__main__":
    main()
