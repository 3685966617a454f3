"""Log-probabilities of documents byte by byte, line by line or as a whole, and the run of `hf-recurrent score`.

A document d_0 … d_{n-1} has the probabilities of d_1 … d_{n-1} and of the end byte, each given everything before it;
d_0 is given, as in [`evaluate_bits_per_byte`]. The end byte counts to the last line.
"""

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_recurrent.checkpoints.atomic_files import atomic_file
from hf_recurrent.data.documents import Document, ReadOptions, Source
from hf_recurrent.data.episode_losses import carried_token_losses, evaluation_mode
from hf_recurrent.data.quantities import count_of, with_unit
from hf_recurrent.data.sources import known_bytes, resolve
from hf_recurrent.data.token_encoding import TokenEncoding
from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.stock_models.with_state import with_state

_PIECE = 1 << 16


class DocumentBlock(NamedTuple):
    """T tokens of one stream, in which documents follow each other; all are (T,)."""

    names: np.ndarray  # of the document of each input
    inputs: np.ndarray  # token ids
    targets: np.ndarray  # the next token of the document, or the end id; -100 after the last one without an end id
    offsets: np.ndarray  # of the inputs in their documents; 0 is a reset
    ends: np.ndarray  # true where an input is the last of its document


def document_blocks(
    documents: Iterable[Document], encoding: TokenEncoding, block_size: int
) -> Iterator[DocumentBlock]:
    """Cut documents into blocks of at most `block_size` tokens; empty documents are skipped."""
    parts, count = [], 0
    for piece in _pieces(documents, encoding):
        parts.append(piece)
        count += len(piece.inputs)
        if count < block_size:
            continue
        joined = [np.concatenate(columns) for columns in zip(*parts, strict=True)]
        for begin in range(0, count - block_size + 1, block_size):
            yield DocumentBlock(*(column[begin : begin + block_size] for column in joined))
        count %= block_size
        parts = [DocumentBlock(*(column[len(column) - count :] for column in joined))]
    if count:
        yield DocumentBlock(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _pieces(documents: Iterable[Document], encoding: TokenEncoding) -> Iterator[DocumentBlock]:
    def piece(inputs: np.ndarray, targets: np.ndarray, is_end: bool) -> DocumentBlock:
        offsets = np.arange(offset, offset + len(inputs))
        names, ends = np.full(len(inputs), name, object), np.full(len(inputs), is_end)
        return DocumentBlock(names, inputs, targets, offsets, ends)

    after_last = IGNORE_INDEX if encoding.end_token_id is None else encoding.end_token_id
    for name, chunks in documents:
        waiting, offset = np.empty(0, dtype=np.int64), 0  # for its successor
        for chunk in chunks:
            ids = np.concatenate([waiting, encoding.encode(chunk, name)]).astype(np.int64)
            if len(ids) > 1:
                yield piece(ids[:-1], ids[1:], False)
                offset += len(ids) - 1
            waiting = ids[-1:]
        if len(waiting):
            yield piece(waiting, np.array([after_last]), True)


def score_blocks(
    model: PreTrainedModel, documents: Iterable[Document], encoding: TokenEncoding, block_size: int = 1024
) -> Iterator[tuple[DocumentBlock, np.ndarray]]:
    """Yield the documents block by block with the log-probability of each target in nats, (T,) float64.

    The state is carried over whole documents, which may be of any length, in constant memory. The block size changes
    speed and memory, not the result (beyond rounding). The model's mode is restored.
    """
    model, blocks = with_state(model), []

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for block in document_blocks(documents, encoding, block_size):
            blocks.append(block)
            batch = {"input_ids": block.inputs, "shift_labels": block.targets, "reset_mask": block.offsets == 0}
            batch["attention_mask"] = np.ones_like(block.inputs)
            yield {name: torch.from_numpy(values)[None] for name, values in batch.items()}

    with evaluation_mode(model), torch.inference_mode():
        for losses in carried_token_losses(model, batches(), 1):
            block, scores = blocks.pop(), -losses.nats[0].double().cpu().numpy()
            if not np.isfinite(scores).all():
                raise ValueError(f"A probability in {block.names[0]} is NaN or 0; the model's logits are not finite.")
            yield block, scores


def byte_rows(block: DocumentBlock, scores: np.ndarray) -> Iterator[str]:
    """A row of JSON for each byte: document, offset, byte, log_probability; the end byte has the offset n."""
    columns = (block.names, block.inputs, block.targets, block.offsets, scores)
    for name, token, target, offset, score in zip(*(column.tolist() for column in columns), strict=True):
        document = _json(name)
        if not offset:
            yield f'{{"document": {document}, "offset": 0, "byte": {token}, "log_probability": null}}'
        if target >= 0:
            end = f'"offset": {offset + 1}, "byte": {target}, "log_probability": {_number(score)}'
            yield f'{{"document": {document}, {end}}}'


class SumRows:
    """A row of JSON for each line or document: its position, bytes, log_probability and bits_per_byte.

    A line ends after the token id `line_end`; None is for whole documents.
    """

    def __init__(self, line_end: int | None = None) -> None:
        self._line_end = line_end
        self._line, self._offset, self._bytes, self._score = 1, 0, 0, 0.0

    def rows(self, block: DocumentBlock, scores: np.ndarray) -> Iterator[str]:
        """The rows of what ends in a block."""
        # The score of a target belongs to the line that the target is in: the end byte to the last one.
        is_line_end = np.zeros(len(scores), dtype=bool) if self._line_end is None else block.inputs == self._line_end
        begin = 0
        for index in np.flatnonzero(block.ends | is_line_end).tolist():
            is_end = bool(block.ends[index])
            yield self._add(block, scores, begin, index + is_end, index + 1)
            if is_end:
                self._line, self._offset = 1, 0
            else:
                self._line, self._score = self._line + 1, float(scores[index])
                self._offset = int(block.offsets[index]) + 1
            begin = index + 1
        self._score += float(scores[begin:].sum())
        self._bytes += len(scores) - begin

    def _add(self, block: DocumentBlock, scores: np.ndarray, begin: int, score_end: int, end: int) -> str:
        """The row that ends before `end`, with the scores before `score_end`; then bytes and score are zero."""
        score = self._score + float(scores[begin:score_end].sum())
        size = self._bytes + end - begin
        self._bytes, self._score = 0, 0.0
        line = "" if self._line_end is None else f'"line": {self._line}, "offset": {self._offset}, '
        values = f'"log_probability": {_number(score)}, "bits_per_byte": {_number(-score / math.log(2) / size)}'
        return f'{{"document": {_json(block.names[begin])}, {line}"bytes": {size}, {values}}}'


_json = lru_cache(json.dumps)  # of names, which rows repeat


def _number(value: float) -> str:
    """JSON of a number with nine digits, as many as a float32 has."""
    return f"{value + 0.0:.9g}"


def read_documents(files: Sequence[str], options: ReadOptions) -> tuple[Iterator[Document], int | None]:
    """The documents of all files, as for `load_corpus`, or - for standard input, and their bytes if they are known."""
    parts: list[Source] = []
    for name in files:
        if name == "-":
            parts.append(Source(None, lambda: iter([("-", _standard_input())])))
        else:
            parts += resolve(name, options)
    return (document for part in parts for document in part.documents()), known_bytes(parts)


def score_documents(
    documents: Iterable[Document],
    size: int | None,
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    per: str,
    output: Path | None,
    binary: bool,
    block_size: int,
    quiet: bool,
) -> int:
    """Write a row for each byte, line or document, with the command's flags; returns the number of bytes."""
    encoding = TokenEncoding(tokenizer, binary)
    if encoding.vocab_size > model.config.vocab_size:
        raise ValueError(f"`MODEL` has {model.config.vocab_size} token ids; its tokenizer has {encoding.vocab_size}.")
    rows = _rows(per, encoding)
    count, read, nats = 0, 0, 0.0
    # On a terminal, rows and bar would be mixed.
    hidden = quiet or (output is None and sys.stdout.isatty())
    bar = tqdm(total=size, unit="B", unit_scale=True, desc="scoring", disable=hidden, dynamic_ncols=True)
    with _output(output) as file, bar:
        for block, scores in score_blocks(model, documents, encoding, block_size):
            file.writelines(f"{row}\n" for row in rows(block, scores))
            count, read, nats = count + int(block.ends.sum()), read + len(scores), nats - float(scores.sum())
            bar.set_postfix_str(f"{nats / math.log(2) / read:.3f} bits per byte", refresh=False)
            bar.update(len(scores))
    if read and not quiet:
        words = f"{count_of(count, 'document')}, {with_unit(read, 'B')}: {nats / math.log(2) / read:.4f} bits per byte"
        print(words, file=sys.stderr)
    return read


def _rows(per: str, encoding: TokenEncoding) -> Callable[[DocumentBlock, np.ndarray], Iterator[str]]:
    if per == "byte":
        return byte_rows
    if per == "document":
        return SumRows().rows
    try:
        (line_end,) = encoding.encode(b"\n", "a line end").tolist()
    except ValueError as error:
        raise ValueError(
            "`--per` is line, but the tokenizer of `MODEL` has no line ends; use byte or document."
        ) from error
    return SumRows(line_end).rows


def _standard_input() -> Iterator[bytes]:
    """The bytes of standard input as they arrive."""
    while piece := sys.stdin.buffer.read1(_PIECE):
        yield piece


@contextmanager
def _output(path: Path | None) -> Iterator[IO[str]]:
    """Standard output, or a temporary file that is renamed at the end."""
    if path is None:
        yield sys.stdout
        sys.stdout.flush()
        return
    with atomic_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        yield file
