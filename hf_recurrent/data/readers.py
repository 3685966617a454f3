"""One reader per file format: from a file to its documents, with never more than a piece of it in memory.

Text, raw bytes and FASTA sequences may be of any length. A line of JSON and a row of Parquet are read as a whole, and
therefore limited.
"""

import codecs
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from hf_recurrent.data.decompression import (
    COMPRESSIONS,
    check_expansion,
    check_installed,
    content_suffix,
    read_chunks,
)
from hf_recurrent.data.documents import Document, column_bytes, missing_column

Reader = Callable[[Path, str], Iterator[Document]]

# Bytes of a document that has to be in memory as a whole: a line of JSON, a row of Parquet.
LARGEST_DOCUMENT = 1 << 28
_LARGEST_HEADER = 1 << 24
# Rows of Parquet that are read together: their number, and their bytes.
_ROWS_AT_ONCE = 256
_LARGEST_BATCH = 1 << 30
_VALUES_AT_ONCE = 8
_READ_AT_ONCE = 1 << 20
# Encodings that store each value once, or a reference to a dictionary; others may share prefixes of values.
_WHOLE_VALUES = {"PLAIN", "RLE", "BIT_PACKED", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}
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
        try:
            from pyarrow import parquet  # noqa: F401
        except ImportError as error:
            raise ImportError(f"reading {path} needs the pyarrow package: pip install datasets") from error


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
    """The rows of a file of JSON lines, each with its name for error messages.

    Raises:
        ValueError: a line is too long, is not JSON, or holds something other than an object.
    """
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
        if path.suffix.lower() in COMPRESSIONS:  # Parquet is read from its end, so it has to be unpacked first
            unpacked.writelines(read_chunks(path))
            unpacked.seek(0)
            source = unpacked
        try:
            with open(path, "rb") if source is path else contextlib.nullcontext(unpacked) as binary:
                batch_size = _rows_at_once(binary, text_column)
            # Without a buffer, the whole column of a group of rows is in memory, compressed.
            with parquet.ParquetFile(source, buffer_size=_READ_AT_ONCE, pre_buffer=False) as file:
                if text_column not in file.schema_arrow.names:
                    raise missing_column(str(path), text_column, file.schema_arrow.names)
                number, expanded, size, prefix = 0, 0, path.stat().st_size, f"{path}, row "
                for rows in file.iter_batches(batch_size=batch_size, columns=[text_column], use_threads=False):
                    for data in _column_values(rows.column(0), text_column, prefix, number):
                        name = f"{prefix}{number}"
                        _check_length(f"{name},", len(data))
                        expanded += len(data)
                        check_expansion(path, expanded, size)
                        yield name, [data]
                        number += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} is not a whole Parquet file: {error}") from error


def _column_values(column: Any, name: str, prefix: str, first: int) -> Iterator[bytes]:
    """The values of a column of text or bytes, a few at a time."""
    import pyarrow

    is_text = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
    if is_text:  # Python strings would be decoded and encoded again
        column = column.cast(pyarrow.large_binary())
    number = first
    for begin in range(0, len(column), _VALUES_AT_ONCE):
        for value in column.slice(begin, _VALUES_AT_ONCE).to_pylist():
            if is_text and value:
                try:
                    value.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise ValueError(f"{prefix}{number}: column {name!r} is not valid Unicode: {error}") from error
            yield column_bytes(value, name, f"{prefix}{number}")
            number += 1


def _rows_at_once(file: BinaryIO, column: str) -> int:
    """Number of rows that fit in memory even if all of them repeat the largest value of the file."""
    from pyarrow import parquet

    largest = _largest_repeated_value(file, parquet.read_metadata(file), column)
    return min(max(_LARGEST_BATCH // max(largest, 1), 1), _ROWS_AT_ONCE)


def _largest_repeated_value(file: BinaryIO, metadata: Any, column: str) -> int:
    """A bound of the bytes of a value that many rows of `column` may refer to.

    It is the size of the largest dictionary, from the header of its page, or where that cannot be read, of the largest
    column chunk.
    """
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    chunks = (group.column(index) for group in groups for index in range(group.num_columns))
    return max((_repeated_bytes(file, it) for it in chunks if it.path_in_schema.split(".")[0] == column), default=0)


def _repeated_bytes(file: BinaryIO, chunk: Any) -> int:
    if not _WHOLE_VALUES.issuperset(chunk.encodings):
        return chunk.total_uncompressed_size
    if not chunk.has_dictionary_page:
        return 0
    file.seek(chunk.dictionary_page_offset)
    size = _dictionary_size(file.read(16))
    return chunk.total_uncompressed_size if size is None else min(size, chunk.total_uncompressed_size)


def _dictionary_size(header: bytes) -> int | None:
    """The uncompressed size in the header of a dictionary page, None if it is another header.

    It is in Thrift's compact protocol; its first field is the type of the page, 2 for a dictionary, its second the
    size, both as zigzag integers.
    """
    if not header.startswith(b"\x15\x04\x15"):
        return None
    value = 0
    for number, byte in enumerate(header[3:]):
        value |= (byte & 0x7F) << 7 * number
        if byte < 0x80:
            return value >> 1
    return None


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
