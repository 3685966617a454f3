"""Batches of sequences of different lengths."""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

_SEQUENCES = ("input_ids", "input_values")


def collate_sequences(items: Sequence[dict]) -> dict[str, torch.Tensor]:
    """Make a batch of the items of a dataset; the `data_collator` for `transformers.Trainer`.

    `input_ids` (T,) and `input_values` (T, channels) are padded with zeros on the right to the longest;
    `attention_mask` (B, T) int64 is 0 at the padding; `labels` and everything else are stacked.

    Raises:
        ValueError: no items, or items without a sequence.
    """
    present = [name for name in _SEQUENCES if items and name in items[0]]
    if not present:
        raise ValueError(f"`items` holds no sequence; it must hold dictionaries with one of {', '.join(_SEQUENCES)}.")
    batch = {
        name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in items[0] if name not in present
    }
    for name in present:
        batch[name] = pad_sequence([item[name] for item in items], batch_first=True)
    lengths = torch.tensor([len(item[present[0]]) for item in items])
    steps = torch.arange(int(lengths.max()))
    batch["attention_mask"] = (steps < lengths[:, None]).long()
    return batch
