"""The bytes that a run on streams has read, in its order, so that other methods can read the same."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hf_recurrent.checkpoints.records import Provenance
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.streams import MultiStreamDataset


@dataclass(frozen=True)
class TrainingBytes:
    """The first steps of streams of a corpus.

    Args:
        corpus: the training documents.
        num_streams: B.
        block_size: T.
        seed: of the order of documents.
        steps: number of blocks of every stream.
    """

    corpus: Corpus
    num_streams: int
    block_size: int
    seed: int
    steps: int

    @property
    def num_bytes(self) -> int:
        """Number of bytes, in all streams."""
        return self.num_streams * self.block_size * self.steps

    def blocks(self) -> Iterator[dict[str, torch.Tensor]]:
        """The blocks in their order, with the keys of [`MultiStreamDataset`]."""
        dataset = MultiStreamDataset(self.corpus, self.num_streams, self.block_size, self.seed)
        for _, batch in zip(range(self.steps), dataset, strict=False):
            yield batch

    def documents(self) -> list[bytes]:
        """The documents in the order of their ends, block by block; those that still run after the last are cut."""
        # Long blocks of the same streams, which are read faster.
        length = self.block_size * self.steps
        size = min(length, 1 << 14)
        dataset = MultiStreamDataset(self.corpus, self.num_streams, size, self.seed)
        batches = [batch for _, batch in zip(range(math.ceil(length / size)), dataset, strict=False)]
        tokens = torch.cat([batch["input_ids"] for batch in batches], 1)[:, :length].numpy()
        resets = torch.cat([batch["reset_mask"] for batch in batches], 1)[:, :length].numpy()
        tokens = tokens.astype(self.corpus.store.dtype)
        found = []
        for stream in range(self.num_streams):
            borders = np.union1d(np.flatnonzero(resets[stream]), [0, length]).tolist()
            for begin, end in itertools.pairwise(borders):
                found.append(((end // self.block_size, stream, end), tokens[stream, begin:end].tobytes()))
        return [document for _, document in sorted(found)]


def bytes_read(provenance: Provenance, corpus: Corpus) -> TrainingBytes | str:
    """The bytes that a model with this record of training has read, or a sentence that says why they are not known."""
    if len(provenance.phases) != 1 or provenance.phases[0].base is not None or provenance.gaps:
        return "the model was not trained in a single recorded phase."
    phase = provenance.phases[0]
    if [data.fingerprint for data in phase.data] != [corpus.fingerprint]:
        return "the model was trained on other data than the training part of this corpus."
    settings = phase.segments[-1].settings
    if settings.get("regime") != "multi_stream" or not {"streams", "block_size", "data_seed"} <= settings.keys():
        return "the model was not trained on streams."
    streams, block_size = settings["streams"], settings["block_size"]
    return TrainingBytes(corpus, streams, block_size, settings["data_seed"], phase.read // (streams * block_size))
