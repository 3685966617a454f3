"""`DocumentLearning`: a count memory learns the documents of many streams, in the order in which they are read.

Shape letters: B streams, T steps, V vocabulary (256).
"""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from .count_memory import CountMemory
from .count_memory_layout import Rates

_LEARNING = Rates(learns=True)
# Bytes of a running document that wait for its end: before, the memory must not know it, since mixing weights that see
# a document which is in the memory already learn to trust it too much.
_MOST_PENDING = 1 << 18


class DocumentLearning:
    """Streams from which a memory learns: a block after it was predicted, a document after it has ended.

    `tensors` are what the streams carry, by name.
    """

    def __init__(self, memory: CountMemory, num_streams: int):
        self.memory = memory
        self.tensors = {
            "state": memory.init_state(num_streams),
            "pending": torch.zeros(num_streams, _MOST_PENDING, dtype=torch.uint8),
            "used": torch.zeros(num_streams, dtype=torch.int64),
        }

    def read_ahead(self, documents: Iterable[np.ndarray], end_byte: int | None) -> None:
        """Count whole documents (T,), each with the end byte, without predicting them: some four times as fast.

        Mixing weights do not learn.
        """
        for document in documents:
            self.memory.insert(torch.from_numpy(document.astype(np.uint8)), end_byte)

    def read(self, block: Mapping[str, Tensor], network: Tensor | None = None) -> Tensor:
        """Predict a block and learn from it; returns the nats (B, T) of its targets.

        The block has `input_ids`, `shift_labels` and `reset_mask` (B, T); `network` are logits (B, T, V).
        """
        nats, _, _ = self.memory.read(
            block["input_ids"],
            self.tensors["state"],
            network,
            block["reset_mask"],
            targets=block["shift_labels"],
            rates=_LEARNING,
            pending=(self.tensors["pending"], self.tensors["used"]),
            in_place=True,
        )
        return nats

    def finish(self) -> None:
        """Count the documents that still run."""
        for pending, used in zip(self.tensors["pending"], self.tensors["used"].tolist(), strict=True):
            self.memory.insert(pending[:used])
        self.tensors["used"].zero_()
