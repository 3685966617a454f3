"""Log-probabilities of documents byte by byte, line by line or as a whole.

A document d_0 … d_{n-1} has the probabilities of d_1 … d_{n-1} and of the end byte, each given everything before it;
d_0 is given, as in [`evaluate_bits_per_byte`]. The end byte counts to the last line.
"""

import json
import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_recurrent.data.document_blocks import DocumentBlock, document_blocks
from hf_recurrent.data.documents import Document
from hf_recurrent.data.episode_losses import carried_token_losses, evaluation_mode
from hf_recurrent.data.token_encoding import TokenEncoding
from hf_recurrent.stock_models.with_state import with_state


def score_blocks(
    model: PreTrainedModel, documents: Iterable[Document], encoding: TokenEncoding, block_size: int = 1024
) -> Iterator[tuple[DocumentBlock, np.ndarray]]:
    """Yield the documents block by block with the log-probability of each target in nats, (T,) float64.

    The state is carried over whole documents, which may be of any length, in constant memory.

    Args:
        model: a recurrent language model; its mode is restored.
        documents: pairs (name, chunks of bytes), see `hf_recurrent.data.readers`.
        encoding: of bytes as token ids.
        block_size: T, bytes per block; it changes speed and memory, not the result (beyond rounding).

    Raises:
        TypeError: the model has no recurrent state.
        ValueError: a document cannot be encoded, or a probability is NaN.
    """
    model, blocks = with_state(model), []

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for block in document_blocks(documents, encoding, block_size):
            blocks.append(block)
            yield block.batch()

    with evaluation_mode(model), torch.inference_mode():
        for losses, _ in carried_token_losses(model, batches(), 1):
            block, scores = blocks.pop(), -losses[0].double().cpu().numpy()
            if not np.isfinite(scores).all():
                raise ValueError(f"A probability in {block.names[0]} is NaN or 0; the model's logits are not finite.")
            yield block, scores


class ByteRows:
    """A row of JSON for each byte: document, offset, byte, log_probability; the end byte has the offset n."""

    def rows(self, block: DocumentBlock, scores: np.ndarray) -> Iterator[str]:
        """The rows of a block."""
        names = _Names(block)
        columns = zip(
            block.inputs.tolist(), block.targets.tolist(), block.offsets.tolist(), scores.tolist(), strict=True
        )
        for token, target, offset, score in columns:
            name = names.at(offset)
            if not offset:
                yield f'{{"document": {name}, "offset": 0, "byte": {token}, "log_probability": null}}'
            if target >= 0:
                end = f'"offset": {offset + 1}, "byte": {target}, "log_probability": {_number(score)}'
                yield f'{{"document": {name}, {end}}}'


class SumRows:
    """A row of JSON for each line or document: its position, bytes, log_probability and bits_per_byte.

    Args:
        line_end: token id after which a line ends; None for whole documents.
    """

    def __init__(self, line_end: int | None = None) -> None:
        self._line_end = line_end
        self._line, self._offset, self._bytes, self._score = 1, 0, 0, 0.0

    def rows(self, block: DocumentBlock, scores: np.ndarray) -> Iterator[str]:
        """The rows of the lines or documents that end in a block."""
        names = _Names(block)
        # The score of a target belongs to the line that the target is in: the end byte to the last one.
        is_line_end = np.zeros(len(scores), dtype=bool) if self._line_end is None else block.inputs == self._line_end
        begin = 0
        for index in np.flatnonzero(block.ends | is_line_end).tolist():
            name = names.at(int(block.offsets[begin]))
            is_end = bool(block.ends[index])
            yield self._add(block, scores, begin, index + is_end, index + 1, name)
            if is_end:
                self._line, self._offset = 1, 0
            else:
                self._line, self._score = self._line + 1, float(scores[index])
                self._offset = int(block.offsets[index]) + 1
            begin = index + 1
        self._score += float(scores[begin:].sum())
        self._bytes += len(scores) - begin

    def _add(self, block: DocumentBlock, scores: np.ndarray, begin: int, score_end: int, end: int, name: str) -> str:
        """The row that ends before `end`, with the scores before `score_end`; then bytes and score are zero."""
        score = self._score + float(scores[begin:score_end].sum())
        size = self._bytes + end - begin
        self._bytes, self._score = 0, 0.0
        line = "" if self._line_end is None else f'"line": {self._line}, "offset": {self._offset}, '
        values = f'"log_probability": {_number(score)}, "bits_per_byte": {_number(-score / math.log(2) / size)}'
        return f'{{"document": {name}, {line}"bytes": {size}, {values}}}'


class _Names:
    """Names of the documents of a block, as JSON."""

    def __init__(self, block: DocumentBlock) -> None:
        self._names = iter(map(json.dumps, block.names))
        self._name: str | None = None

    def at(self, offset: int) -> str:
        """The name of the document in which the next position of interest has this offset."""
        if self._name is None or not offset:
            self._name = next(self._names)
        return self._name


def _number(value: float) -> str:
    """JSON of a number with nine digits, as many as a float32 has."""
    return f"{value + 0.0:.9g}"
