"""Train a model on continuous streams: `python scripts/pretrain.py`, `accelerate launch scripts/pretrain.py`."""

import sys

from hf_recurrent.cli.main import main

if __name__ == "__main__":
    main(["pretrain", *sys.argv[1:]])
