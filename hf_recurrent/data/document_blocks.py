"""Documents as blocks of one stream, read in their order, in constant memory, without a packed corpus."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hf_recurrent.data.documents import Document
from hf_recurrent.data.token_encoding import TokenEncoding
from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX


@dataclass
class DocumentBlock:
    """T tokens of one stream, in which documents follow each other.

    Args:
        names: (T,) of the document of each input.
        inputs: (T,) token ids.
        targets: (T,) the next token of the document, or the end id; -100 after the last one without an end id.
        offsets: (T,) offsets of the inputs in their documents; 0 is a reset.
        ends: (T,) bool, true where an input is the last of its document.
    """

    names: list[str]
    inputs: np.ndarray
    targets: np.ndarray
    offsets: np.ndarray
    ends: np.ndarray

    def batch(self) -> dict[str, torch.Tensor]:
        """The block as a batch of one row, with the keys of [`EvaluationStreams`]."""
        return {
            "input_ids": torch.from_numpy(self.inputs)[None],
            "shift_labels": torch.from_numpy(self.targets)[None],
            "reset_mask": torch.from_numpy(self.offsets == 0)[None],
            "attention_mask": torch.ones(1, len(self.inputs), dtype=torch.long),
        }


def document_blocks(
    documents: Iterable[Document], encoding: TokenEncoding, block_size: int
) -> Iterator[DocumentBlock]:
    """Cut documents into blocks of at most `block_size` tokens; empty documents are skipped.

    Args:
        documents: pairs (name, chunks of bytes).
        encoding: of bytes as token ids.
        block_size: T.

    Raises:
        ValueError: a document cannot be encoded.
    """
    pieces, filled = [], 0
    for name, inputs, targets, offset, is_last in _pairs(documents, encoding):
        begin = 0
        while begin < len(inputs):
            end = min(begin + block_size - filled, len(inputs))
            offsets = np.arange(offset + begin, offset + end)
            ends = np.zeros(end - begin, dtype=bool)
            ends[-1:] = is_last and end == len(inputs)
            pieces.append(([name] * (end - begin), inputs[begin:end], targets[begin:end], offsets, ends))
            filled, begin = filled + end - begin, end
            if filled == block_size:
                yield _joined(pieces)
                pieces, filled = [], 0
    if pieces:
        yield _joined(pieces)


def _pairs(
    documents: Iterable[Document], encoding: TokenEncoding
) -> Iterator[tuple[str, np.ndarray, np.ndarray, int, bool]]:
    """(name, inputs, targets, offset of the first input, whether the document ends) of each piece of a document."""
    after_last = IGNORE_INDEX if encoding.end_token_id is None else encoding.end_token_id
    for name, chunks in documents:
        waiting, offset = np.empty(0, dtype=np.int64), 0  # for its successor
        for chunk in chunks:
            ids = np.concatenate([waiting, encoding.encode(chunk, name)]).astype(np.int64)
            if len(ids) > 1:
                yield name, ids[:-1], ids[1:], offset, False
                offset += len(ids) - 1
            waiting = ids[-1:]
        if len(waiting):
            yield name, waiting, np.array([after_last]), offset, True


def _joined(pieces: list[tuple[list[str], np.ndarray, np.ndarray, np.ndarray, np.ndarray]]) -> DocumentBlock:
    names, *arrays = zip(*pieces, strict=True)
    return DocumentBlock([name for part in names for name in part], *map(np.concatenate, arrays))
