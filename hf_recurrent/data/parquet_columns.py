"""Columns of Parquet files in bounded memory: how many rows to read at once, and their text without Python strings."""

import itertools
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

# Encodings that store each value once, or a reference to a dictionary; others may share prefixes of values.
_WHOLE_VALUES = {"PLAIN", "RLE", "BIT_PACKED", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}


def largest_repeated_value(file: BinaryIO, metadata: Any, column: str) -> int:
    """A bound of the bytes of a value that many rows of `column` may refer to.

    It is the size of the largest dictionary, from the header of its page, or where that cannot be read, of the largest
    column chunk.
    """
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    chunks = (group.column(place) for group in groups for place in range(group.num_columns))
    return max((_repeated_bytes(file, it) for it in chunks if it.path_in_schema.split(".")[0] == column), default=0)


def _repeated_bytes(file: BinaryIO, chunk: Any) -> int:
    if not _WHOLE_VALUES.issuperset(chunk.encodings):
        return chunk.total_uncompressed_size
    if not chunk.has_dictionary_page:
        return 0
    file.seek(chunk.dictionary_page_offset)
    size = _uncompressed_size(file.read(16))
    return chunk.total_uncompressed_size if size is None else min(size, chunk.total_uncompressed_size)


def _uncompressed_size(header: bytes) -> int | None:
    """The uncompressed size in the header of a dictionary page, None if it is another header.

    It is in Thrift's compact protocol; its first field is the type of the page, 2 for a dictionary, its second the
    size, both as zigzag integers.
    """
    if not header.startswith(b"\x15\x04\x15"):
        return None
    value = 0
    for place, byte in enumerate(header[3:]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value >> 1
    return None


def is_text(column: Any) -> bool:
    """True for a column of strings without nulls, which [`text_values`] reads."""
    import pyarrow

    return column.null_count == 0 and (
        pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
    )


def text_values(column: Any) -> Iterator[bytes]:
    """The strings of an Arrow array as UTF-8, sliced from its buffer.

    Raises:
        UnicodeDecodeError: when the first value is requested that is not UTF-8.
    """
    import pyarrow

    column = column.cast(pyarrow.large_string())
    _, places, content = column.buffers()
    bounds = np.frombuffer(places, dtype=np.int64)[column.offset : column.offset + len(column) + 1]
    data = memoryview(b"" if content is None else content)
    is_valid = _is_utf8(data, bounds)
    ends = bounds.tolist()
    for begin, end in itertools.pairwise(ends):
        value = bytes(data[begin:end])
        if not is_valid:
            value.decode("utf-8")
        yield value


def _is_utf8(data: memoryview, bounds: np.ndarray) -> bool:
    """True if each piece is UTF-8: all of them are together, and none begins within a character."""
    try:
        str(data[bounds[0] : bounds[-1]], "utf-8")
    except UnicodeDecodeError:
        return False
    starts = bounds[:-1][bounds[:-1] < bounds[-1]]
    return not ((np.frombuffer(data, dtype=np.uint8)[starts] & 0xC0) == 0x80).any()
