"""`hf-recurrent score MODEL FILE ...`: the log-probability of every byte, line or document, as JSON lines."""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from hf_recurrent.cli.data_arguments import TASK_PREFIX
from hf_recurrent.cli.loading import add_loading_arguments, check_byte_tokenizer, load_model_and_tokenizer
from hf_recurrent.cli.parsing import CommandParser, check_at_least, check_parent, run_command
from hf_recurrent.cli.threads import add_threads_argument, use_threads

if TYPE_CHECKING:
    from hf_recurrent.data.documents import Document
    from hf_recurrent.data.token_encoding import TokenEncoding
    from hf_recurrent.evaluation.scores import ByteRows, SumRows

_PIECE = 1 << 16
_UNITS = ("byte", "line", "document")


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = CommandParser(
        prog="hf-recurrent score",
        description="Measure the log-probability (natural logarithm) of every byte, line or\n"
        "document, given everything before it in its document. Results are JSON lines on\n"
        "standard output, everything else is printed to standard error.",
        epilog="examples:\n"
        "  hf-recurrent score runs/hawk book.txt notes/\n"
        "  hf-recurrent score runs/hawk server.log --per line --output scores.jsonl\n"
        "  zcat logs.gz | hf-recurrent score runs/hawk - --per line | sort\n\n"
        "As in evaluate, the first byte of a document is given and has no probability.\n"
        "The end byte counts to the document and its last line.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_loading_arguments(parser)
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="files, directories, globs or hub:owner/name, as for pretrain --corpus; - for standard input",
    )
    parser.add_argument("--per", choices=_UNITS, default="document", help="unit of a result (default: document)")
    parser.add_argument("--output", type=Path, help="write the results to this file, which is complete or absent")
    parser.add_argument("--text_column", default="text", help="column with the text in JSONL, Parquet and datasets")
    parser.add_argument("--dataset_split", default="train", help="split of a dataset to read")
    parser.add_argument("--dataset_config", help="configuration of a Hub dataset")
    parser.add_argument("--streaming", action="store_true", help="stream a Hub dataset instead of downloading it")
    parser.add_argument("--binary", action="store_true", help="byte 0 is data; documents have no end byte")
    parser.add_argument("--block_size", type=int, default=1024, help="bytes per forward pass (default: 1024)")
    add_threads_argument(parser)
    parser.add_argument("--quiet", action="store_true", help="hide progress and the summary")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with `argv`, by default the arguments of the process."""
    run_command(build_parser(), argv, _score)


def _score(arguments: argparse.Namespace) -> None:
    check_at_least(1, arguments, "block_size")
    check_parent("--output", arguments.output)
    if arguments.output is not None and arguments.output.is_dir():
        raise IsADirectoryError(f"`--output` is {str(arguments.output)!r}; it must be a file, not a directory.")
    if arguments.files.count("-") > 1:
        raise ValueError("`FILE` is - more than once; standard input can be read only once.")
    from hf_recurrent.data.token_encoding import TokenEncoding

    documents, size = _documents(arguments)
    model, tokenizer = load_model_and_tokenizer(arguments)

    from tqdm.auto import tqdm

    from hf_recurrent.data.episode_source import count_of, with_unit
    from hf_recurrent.evaluation.scores import score_blocks
    from hf_recurrent.modeling.block.recurrent_state import supports_recurrent_state
    from hf_recurrent.stock_models.with_state import with_state

    check_byte_tokenizer("MODEL", arguments.model, tokenizer)
    if not supports_recurrent_state(with_state(model)):
        raise ValueError(
            f"`MODEL` is {arguments.model!r}, a {type(model).__name__} without a recurrent state; for windows of "
            "other models, use evaluate."
        )
    encoding = TokenEncoding(tokenizer, arguments.binary)
    if encoding.vocab_size > model.config.vocab_size:
        raise ValueError(f"`MODEL` has {model.config.vocab_size} token ids; its tokenizer has {encoding.vocab_size}.")
    rows = _rows(arguments, encoding)
    use_threads(arguments.threads, quiet=arguments.quiet)
    count, read, nats = 0, 0, 0.0
    # On a terminal, rows and bar would be mixed.
    hidden = arguments.quiet or (arguments.output is None and sys.stdout.isatty())
    bar = tqdm(total=size, unit="B", unit_scale=True, desc="scoring", disable=hidden, dynamic_ncols=True)
    with _output(arguments.output) as file, bar:
        for block, scores in score_blocks(model, documents, encoding, arguments.block_size):
            file.writelines(f"{row}\n" for row in rows.rows(block, scores))
            count, read, nats = count + int(block.ends.sum()), read + len(scores), nats - float(scores.sum())
            bar.set_postfix_str(f"{nats / math.log(2) / read:.3f} bits per byte", refresh=False)
            bar.update(len(scores))
    if not read:
        raise ValueError(f"`FILE` is {' '.join(arguments.files)}, which is empty; there is nothing to score.")
    if not arguments.quiet:
        words = f"{count_of(count, 'document')}, {with_unit(read, 'B')}: {nats / math.log(2) / read:.4f} bits per byte"
        print(words, file=sys.stderr)


def _rows(arguments: argparse.Namespace, encoding: "TokenEncoding") -> "ByteRows | SumRows":
    from hf_recurrent.evaluation.scores import ByteRows, SumRows

    if arguments.per == "byte":
        return ByteRows()
    if arguments.per == "document":
        return SumRows()
    try:
        (line_end,) = encoding.encode(b"\n", "a line end").tolist()
    except ValueError as error:
        raise ValueError(
            "`--per` is line, but the tokenizer of `MODEL` has no line ends; use byte or document."
        ) from error
    return SumRows(line_end)


def _documents(arguments: argparse.Namespace) -> "tuple[Iterator[Document], int | None]":
    """The documents of all files in their order, and their bytes; None if these are not known before reading."""
    from hf_recurrent.data.documents import ReadOptions, Source
    from hf_recurrent.data.pixel_readers import pixel_format
    from hf_recurrent.data.sources import known_bytes, resolve

    options = ReadOptions(
        arguments.text_column,
        arguments.dataset_split,
        arguments.dataset_config,
        arguments.streaming,
        arguments.binary,
    )
    parts: list[Source] = []
    for name in arguments.files:
        if pixel_format([name]) is not None or name.startswith(TASK_PREFIX):
            raise ValueError(f"`FILE` is {name!r}, which is no text; measure images and tasks with evaluate.")
        if name == "-":
            parts.append(Source(None, lambda: iter([("-", _standard_input())])))
        else:
            parts += resolve(name, options)
    return (document for part in parts for document in part.documents()), known_bytes(parts)


def _standard_input() -> Iterator[bytes]:
    """The bytes of standard input as they arrive."""
    while piece := sys.stdin.buffer.read1(_PIECE):
        yield piece


@contextmanager
def _output(path: Path | None) -> Iterator[IO[str]]:
    """Standard output, or a file that is written aside and renamed at the end."""
    if path is None:
        yield sys.stdout
        sys.stdout.flush()
        return
    from hf_recurrent.checkpoints.files import atomic_file

    with atomic_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        yield file
