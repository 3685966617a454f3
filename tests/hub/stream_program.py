"""Run by test_hub_streaming.py: a run over a streamed dataset that is cut off and continued by other processes."""

import sys
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from hf_recurrent import load_corpus

STREAMS, T, CUT, END = 4, 16, 9, 30


def read(corpus, workers, positions, count, streams=range(STREAMS)):
    """The next blocks of some streams, and the positions of all after them (those of others are not known)."""
    blocks = corpus.blocks(STREAMS, T, stream_indices=list(streams), positions=positions)
    batches = list(islice(DataLoader(blocks, batch_size=None, num_workers=workers), count))
    after = np.zeros((STREAMS, 2), dtype=np.int64)
    after[batches[-1]["stream_indices"].numpy()] = batches[-1]["stream_positions"].numpy()
    return {key: torch.cat([batch[key] for batch in batches], 1) for key in ("input_ids", "reset_mask")}, after


def main(work: Path) -> None:
    def stream(folder):
        return load_corpus("hub:tester/stories", streaming=True, cache_dir=work / folder)

    corpus = stream("first")
    assert len(corpus) == 180 and corpus[61].tobytes() == b"shard 1, story 1 and so on"
    whole, _ = read(corpus, 0, None, END)
    before, positions = read(corpus, 2, None, CUT)
    assert positions[:, 1].any()  # within an episode
    # Another machine: it streams the dataset again. Two processes with two workers and with one.
    corpus = stream("second")
    parts = [
        read(corpus, workers, positions, END - CUT, streams)[0] for workers, streams in ((2, (0, 1)), (1, (2, 3)))
    ]
    for key, wanted in whole.items():
        assert torch.equal(torch.cat([before[key], torch.cat([part[key] for part in parts])], 1), wanted), key
    print("continued at the very episode")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
