"""The table of clients: every row is a small check of one library or command with our models.

`tests/clients/test_clients.py`, `try_clients.py` beside it and the table in `docs/reference/clients.md` are one list.
A check is a function of an empty folder, registered by [`row`]:

* it returns: the row works, and the returned string says how, where a reader would not expect it;
* it raises [`Refused`]: this cannot work, and the client or we say so; the check has seen the message;
* it raises anything else: the row fails.
"""

import importlib
import importlib.metadata
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Modules with rows, in the order of the table.
MODULES = (
    "rows_loading",
    "rows_tokenizers",
    "rows_generation",
    "rows_training",
    "rows_trackers",
    "rows_peft",
    "rows_trl",
    "rows_evaluation",
    "rows_quantization",
    "rows_other_runtimes",
    "rows_serving",
)


class Refused(Exception):
    """The row cannot work, for the reason that the message gives."""


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: name of the check, unique.
        client: the distribution that is tried, as on PyPI.
        packages: distributions that the check needs in addition.
        tried: what is tried, for the table.
        slow: takes more than some seconds, or starts processes.
        check: the check itself.
    """

    name: str
    client: str
    packages: tuple[str, ...]
    tried: str
    slow: bool
    check: Callable[[Path], str | None]

    def missing_packages(self) -> list[str]:
        """Distributions that are not installed."""
        return [name for name in (self.client, *self.packages) if installed_version(name) is None]

    def run(self, folder: Path) -> tuple[str, str]:
        """("works", how) or ("refused", reason); an error passes through."""
        try:
            return "works", self.check(folder) or ""
        except Refused as refusal:
            return "refused", str(refusal)


_rows: dict[str, Row] = {}


def row(client: str, tried: str, *packages: str, slow: bool = False) -> Callable:
    """Register the decorated check as a row."""

    def register(check: Callable[[Path], str | None]) -> Callable[[Path], str | None]:
        name = check.__name__
        if name in _rows and _rows[name].check.__module__ != check.__module__:
            raise ValueError(f"two rows are named {name}.")
        _rows[name] = Row(name, client, packages, tried, slow, check)
        return check

    return register


def all_rows() -> list[Row]:
    """Every row, in the order of the table."""
    for module in MODULES:
        importlib.import_module(module)
    return list(_rows.values())


def installed_version(distribution: str) -> str | None:
    """Version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextmanager
def refusal(error: type[Exception], pattern: str, reason: str) -> Iterator[None]:
    """The block has to raise `error` with a message that matches; the row is then refused for this reason."""
    try:
        yield
    except error as raised:
        if re.search(pattern, str(raised)):
            raise Refused(reason) from raised
        raise
    raise AssertionError(f"no {error.__name__} was raised, so this works now: {reason}")
