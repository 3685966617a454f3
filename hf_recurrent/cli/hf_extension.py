"""`hf-recurrent hf-extension`: make the commands available as `hf recurrent ...`, an extension of the `hf` command.

`hf extensions install OWNER/hf-recurrent` does the same from GitHub, into an environment of its own.
"""

import argparse
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

import hf_recurrent
from hf_recurrent.cli.parsing import CommandParser, command

NAME = "recurrent"


def build_parser() -> argparse.ArgumentParser:
    return CommandParser(
        prog="hf-recurrent hf-extension",
        description="Make the commands of this installation available as `hf recurrent COMMAND ...`. "
        "`hf extensions list` shows it, `hf extensions remove recurrent` removes it.",
    )


def _register(arguments: argparse.Namespace) -> None:
    """Write the extension's manifest, with the command of this environment."""
    from huggingface_hub.cli.extensions import EXTENSIONS_ROOT, ExtensionManifest

    program = shutil.which("hf-recurrent", path=str(Path(sys.executable).parent))
    if program is None:
        raise FileNotFoundError(
            f"There is no program hf-recurrent next to {sys.executable}; install the package with pip first."
        )
    folder = EXTENSIONS_ROOT.expanduser() / f"hf-{NAME}"
    if folder.exists() and ExtensionManifest.load(folder).repo != "hf-recurrent":
        raise ValueError(f"Another extension is in {folder}; remove it with `hf extensions remove {NAME}`.")
    folder.mkdir(parents=True, exist_ok=True)
    ExtensionManifest(
        owner="local",
        repo="hf-recurrent",
        repo_id="local/hf-recurrent",
        short_name=NAME,
        executable_path=program,
        type="python",
        installed_at=datetime.now(UTC),
        description=f"Recurrent byte-level language models (hf-recurrent {hf_recurrent.__version__})",
    ).save(folder)
    print(f"hf {NAME} now runs {program}")


main = command(build_parser, _register)
