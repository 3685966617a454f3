"""Train a model on continuous streams: `python scripts/pretrain.py`, `accelerate launch scripts/pretrain.py`."""

from hf_recurrent.cli.pretrain import main

if __name__ == "__main__":
    main()
