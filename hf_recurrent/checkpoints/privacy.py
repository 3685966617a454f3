"""Names and texts that can be published: without secrets, user names and paths of this machine."""

import os
import re
from collections.abc import Iterator

REDACTED = "[redacted]"

_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|API_?KEY|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 12  # a shorter value may be an ordinary word
# At least two components, at the beginning of a word: neither "and/or" nor a part of a URL.
_PATH = re.compile(r"(?<![\w/:.~])~?(?:/[\w.@+ -]*[\w.@+-]){2,}|\b[A-Za-z]:\\[\w.@+\\-]+|(?<!\w)~/[\w.@+/-]+")
# Directories that every machine has tell nothing about this one.
_SYSTEM = ("bin", "dev", "etc", "lib", "opt", "proc", "sbin", "sys", "usr")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def redact_secrets(text: str) -> str:
    """Replace Hub tokens, and the value of every environment variable that is named like a secret."""
    secrets = {
        value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET
    }
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return _HUB_TOKEN.sub(REDACTED, text)


def find_local_path(text: str) -> str | None:
    """The first path of this machine in a text: below the home directory or a directory that exists here."""
    return next(_local_paths(text), None)


def redact(text: str) -> str:
    """A text without secrets and paths of this machine."""
    text = redact_secrets(text)
    for path in sorted(set(_local_paths(text)), key=len, reverse=True):
        text = text.replace(path, REDACTED)
    return text


def last_part(path: str | os.PathLike) -> str:
    """The last component of a path of any system."""
    return re.split(r"[\\/]", os.fspath(path).rstrip("\\/"))[-1]


def hub_name(name: str | os.PathLike | None) -> str | None:
    """`name` if it has the form owner/name and is not a directory here, else None."""
    name = os.fspath(name or "")
    return name if _REPOSITORY.fullmatch(name) and not os.path.exists(name) else None


def public_name(name: str | os.PathLike) -> str:
    """A name on the Hub as it is; the last component of a path, except the home directory, which names a user."""
    name = os.fspath(name)
    home = os.path.expanduser("~").rstrip("\\/")
    if hub_name(name) is not None:
        return name
    return "local files" if os.path.abspath(name) == home else redact(last_part(name))


def public_data_name(name: str) -> str:
    """The name of a corpus without folders: "/home/me/notes, hub:a/b" → "notes, hub:a/b"."""
    return ", ".join(_public_part(part) for part in name.split(", "))


def _public_part(part: str) -> str:
    prefix, colon, rest = part.partition(":")
    if colon and len(prefix) > 1:  # of "C:\notes" it is a drive
        if prefix == "task" or hub_name(rest):
            return redact(part)
        return public_name(rest) if prefix == "hub" else f"{prefix}:{public_name(rest)}"
    return public_name(part)


def _local_paths(text: str) -> Iterator[str]:
    home = os.path.expanduser("~")
    if len(home) > 1:
        yield from (found[0] for found in re.finditer(rf"(?<!\w){re.escape(home)}(?![\w-])[\w.@+/\\-]*", text))
    for found in _PATH.finditer(text):
        first = found[0].split("/")[1] if found[0].startswith("/") else None
        if first is None or (first not in _SYSTEM and os.path.isdir(f"/{first}")):
            yield found[0]
