"""Registered parts as they were, and none of the modules of a test's files, after a test that registers some."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_recurrent.data import sources
from hf_recurrent.modeling.units import own_code, recurrent_units
from hf_recurrent.tasks import task_names


@contextmanager
def restored_parts(folder: Path) -> Iterator[None]:
    """Inside the block, parts may be registered from files in `folder`."""
    registries = [recurrent_units._UNITS, own_code.OWN_CODE]
    for own in (task_names._OWN_TASKS, sources._OWN_SOURCES):
        registries += [own._parts, own._code]
    before, path = [dict(registry) for registry in registries], list(sys.path)
    try:
        yield
    finally:
        for registry, content in zip(registries, before, strict=True):
            registry.clear()
            registry.update(content)
        sys.path[:] = path
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(str(folder)):
                del sys.modules[name]
        sys.path_importer_cache.clear()


def forget_unit(name: str = "leaky") -> None:
    """As on a machine on which the unit was never registered."""
    recurrent_units._UNITS.pop(name, None)
    own_code.OWN_CODE.pop(name, None)


def without_example() -> None:
    """As in a new process: `examples/leaky_unit.py`, which the tests of all units import, is not there."""
    forget_unit()
    sys.modules.pop("leaky_unit", None)
    sys.path[:] = [folder for folder in sys.path if not folder.endswith("examples")]
