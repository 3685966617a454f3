"""One reader per file format: from a file to its documents, with never more than a piece of it in memory.

Text, raw bytes and FASTA sequences may be of any length. A line of JSON and a row of Parquet are read as a whole, and
therefore limited.
"""

import codecs
import json
import tempfile
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from hf_recurrent.argument_checks import import_optional
from hf_recurrent.data.decompression import COMPRESSIONS, check_expansion, check_installed, content_suffix, read_chunks
from hf_recurrent.data.documents import Document, column_bytes, missing_column

Reader = Callable[[Path, str], Iterator[Document]]

# Bytes of a document that must be in memory as a whole: a line of JSON, a row of Parquet.
LARGEST_DOCUMENT = 1 << 28
_LARGEST_HEADER = 1 << 24
# Rows of Parquet that are in memory together: all of them may repeat the largest value.
_ROWS_AT_ONCE = 32
_READ_AT_ONCE = 1 << 20
_NOT_A_SEQUENCE = bytes(set(range(256)) - set(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz*-.\r\n\t "))


def reader_of(path: Path, binary: bool) -> Reader:
    """The reader for the suffix of `path`; a file with any other suffix is text, or raw bytes if `binary`."""
    return _READERS.get(content_suffix(path)) or (_read_binary if binary else _read_text)


def is_plain(path: Path) -> bool:
    """True if the bytes of a file are its only document."""
    return content_suffix(path) not in _READERS and path.suffix.lower() not in COMPRESSIONS


def check_packages(path: Path) -> None:
    """Raise an ImportError if reading a file needs a package that is missing."""
    check_installed(path)
    if content_suffix(path) == ".parquet":
        import_optional("pyarrow", f"reading {path} needs the pyarrow package: pip install datasets")


def _read_text(path: Path, text_column: str) -> Iterator[Document]:
    yield str(path), _utf8_chunks(path)


def _utf8_chunks(path: Path) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    try:
        for chunk in read_chunks(path):
            decoder.decode(chunk)
            position += len(chunk)
            yield chunk
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text ({error.reason} near byte {position + error.start}); "
            "convert it, or pass `binary=True` to read raw bytes."
        ) from error


def _read_binary(path: Path, text_column: str) -> Iterator[Document]:
    yield str(path), read_chunks(path)


def _read_json_lines(path: Path, text_column: str) -> Iterator[Document]:
    for name, row in json_rows(path):
        if text_column not in row:
            raise missing_column(name, text_column, row)
        yield name, [column_bytes(row[text_column], text_column, name)]


def json_rows(path: Path) -> Iterator[tuple[str, dict]]:
    """The rows of a file of JSON lines, each with its name for error messages."""
    parse = json.JSONDecoder().decode
    for number, line in enumerate(_lines(path), start=1):
        if not line or line.isspace():
            continue
        name = f"{path}, line {number}"
        try:
            try:
                row = parse(line.decode("utf-8"))
            except ValueError:
                row = json.loads(line)  # also knows other encodings, at the cost of detecting them
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{name} is a JSON {type(row).__name__}; it must be an object with columns.")
        yield name, row


def _lines(path: Path) -> Iterator[bytes]:
    pieces: list[bytes] = []
    number, length = 1, 0
    for chunk in read_chunks(path):
        first, *others = chunk.split(b"\n")
        pieces.append(first)
        length += len(first)
        _check_length(f"{path}, line {number},", length)
        if others:
            yield b"".join(pieces)
            *whole, last = others
            yield from whole
            pieces, length = [last], len(last)
        number += len(others)
    yield b"".join(pieces)


def _check_length(name: str, length: int) -> None:
    if length > LARGEST_DOCUMENT:
        raise ValueError(
            f"{name} is longer than {LARGEST_DOCUMENT:,} bytes; store such long documents as text files, which may be "
            "of any length."
        )


def _read_parquet(path: Path, text_column: str) -> Iterator[Document]:
    check_packages(path)
    import pyarrow
    from pyarrow import parquet

    with tempfile.TemporaryFile() as unpacked:
        source: object = path
        if path.suffix.lower() in COMPRESSIONS:  # Parquet is read from its end, so it is unpacked first
            unpacked.writelines(read_chunks(path))
            unpacked.seek(0)
            source = unpacked
        try:
            # Without a buffer, the whole column of a group of rows is in memory, compressed.
            with parquet.ParquetFile(source, buffer_size=_READ_AT_ONCE, pre_buffer=False) as file:
                if text_column not in file.schema_arrow.names:
                    raise missing_column(str(path), text_column, file.schema_arrow.names)
                number, expanded, size = 0, 0, path.stat().st_size
                for rows in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[text_column], use_threads=False):
                    column = rows.column(0)
                    is_text = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
                    if is_text:  # Python strings would be decoded and encoded again
                        column = column.cast(pyarrow.large_binary())
                    for value in column:
                        name = f"{path}, row {number}"
                        data = column_bytes(value.as_py(), text_column, name)
                        if is_text:
                            data.decode("utf-8")
                        _check_length(f"{name},", len(data))
                        expanded += len(data)
                        check_expansion(path, expanded, size)
                        yield name, [data]
                        number += 1
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}: column {text_column!r} is not valid Unicode: {error}") from error
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} is not a whole Parquet file: {error}") from error


def _read_fasta(path: Path, text_column: str) -> Iterator[Document]:
    for (_, name), parts in groupby(_fasta_parts(path), key=itemgetter(0, 1)):
        yield name, map(itemgetter(2), parts)


def _fasta_parts(path: Path) -> Iterator[tuple[int, str, bytes]]:
    """Pieces (record number, record name, sequence bytes); the first of each record has no bytes.

    Lines may be of any length: some files hold a whole chromosome in one.
    """
    record, name, header, at_line_start = 0, "", b"", True
    for chunk in read_chunks(path):
        data, header, position = header + chunk, b"", 0
        while position < len(data):
            if at_line_start and data.startswith(b">", position):
                end = data.find(b"\n", position)
                if end < 0:
                    header = data[position:]
                    if len(header) > _LARGEST_HEADER:
                        raise ValueError(
                            f"{path} is not FASTA: the header of record {record + 1} is longer than "
                            f"{_LARGEST_HEADER:,} bytes."
                        )
                    break
                record += 1
                name = f"{path}, record {record} ({data[position + 1 : end].decode('utf-8', 'replace').strip()})"
                yield record, name, b""
                position = end + 1
                continue
            end = data.find(b"\n>", position) + 1 or len(data)
            piece = data[position:end]
            if not record and piece.strip():
                raise ValueError(f"{path} is not FASTA: it does not begin with '>'.")
            if len(piece.translate(None, _NOT_A_SEQUENCE)) != len(piece):
                raise ValueError(f"{name} is not FASTA: it holds something other than letters.")
            if record:
                yield record, name, piece.translate(None, b"\r\n\t ")
            at_line_start, position = piece.endswith(b"\n"), end


_READERS: dict[str, Reader] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".parquet": _read_parquet,
    ".fa": _read_fasta,
    ".fasta": _read_fasta,
    ".fna": _read_fasta,
}
