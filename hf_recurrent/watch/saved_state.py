"""`Saved`: objects of a watch as JSON and back, attribute by attribute.

Loading makes objects of subclasses of `Saved` only, and executes nothing else. Objects that several others refer to
stay one object. A text is a letter, for its type, and the text; a container or an object is a list that begins with
such a letter.

The state of a watch (judges and positions of all logs, sizes of the output files) is one JSON file with its own hash,
replaced atomically: a watch starts without waiting for torch.
"""

import hashlib
import json
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from hf_recurrent.checkpoints.atomic_files import atomic_file

FILE = "watch.json"
_FORMAT = 5


def save_watch(directory: Path, state: dict[str, Any]) -> None:
    """Replace the saved state; after an OSError, the older state is unchanged."""
    content = json.dumps(state, separators=(",", ":"))
    head = json.dumps({"format": _FORMAT, "sha256": _hash(content)})
    final = directory / FILE
    try:
        with atomic_file(final) as partial:
            partial.write_text(f"{head}\n{content}\n", encoding="utf-8")
    except OSError as error:
        raise OSError(f"The state {os.fspath(final)!r} cannot be written: {error.strerror or error}.") from error


def read_watch(directory: Path) -> dict[str, Any] | None:
    """The saved state; None if there is none, and a ValueError if it is damaged or of another version."""
    path = directory / FILE
    try:
        head, _, content = path.read_text(encoding="utf-8").partition("\n")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The state {os.fspath(path)!r} cannot be read: {error}.") from error
    try:
        described = json.loads(head)
        if described["format"] != _FORMAT:
            raise ValueError(f"The state {os.fspath(path)!r} has another format than {_FORMAT}; use --restart.")
        if described["sha256"] != _hash(content.rstrip("\n")):
            raise ValueError(f"The state {os.fspath(path)!r} is damaged; use --restart.")
        return json.loads(content)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"The state {os.fspath(path)!r} is damaged; use --restart.") from error


def _hash(content: str) -> str:
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


_PLAIN = {int, float, bool, type(None)}
_SEQUENCES = {"l": list, "t": tuple, "s": set}
_MAPPINGS = {"d": dict, "o": OrderedDict, "c": Counter}
_LETTERS = {kind: letter for letter, kind in (_SEQUENCES | _MAPPINGS).items()}
_CLASSES: dict[str, type["Saved"]] = {}


class Saved:
    """Base class of what a watch saves: all attributes, but for those in `not_saved`, which the caller sets."""

    __slots__ = ()
    not_saved: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _CLASSES[cls.__name__] = cls

    def state(self) -> dict[str, Any]:
        """JSON for [`load`]."""
        packer = _Packer()
        return {"content": packer.pack(self), "names": packer.names}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from [`state`]; a KeyError, TypeError, ValueError, AttributeError or IndexError if damaged."""
        _Unpacker(state["names"]).unpack(state["content"], self)

    def saved_names(self) -> list[str]:
        slots = [name for cls in type(self).__mro__ for name in getattr(cls, "__slots__", ())]
        return [name for name in (*slots, *getattr(self, "__dict__", ())) if name not in self.not_saved]

    def set_saved(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class _Packer:
    """Makes JSON of objects; `names` has the attributes of each class in the order of their values."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}
        self._numbers: dict[int, int] = {}  # id of an object → its number

    def pack(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is bytes:
            return f"b{value.decode('latin-1')}"
        if kind is str:
            return f"s{value}"
        if isinstance(value, Saved):
            return self._object(value)
        if kind is deque:
            return ["q", value.maxlen, self._all(value)]
        letter = _LETTERS[kind]
        if letter in _SEQUENCES:
            return [letter, self._all(value)]
        return [letter, self._all(value), self._all(value.values())]

    def _all(self, values: Iterable[Any]) -> list[Any]:
        values = [*values]
        kinds = {*map(type, values)}
        if kinds <= _PLAIN:
            return values
        return [f"b{value.decode('latin-1')}" for value in values] if kinds == {bytes} else [*map(self.pack, values)]

    def _object(self, value: Saved) -> list[Any]:
        if id(value) in self._numbers:
            return ["r", self._numbers[id(value)]]
        self._numbers[id(value)] = len(self._numbers)
        name = type(value).__name__
        names = self.names.setdefault(name, value.saved_names())
        return ["x", name, [self.pack(getattr(value, attribute)) for attribute in names]]


class _Unpacker:
    def __init__(self, names: dict[str, list[str]]):
        self._names, self._objects = names, []

    def unpack(self, value: Any, own: Any = None) -> Any:
        """The value; an object or a mapping that is there already, as `own`, is changed or looked into."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, str):
            return value[1:].encode("latin-1") if value[0] == "b" else value[1:]
        letter, *parts = value
        if letter == "r":
            return self._objects[parts[0]]
        if letter == "x":
            return self._object(*parts, own)
        if letter == "q":
            return deque(self._all(parts[1]), parts[0])
        if letter in _SEQUENCES:
            return _SEQUENCES[letter](self._all(parts[0]))
        keys, values = self._all(parts[0]), parts[1]
        if isinstance(own, dict) and own:
            values = [self.unpack(each, own.get(key)) for key, each in zip(keys, values, strict=True)]
        else:
            values = self._all(values)
        return _MAPPINGS[letter](dict(zip(keys, values, strict=True)))

    def _all(self, values: list[Any]) -> list[Any]:
        return values if _PLAIN.issuperset(map(type, values)) else [*map(self.unpack, values)]

    def _object(self, name: str, values: list[Any], own: Any) -> Saved:
        cls, names = _CLASSES[name], self._names[name]
        if type(own) is not cls:
            own = cls.__new__(cls)
        elif names != own.saved_names():
            raise ValueError(f"{name} has other attributes than in this version")
        self._objects.append(own)
        pairs = zip(names, values, strict=True)
        own.set_saved({each: self.unpack(value, getattr(own, each, None)) for each, value in pairs})
        return own
