"""The run of `hf-recurrent score`: scores of the documents of files, as JSON lines."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_recurrent.checkpoints.files import atomic_file
from hf_recurrent.data.documents import Document, ReadOptions, Source
from hf_recurrent.data.episode_source import count_of, with_unit
from hf_recurrent.data.sources import known_bytes, resolve
from hf_recurrent.data.token_encoding import TokenEncoding
from hf_recurrent.evaluation.scores import ByteRows, SumRows, score_blocks

_PIECE = 1 << 16


@dataclass(frozen=True)
class ScoreOptions:
    """Options of a run, with the names and meanings of the command's flags."""

    per: str
    output: Path | None
    binary: bool
    block_size: int
    quiet: bool


def read_documents(files: Sequence[str], options: ReadOptions) -> tuple[Iterator[Document], int | None]:
    """The documents of all files in their order, and their bytes; None if these are not known before reading.

    Args:
        files: as for `load_corpus`, or - for standard input.
        options: of the files.
    """
    parts: list[Source] = []
    for name in files:
        if name == "-":
            parts.append(Source(None, lambda: iter([("-", _standard_input())])))
        else:
            parts += resolve(name, options)
    return (document for part in parts for document in part.documents()), known_bytes(parts)


def score_documents(
    options: ScoreOptions,
    documents: Iterable[Document],
    size: int | None,
    model: PreTrainedModel,
    tokenizer: Any,
) -> int:
    """Write a row for each byte, line or document; returns the number of bytes.

    Raises:
        OSError: the output cannot be written.
        ValueError: tokenizer, model and options do not go together.
    """
    encoding = TokenEncoding(tokenizer, options.binary)
    if encoding.vocab_size > model.config.vocab_size:
        raise ValueError(f"`MODEL` has {model.config.vocab_size} token ids; its tokenizer has {encoding.vocab_size}.")
    rows = _rows(options.per, encoding)
    count, read, nats = 0, 0, 0.0
    # On a terminal, rows and bar would be mixed.
    hidden = options.quiet or (options.output is None and sys.stdout.isatty())
    bar = tqdm(total=size, unit="B", unit_scale=True, desc="scoring", disable=hidden, dynamic_ncols=True)
    with _output(options.output) as file, bar:
        for block, scores in score_blocks(model, documents, encoding, options.block_size):
            file.writelines(f"{row}\n" for row in rows.rows(block, scores))
            count, read, nats = count + int(block.ends.sum()), read + len(scores), nats - float(scores.sum())
            bar.set_postfix_str(f"{nats / math.log(2) / read:.3f} bits per byte", refresh=False)
            bar.update(len(scores))
    if read and not options.quiet:
        words = f"{count_of(count, 'document')}, {with_unit(read, 'B')}: {nats / math.log(2) / read:.4f} bits per byte"
        print(words, file=sys.stderr)
    return read


def _rows(per: str, encoding: TokenEncoding) -> ByteRows | SumRows:
    if per == "byte":
        return ByteRows()
    if per == "document":
        return SumRows()
    try:
        (line_end,) = encoding.encode(b"\n", "a line end").tolist()
    except ValueError as error:
        raise ValueError(
            "`--per` is line, but the tokenizer of `MODEL` has no line ends; use byte or document."
        ) from error
    return SumRows(line_end)


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
