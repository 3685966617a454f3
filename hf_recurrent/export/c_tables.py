"""Numbers and constant arrays in C: as C text, or as one binary file whose layout is a struct's."""

import re
import struct
import zlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_TYPES = {"float": "<f4", "int8_t": "i1", "uint16_t": "<u2", "uint32_t": "<u4"}
WEIGHTS_MAGIC = 0x57434648  # "HFCW" in little-endian order
_VERSION, _HEADER = 1, struct.Struct("<4I")
CRC32 = """static uint32_t NAME_crc32(const unsigned char *bytes, size_t size) {
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < size; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1u ? 0xedb88320u : 0u);
    }
    return ~crc;
}"""
# Arrays of weights; tables of offsets belong to the code.
_WEIGHTS = re.compile(r"\bNAME_((?:table|vector)_\d+)\b")
_ARRAYS = re.compile(r"\bNAME_(?:table|vector|offsets)_\d+\b")


def literal(value: float) -> str:
    if value != value:
        return "NAN"
    if value in (float("inf"), float("-inf")):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    is_float = float(torch.tensor(value, dtype=torch.float32)) == value
    text = f"{value:.9g}" if is_float else repr(float(value))
    text = text if any(mark in text for mark in ".e") else f"{text}.0"
    return f"({text}f)" if value < 0 else f"{text}f"


class Table(NamedTuple):
    """A constant array: its type in C, its name and its values."""

    kind: str
    name: str
    values: Tensor

    @property
    def size(self) -> int:
        """Elements, with those that fill the last four bytes."""
        per_word = 4 // np.dtype(_TYPES[self.kind]).itemsize
        return -(-self.values.numel() // per_word) * per_word

    def definition(self) -> str:
        values = self.values.flatten().tolist()
        texts = [literal(value).strip("()") if self.kind == "float" else str(int(value)) for value in values]
        lines, line = [], "   "
        for text in texts:
            if len(line) + len(text) > 116:
                lines.append(line)
                line = "   "
            line += f" {text},"
        body = "\n".join([*lines, line])
        return f"static const {self.kind} {self.name}[{len(texts)}] = {{\n{body}\n}};"

    def binary(self) -> bytes:
        """Little-endian values, filled with zeros to a multiple of four bytes."""
        values = self.values.flatten().numpy().astype(_TYPES[self.kind])
        return values.tobytes().ljust(self.size * values.itemsize, b"\0")


class Weights(NamedTuple):
    """The weights that statements read, as the content of a binary file."""

    tables: list[Table]
    payload: bytes

    @property
    def checksum(self) -> int:
        """CRC-32 of the payload, which is also the tie between the file and its C code."""
        return zlib.crc32(self.payload)

    def file(self) -> bytes:
        """The file: magic number, version, size and CRC-32 of the payload, 32 bits each, and the payload."""
        return _HEADER.pack(WEIGHTS_MAGIC, _VERSION, len(self.payload), self.checksum) + self.payload

    def declaration(self) -> str:
        """The struct that the payload is, and the function that checks it."""
        fields = "\n".join(f"    {t.kind} {t.name.removeprefix('NAME_')}[{t.size}];" for t in self.tables)
        return f"""#define NAME_WEIGHTS_FILE_SIZE {_HEADER.size + len(self.payload)}

struct NAME_weights {{
{fields}
}};

/* The weights in the bytes of the file NAME.weights, which stay in use and must be aligned to four bytes; null if they
 * are damaged or belong to other code. */
const struct NAME_weights *NAME_load(const void *file, size_t size);
"""

    def definition(self) -> str:
        """That function."""
        size = len(self.payload)
        return f"""{CRC32}

const struct NAME_weights *NAME_load(const void *file, size_t size) {{
    const unsigned char *bytes = file;
    uint32_t header[4];
    if (!file || size != NAME_WEIGHTS_FILE_SIZE || (uintptr_t)file % 4 != 0) return 0;
    memcpy(header, bytes, sizeof header);
    if (header[0] != {WEIGHTS_MAGIC:#x}u || header[1] != {_VERSION}u || header[2] != {size}u) return 0;
    if (header[3] != {self.checksum:#010x}u || NAME_crc32(bytes + sizeof header, {size}) != header[3]) return 0;
    if (sizeof(struct NAME_weights) != {size}) return 0; /* a compiler that leaves gaps */
    return (const struct NAME_weights *)(const void *)(bytes + sizeof header);
}}
"""


def used_tables(tables: dict[str, Table], body: str) -> list[Table]:
    """The arrays that statements read: compilers warn of others."""
    used = set(_ARRAYS.findall(body))
    return [table for name, table in tables.items() if name in used]


def collect_weights(tables: dict[str, Table], body: str) -> tuple[Weights, str]:
    """The weights that statements read, and these statements when they read them from a file."""
    found = [table for table in used_tables(tables, body) if _WEIGHTS.fullmatch(table.name)]
    payload = b"".join(table.binary() for table in found)
    return Weights(found, payload), _WEIGHTS.sub(r"weights->\1", body)
