"""Entries of the systemd journal, as `journalctl --output json` prints them."""

import json


def journal_text(line: bytes) -> bytes | None:
    """`program: message` of a JSON line; None if the line is not an entry of the journal.

    In the journal's JSON, a message that is not UTF-8 is a list of bytes, and a message that is too large is null.
    """
    if not line.startswith(b"{"):
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if "MESSAGE" not in entry or not any(name.startswith("__") for name in entry):
        return None
    program = entry.get("SYSLOG_IDENTIFIER") or entry.get("_COMM") or ""
    return b": ".join(part for part in (_bytes_of(program), _bytes_of(entry["MESSAGE"])) if part)


def _bytes_of(value: object) -> bytes:
    """The bytes of a field, or of its first value if it has several."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        value = value[0]
    if isinstance(value, list):
        return bytes(byte & 255 for byte in value if isinstance(byte, int))
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else b""
