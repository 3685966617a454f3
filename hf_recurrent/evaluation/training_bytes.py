"""The bytes that a run on streams has read, in its order, so that other methods can read the same."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from hf_recurrent.checkpoints.records import Provenance
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.streams import MultiStreamDataset, unreached_documents


@dataclass(frozen=True)
class TrainingBytes:
    """The first steps of streams of a corpus.

    Args:
        corpus: the training documents.
        num_streams: B.
        block_size: T.
        seed: of the order of documents.
        steps: number of blocks of every stream.
        count_bytes: of other documents that a count memory read before, as in the arguments of the run.
        planned_steps: steps of the run as planned when these were chosen.
    """

    corpus: Corpus
    num_streams: int
    block_size: int
    seed: int
    steps: int
    count_bytes: float = 0.0
    planned_steps: int = 0

    @property
    def num_bytes(self) -> int:
        """Number of bytes, in all streams."""
        return self.num_streams * self.block_size * self.steps

    @cached_property
    def ahead(self) -> list[np.ndarray]:
        """The documents that a count memory read before the streams."""
        length = self.planned_steps * self.block_size
        indices = unreached_documents(self.corpus, self.num_streams, length, self.seed, self.count_bytes)
        return [self.corpus[index] for index in indices]

    @property
    def num_counted_bytes(self) -> int:
        """Number of bytes that a count memory has read."""
        return self.num_bytes + sum(map(len, self.ahead))

    def blocks(self) -> Iterator[dict[str, torch.Tensor]]:
        """The blocks in their order, with the keys of [`MultiStreamDataset`]."""
        dataset = MultiStreamDataset(self.corpus, self.num_streams, self.block_size, self.seed)
        for _, batch in zip(range(self.steps), dataset, strict=False):
            yield batch

    def documents(self) -> list[bytes]:
        """Documents that were read ahead, then others in the order of their ends, block by block; the last are cut."""
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
        return [document.tobytes() for document in self.ahead] + [document for _, document in sorted(found)]


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
    ahead = {name: settings[name] for name in ("count_bytes", "planned_steps") if name in settings}
    steps = phase.read // (streams * block_size)
    return TrainingBytes(corpus, streams, block_size, settings["data_seed"], steps, **ahead)
