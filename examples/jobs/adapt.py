# /// script
# requires-python = ">=3.11"
# dependencies = ["hf-recurrent[data,peft]"]
#
# [tool.hf-jobs]
# flavor = "cpu-upgrade"
# timeout = "2h"
# secrets = ["HF_TOKEN"]
# ///
"""Adapt a model to a folder of your own text in a job, and push the result to the Hub.

    hf jobs uv run -v hf://datasets/you/notes:/text examples/jobs/adapt.py you/my-model you/my-notes /text
    uv run examples/jobs/adapt.py you/my-model you/my-notes notes/ --how lora

`--how` is `all` (train all weights), `lora` (train an adapter, which alone is pushed), or `read` (read the text once
and learn from every byte). Further arguments are of `hf-recurrent pretrain`, or `hf-recurrent learn` for `read`.
"""

import argparse
from pathlib import Path

from hf_recurrent.cli.main import main as hf_recurrent


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the model to begin with: owner/name on the Hub, or a directory")
    parser.add_argument("repo_id", help="repository of the result, as owner/name; created if it is new")
    parser.add_argument("text", type=Path, help="folder of text files")
    parser.add_argument("--how", choices=["all", "lora", "read"], default="all")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/adapted"), help="directory on this machine")
    options, words = parser.parse_known_args()
    base = [] if Path(options.model).exists() else ["--base_model", options.model]
    output = ["--output_dir", str(options.output_dir)]
    if options.how == "read":
        stream = options.output_dir.with_suffix(".txt")  # all files as one stream
        stream.parent.mkdir(parents=True, exist_ok=True)
        files = sorted(path for path in options.text.rglob("*") if path.is_file())
        stream.write_bytes(b"\n".join(path.read_bytes() for path in files))
        settings = ["--stride", "16", "--learning_rate", "1e-4"]
        hf_recurrent(["learn", options.model, "--source", str(stream), *output, *settings, *words])
    else:
        rate = ["--learning_rate", "1e-3"] if options.how == "all" else ["--learning_rate", "3e-3", "--lora_rank", "8"]
        flags = ["--recipe", "none", "--model", options.model, "--corpus", str(options.text), *output, *rate]
        hf_recurrent(["pretrain", *flags, *words])
    hf_recurrent(["push-to-hub", str(options.output_dir), options.repo_id, *base])


if __name__ == "__main__":
    main()
