"""Time of loading a block as a share of the time of a stated, very fast training step.

python scripts/benchmark_data.py
"""

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from benchmarking import option_parser, shape_of
from torch.utils.data import DataLoader

from hf_recurrent import IIDDataset, MultiStreamDataset, load_corpus

SHAPES = ((1, 1), (1024, 1), (8, 2), (64, 8), (64, 128), (8, 1024), (1, 65536), (8, 65536))
DATASETS = {"multi_stream": MultiStreamDataset, "iid": IIDDataset}


def parse_arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--source", default="python", help="corpus, as load_corpus takes it (default: %(default)s)")
    shape = shape_of("BxT")
    parser.add_argument("--shapes", nargs="+", type=shape, default=SHAPES, metavar="BxT", help="for example 8x1024")
    parser.add_argument("--regimes", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="DataLoader workers (default: %(default)s)")
    parser.add_argument("--step-milliseconds", type=float, default=5.0, help="stated: the shortest step (default 5)")
    parser.add_argument("--training-rate", type=float, default=2.0, help="stated: MB/s of large steps (default 2)")
    return parser.parse_args()


def seconds_per_call(call: Callable[[], object], seconds: float) -> float:
    """Mean time of a call, after one warm-up call."""
    call()
    count, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds or not count:
        call()
        count += 1
    return elapsed / count


def main() -> None:
    arguments = parse_arguments()
    corpus = load_corpus(arguments.source)
    stated = f"{arguments.step_milliseconds} ms, and {arguments.training_rate} MB/s if that is longer"
    print(f"training step: stated as {stated}")
    print(f"{corpus}, {arguments.workers} DataLoader workers")
    print(f"{'regime':>12} {'B':>5} {'T':>6} {'loading MB/s':>13} {'ms/block':>9} {'training ms':>12} {'share':>7}")
    for regime in arguments.regimes:
        for num_streams, block_size in arguments.shapes:
            dataset = DATASETS[regime](corpus, num_streams, block_size)
            batches: Iterator[dict[str, torch.Tensor]] = iter(
                DataLoader(dataset, batch_size=None, num_workers=arguments.workers)
            )
            loading = seconds_per_call(lambda batches=batches: next(batches), arguments.seconds)
            size = num_streams * block_size
            step = max(arguments.step_milliseconds / 1e3, size / arguments.training_rate / 1e6)
            print(
                f"{regime:>12} {num_streams:>5} {block_size:>6} {size / loading / 1e6:>13.2f} {loading * 1e3:>9.3f} "
                f"{step * 1e3:>12.2f} {loading / step:>7.2%}"
            )


if __name__ == "__main__":
    main()
