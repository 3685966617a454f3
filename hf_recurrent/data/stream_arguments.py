"""The arguments that all kinds of streams share, checked before anything is read."""

from collections.abc import Sequence

import numpy as np
from torch.utils.data import get_worker_info


def check_count(name: str, value: int) -> int:
    """`value` if it is an integer of at least 1, otherwise a ValueError."""
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ValueError(f"{name} is {value}, allowed is an integer of at least 1")
    return int(value)


def stream_groups(
    num_streams: int, stream_indices: Sequence[int] | np.ndarray | None, accumulation_groups: int
) -> list[np.ndarray]:
    """The streams of this process, int64, as `accumulation_groups` micro-batches.

    Raises:
        ValueError: an index outside 0..num_streams-1 or twice, or a number that does not divide.
    """
    indices = np.arange(num_streams) if stream_indices is None else np.asarray(stream_indices)
    if indices.ndim != 1 or not len(indices) or indices.dtype.kind not in "iu":
        raise ValueError(f"stream_indices is {stream_indices}, allowed is a list of at least one integer")
    if indices.min() < 0 or indices.max() >= num_streams or len(np.unique(indices)) != len(indices):
        raise ValueError(f"stream_indices is {stream_indices}, allowed are different integers below {num_streams}")
    if len(indices) % accumulation_groups:
        raise ValueError(
            f"accumulation_groups is {accumulation_groups}, which does not divide the {len(indices)} streams"
        )
    return np.split(indices.astype(np.int64), accumulation_groups)


def stream_positions(num_streams: int, positions: object, needed: np.ndarray) -> np.ndarray:
    """The positions (number, offset) at which the streams `needed` begin: (len(needed), 2) int64.

    Args:
        positions: `None` for the beginning; an array or tensor (num_streams, 2) by stream; or a dictionary from
            stream to its pair, where streams that are not needed may be absent.

    Raises:
        ValueError: another shape, a missing stream, or a negative number.
    """
    if positions is None:
        return np.zeros((len(needed), 2), dtype=np.int64)
    if isinstance(positions, dict):
        by_stream = {int(stream): pair for stream, pair in positions.items()}
        missing = [int(stream) for stream in needed if int(stream) not in by_stream]
        if missing:
            raise ValueError(f"positions has no entry for stream {missing[0]}; it has {len(by_stream)} entries")
        chosen = np.stack([np.asarray(by_stream[int(stream)]) for stream in needed])
        if chosen.shape != (len(needed), 2):
            raise ValueError("positions has an entry that is not a pair (number, offset)")
    else:
        array = np.asarray(positions)
        if array.shape != (num_streams, 2):
            raise ValueError(f"positions has shape {array.shape}, allowed is ({num_streams}, 2)")
        chosen = array[needed]
    if chosen.dtype.kind not in "iu" or chosen.min() < 0:
        raise ValueError("positions holds something other than integers of at least 0")
    return chosen.astype(np.int64)


def worker_share() -> tuple[int, int]:
    """(number of this DataLoader worker, number of workers); (0, 1) outside of one. Worker w makes the batches
    w, w + W, w + 2W, …: the DataLoader takes from them in turn, so the order is that of no workers."""
    worker = get_worker_info()
    return (0, 1) if worker is None else (worker.id, worker.num_workers)
