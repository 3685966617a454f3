# /// script
# requires-python = ">=3.11"
# dependencies = ["hf-recurrent[data]"]
#
# [tool.hf-jobs]
# flavor = "cpu-upgrade"
# timeout = "6h"
# secrets = ["HF_TOKEN"]
# ///
"""Pretrain a model in a job; model, card and the last checkpoint are pushed to the Hub every `--save_steps` steps.

    hf jobs uv run examples/jobs/pretrain.py you/my-model --corpus hub:roneneldan/TinyStories
    uv run examples/jobs/pretrain.py you/my-model --corpus my_files/ --save_steps 200

All arguments after the repository belong to `hf-recurrent pretrain`. A job that was stopped continues when the same
command runs again, on any machine: it begins with the last checkpoint in the repository.
"""

import argparse
import json
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError

from hf_recurrent.cli.main import main as hf_recurrent

LAST = "last-checkpoint"


def download_checkpoint(repo_id: str, output_dir: Path) -> Path | None:
    """The last checkpoint that an earlier job has pushed, below `output_dir`; None if there is none."""
    try:
        files = HfApi().list_repo_files(repo_id)
    except RepositoryNotFoundError:
        return None
    if f"{LAST}/trainer_state.json" not in files:
        return None
    folder = Path(snapshot_download(repo_id, allow_patterns=f"{LAST}/*", local_dir=output_dir / "download"), LAST)
    step = json.loads((folder / "trainer_state.json").read_text())["global_step"]
    return folder.replace(output_dir / f"checkpoint-{step}")


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo_id", help="repository of the model on the Hub, as owner/name; created if it is new")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/job"), help="directory on the machine of the job"
    )
    options, words = parser.parse_known_args()
    push = {"push_to_hub": "true", "hub_model_id": options.repo_id, "hub_strategy": "checkpoint"}
    flags = [word for name, value in push.items() for word in (f"--{name}", value)]
    if (checkpoint := download_checkpoint(options.repo_id, options.output_dir)) is not None:
        print(f"continuing from {checkpoint.name} of {options.repo_id}")
        flags += ["--resume_from_checkpoint", str(checkpoint)]
    hf_recurrent(["pretrain", "--output_dir", str(options.output_dir), *flags, *words])


if __name__ == "__main__":
    main()
