"""Log records in JSON and in the syslog protocol, as lines of text with their times."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from hf_recurrent.watch.timestamps import parse_time

FORMATS = ("auto", "text", "journald", "docker", "otlp", "syslog", "json")
_SYSLOG = re.compile(rb"<(\d{1,3})>(?:(\d) )?(.*)", re.DOTALL)
_SEVERITIES = (b"emerg", b"alert", b"crit", b"error", b"warning")
_MESSAGES = ("message", "msg", "log", "event", "text")
_TIMES = ("time", "timestamp", "ts", "@timestamp")
_LEVELS = ("level", "severity", "lvl", "loglevel")
_LONGEST_VALUE = 100

Record = tuple[bytes, float | None]


def decode_records(line: bytes, format: str = "auto") -> list[Record] | None:
    """Text and time of each record in a line; None for a line of plain text.

    The format `auto` reads JSON objects and syslog lines as what they are, everything else as text.
    """
    first = line[:1]
    if first == b"{" and format not in ("text", "syslog"):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return _decode_object(entry, format) if isinstance(entry, dict) else None
    if first == b"<" and format in ("auto", "syslog"):
        return _decode_syslog(line)
    return None


def _decode_object(entry: dict[str, Any], format: str) -> list[Record] | None:
    """The records of a JSON object, which `auto` recognizes by its fields."""
    is_auto = format == "auto"
    if format == "journald" or (is_auto and "MESSAGE" in entry and any(name.startswith("__") for name in entry)):
        return _journald(entry)
    if format == "docker" or (is_auto and isinstance(entry.get("log"), str) and "stream" in entry):
        return [(_bytes_of(entry.get("log")).rstrip(b"\r\n"), _time_of(entry.get("time")))]
    if format == "otlp" or (is_auto and ("resourceLogs" in entry or "timeUnixNano" in entry)):
        return [*_otlp(entry)] or None
    return _json(entry)


def _journald(entry: dict[str, Any]) -> list[Record] | None:
    """`program: message`; a message that is not UTF-8 is a list of bytes, and one that is too large is null."""
    if "MESSAGE" not in entry:
        return None
    program = entry.get("SYSLOG_IDENTIFIER") or entry.get("_COMM") or ""
    text = b": ".join(part for part in (_bytes_of(program), _bytes_of(entry["MESSAGE"])) if part)
    time = _number(entry.get("__REALTIME_TIMESTAMP"))
    return [(text, None if time is None else time / 1e6)]


def _otlp(entry: dict[str, Any]) -> Iterator[Record]:
    """The log records of an OTLP/JSON object: a batch, or a single one."""
    records = [entry]
    if "resourceLogs" in entry:
        scopes = [scope for resource in _list(entry, "resourceLogs") for scope in _list(resource, "scopeLogs")]
        records = [record for scope in scopes for record in _list(scope, "logRecords")]
    for record in records:
        body = record.get("body")
        value = body.get("stringValue", body) if isinstance(body, dict) else body
        text = _bytes_of(value) or json.dumps(value, sort_keys=True).encode() if value is not None else b""
        level = _bytes_of(record.get("severityText"))
        time = _number(record.get("timeUnixNano"))
        yield b" ".join(part for part in (level, text) if part), None if time is None else time / 1e9


def _list(entry: dict[str, Any], name: str) -> list[dict[str, Any]]:
    value = entry.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _json(entry: dict[str, Any]) -> list[Record] | None:
    """`LEVEL message key=value ...` of any JSON object that has a message."""
    message = next((name for name in _MESSAGES if isinstance(entry.get(name), str)), None)
    if message is None:
        return None
    level = next((name for name in _LEVELS if isinstance(entry.get(name), str)), None)
    time = next((name for name in _TIMES if _time_of(entry.get(name)) is not None), None)
    parts = [] if level is None else [entry[level].upper()]
    parts.append(entry[message])
    for name, value in entry.items():
        if name not in (message, level, time) and isinstance(value, str | int | float):
            parts.append(f"{name}={str(value)[:_LONGEST_VALUE]}")
    text = " ".join(parts).encode("utf-8", "backslashreplace").replace(b"\n", b" ").replace(b"\r", b" ")
    return [(text, None if time is None else _time_of(entry[time]))]


def _decode_syslog(line: bytes) -> list[Record] | None:
    """A message of RFC 3164 or 5424 without its priority, with the severity in front if it is a warning or worse."""
    match = _SYSLOG.fullmatch(line)
    if match is None or int(match[1]) > 191:
        return None
    severity, text, time = int(match[1]) % 8, match[3], None
    if match[2] is not None:
        fields = text.split(b" ", 5)
        if len(fields) < 6:
            return None
        time = parse_time(fields[0])
        structured = re.match(rb"(?:-|(?:\[(?:\\.|[^\]\\])*\])+) ?", fields[5])
        message = fields[5][structured.end() :] if structured else fields[5]
        text = b" ".join([*fields[1:3], message.removeprefix(b"\xef\xbb\xbf")])
    if severity < len(_SEVERITIES):
        text = b"[" + _SEVERITIES[severity] + b"] " + text
    return [(text, time)]


def _bytes_of(value: object) -> bytes:
    """The bytes of a field, or of its first value if it has several."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        value = value[0]
    if isinstance(value, list):
        return bytes(byte & 255 for byte in value if isinstance(byte, int))
    return value.encode("utf-8", "backslashreplace") if isinstance(value, str) else b""


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _time_of(value: object) -> float | None:
    """Seconds since 1970 of a text, or of a number in seconds, milli-, micro- or nanoseconds."""
    number = _number(value)
    if number is None:
        return parse_time(value.encode("utf-8", "replace")) if isinstance(value, str) else None
    for scale in (1.0, 1e3, 1e6, 1e9):
        if 1e8 <= number / scale < 1e11:
            return number / scale
    return None
