"""A user's own recurrent unit, read from the checkpoint of a model with it: only if its code is trusted."""

import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from transformers.utils import cached_file, logging

from .own_code import AUTO_MAP_KEY, OWN_CODE, with_absolute_imports, with_relative_imports

logger = logging.get_logger(__name__)

# Those of `from_pretrained` that say where files are.
HUB_ARGUMENTS = (
    "cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
)  # fmt: skip


def find_own_unit(config: Any, name: str | os.PathLike, trust_remote_code: bool, **hub_arguments: Any) -> None:
    """Register a user's own unit that a configuration names, from the code of its checkpoint, if it is trusted.

    A unit of this name that is registered already is used instead.

    Args:
        config: of the checkpoint, a configuration or its dictionary.
        name: directory, or owner/name on the Hub.
        trust_remote_code: run the code.
        hub_arguments: of `from_pretrained`.

    Raises:
        ValueError: the code is needed and not trusted, or not that of a unit.
        OSError: its file is missing.
    """
    fields = config if isinstance(config, dict) else vars(config)
    unit = fields.get("recurrent_unit")
    reference = (fields.get("auto_map") or {}).get(AUTO_MAP_KEY)
    if reference is None:
        return
    # Of a repository on the Hub: "owner/name--file.Class".
    file = f"{str(reference).split('--')[-1].partition('.')[0]}.py"
    if not file.removesuffix(".py").isidentifier():
        raise ValueError(f"`auto_map` names {reference!r} as the recurrent unit; it must be of the form FILE.CLASS.")
    if unit in OWN_CODE:
        compare_code(unit, name, file, **hub_arguments)
        return
    if not trust_remote_code:
        raise ValueError(
            f"`recurrent_unit` is {unit!r}, whose code is the file `{file}` of the checkpoint; it is run only with "
            "`trust_remote_code`, unless you import your own copy first (`--import FILE` on the command line)."
        )
    _run(cached_file(name, file, **hub_arguments))
    if unit not in OWN_CODE:
        raise ValueError(f"The file `{file}` of the checkpoint does not register the recurrent unit {unit!r}.")


def compare_code(unit: str | None, name: str | os.PathLike, file: str | None = None, **hub_arguments: Any) -> None:
    """Warn if the code of a registered unit is not that of a checkpoint; other units are ignored.

    Args:
        unit: name of the unit.
        name: directory of the checkpoint, or owner/name on the Hub.
        file: name of its file in the checkpoint, by default that of the registered code.
        hub_arguments: of `from_pretrained`.
    """
    registered = OWN_CODE.get(unit)
    if registered is None or registered.file is None:
        return
    try:
        saved = Path(cached_file(name, file or registered.file, **hub_arguments)).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return
    if saved != registered.text:
        logger.warning(
            f"`{file or registered.file}` of {os.fspath(name)!r} differs from the imported `{registered.file}`, which "
            "is used: the model may compute something else than when it was saved."
        )


def _run(path: str) -> None:
    """Execute a file of a checkpoint as a neighbour of this one."""
    text = Path(path).read_text(encoding="utf-8")
    with_relative_imports(text, os.path.basename(path), from_checkpoint=True)  # refuses what is not here
    # Checkpoints may have files of one name with different code.
    name = f"{__package__}.{Path(path).stem}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    specification = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    code = compile(with_absolute_imports(text, os.path.basename(path)), path, "exec")
    try:
        exec(code, vars(module))
    except BaseException:
        del sys.modules[name]
        raise
