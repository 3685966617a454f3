"""Folders with an exported step: written from a model, checked, and run without the model's code.

A folder holds the program, `specification.json` (inputs, outputs, parts of the state, hash of the weights), the
tokenizer, a card and `manifest.json` with checksums.

Shape letters: B streams, V vocabulary.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_recurrent.checkpoint_files import STAGING_PREFIX, read_state_file, write_json, write_state_file
from hf_recurrent.checkpoint_manifest import check_manifest, write_manifest
from hf_recurrent.export.card import export_card
from hf_recurrent.export.programs import export_step
from hf_recurrent.export.runtimes import RUNTIMES
from hf_recurrent.export.specification import ExportSpecification, describe
from hf_recurrent.modeling.recurrent_state import RecurrentState

SPECIFICATION_FILE = "specification.json"
_KIND = "exported_step"
_HASH_KEY = "weights_hash"


class ExportedStep:
    """One step of an exported model.

    Args:
        folder: of [`save_exported_step`].

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the folder is damaged, was written by something else or by another version.
        ImportError: its runtime is not installed.
    """

    def __init__(self, folder: str | os.PathLike):
        folder = Path(folder)
        self.specification = read_specification(folder)
        path = folder / self.specification.program
        try:
            self._run = RUNTIMES[self.specification.runtime].load(path)
        except (RuntimeError, OSError, KeyError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"`{path}` cannot be loaded: {reason[0].rstrip('.')}.") from error

    def init_state(self, batch_size: int) -> RecurrentState:
        """The zero state of B streams."""
        return self.specification.init_state(batch_size)

    def __call__(self, inputs: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """Read one token of every stream.

        Args:
            inputs: token ids (B,), or real values (B, I).
            state: of these streams.

        Returns:
            The logits (B, V) and the new state.

        Raises:
            ValueError: a shape, type or token id does not match.
        """
        self.specification.check(inputs, state)
        names = [part.name for part in self.specification.state]
        outputs, *parts = self._run([inputs.contiguous(), *(state[name].contiguous() for name in names)])
        return outputs, dict(zip(names, parts, strict=True))

    def save_state(self, state: RecurrentState, path: str | os.PathLike) -> None:
        """Write a state with the hash of the weights that it belongs to."""
        write_state_file(state, path, {_HASH_KEY: self.specification.weights_hash})

    def load_state(self, path: str | os.PathLike) -> RecurrentState:
        """Read a state that `save_state` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged, or the state belongs to other weights.
        """
        state, metadata = read_state_file(path)
        if metadata.get(_HASH_KEY) != self.specification.weights_hash:
            raise ValueError(
                f"`{os.fspath(path)}` was saved with other weights; a state works only with the weights that made it."
            )
        return state


def save_exported_step(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    *,
    runtime: str = "torch",
    tokenizer: PreTrainedTokenizerBase | None = None,
    weights: str | None = None,
    card_data: dict[str, Any] | None = None,
) -> ExportSpecification:
    """Export a model's step into a new folder.

    Args:
        model: a recurrent model of this package.
        folder: must not exist, or be empty.
        runtime: "torch", "aoti" (AOTInductor; needs a C++ compiler), "onnx", "executorch" or "c" (one
            C99 file, always with int8 weights, which is compiled and not loaded).
        tokenizer: saved with it.
        weights: "int8", "bfloat16", or None for the model's own type.
        card_data: fields of the card's metadata, such as `license` and `base_model`.

    Raises:
        FileExistsError: the folder has files.
        ImportError: the runtime's packages are not installed.
        TypeError, ValueError: as [`export_step`].
    """
    if runtime not in RUNTIMES:
        raise ValueError(f"`runtime` is {runtime!r}; it must be one of {', '.join(map(repr, RUNTIMES))}.")
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"`folder` is {os.fspath(folder)!r}, which exists; it must be a new or empty folder.")
    program_file, write, _ = RUNTIMES[runtime]
    if runtime == "c":
        if weights not in (None, "int8"):
            raise ValueError(f"`weights` is {weights!r}; in C they are always 'int8'.")
        program, weights = export_step(model), "int8"  # the writer makes its own tables
    else:
        program = export_step(model, weights=weights)
    specification = describe(model, runtime, program_file, weights)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.parent / f"{STAGING_PREFIX}{folder.name}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        write(program, staging / program_file, [part.name for part in specification.state])
        write_json(specification.to_json(), staging / SPECIFICATION_FILE)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        (staging / "README.md").write_text(export_card(specification, card_data or {}), encoding="utf-8")
        write_manifest(staging, kind=_KIND)
        if folder.exists():
            folder.rmdir()
        os.replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return specification


def read_specification(folder: str | os.PathLike) -> ExportSpecification:
    """The specification of a folder, after all of its files were compared with their checksums.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the folder is damaged, was written by something else or by another version.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"`folder` is {os.fspath(folder)!r}, which is not a directory.")
    if not (folder / SPECIFICATION_FILE).is_file():
        raise ValueError(f"`folder` is {os.fspath(folder)!r}, which has no `{SPECIFICATION_FILE}`: not an export.")
    manifest = check_manifest(folder)
    if manifest.get("kind") != _KIND:
        raise ValueError(f"`folder` is {os.fspath(folder)!r}, whose manifest is not that of an export.")
    path = folder / SPECIFICATION_FILE
    specification = ExportSpecification.from_json(json.loads(path.read_text(encoding="utf-8")), os.fspath(path))
    program = RUNTIMES[specification.runtime].file
    if specification.program != program or program not in manifest["files"]:
        raise ValueError(f"`{path}` is damaged: the program is not `{program}`, or has no checksum.")
    made_with, here = specification.versions.get("torch"), torch.__version__
    if specification.runtime == "aoti" and made_with != here:
        raise ValueError(
            f"`{os.fspath(folder)}` was compiled by torch {made_with}; this is torch {here}: export again."
        )
    return specification
