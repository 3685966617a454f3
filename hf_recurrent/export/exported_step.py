"""Folders with an exported step: written from a model, checked, and run without the model's code.

A folder holds the program, `specification.json` (inputs, outputs, parts of the state, hash of the weights), the
tokenizer, `manifest.json` with checksums of these, and a card, which may be edited.

Shape letters: B streams, V vocabulary.
"""

import json
import os
from pathlib import Path

import torch
from huggingface_hub import ModelCardData, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from torch import Tensor
from torch.export import ExportedProgram
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_recurrent.checkpoints.atomic_files import atomic_file
from hf_recurrent.checkpoints.files import pack_tensors, unpack_tensors, write_json
from hf_recurrent.checkpoints.hub_repositories import check_repository
from hf_recurrent.checkpoints.manifest import check_manifest
from hf_recurrent.export.new_folder import check_new, new_folder
from hf_recurrent.export.programs import export_step, first_line, quietly
from hf_recurrent.export.runtimes import RUNTIMES, Runtime, write_c_and_weights
from hf_recurrent.export.specification import ExportSpecification, describe
from hf_recurrent.modeling.block.recurrent_state import RecurrentState

SPECIFICATION_FILE = "specification.json"
_KIND = "exported_step"
_HASH_KEY = "weights_hash"


class ExportedStep:
    """One step of an exported model.

    Args:
        folder: of [`save_exported_step`], or owner/name of a repository on the Hub with its files.
        revision: branch, tag or commit of the repository.
        trust_remote_code: run machine code ("aoti") from the Hub. Programs of the other runtimes are data.

    Raises:
        FileNotFoundError: there is no such folder or repository.
        ValueError: the folder is damaged, was written by something else or by another version, or holds code that is
            not trusted.
        ImportError: its runtime is not installed.
    """

    def __init__(self, folder: str | os.PathLike, *, revision: str | None = None, trust_remote_code: bool = False):
        local = _download(folder, revision)
        self.specification = read_specification(local)
        is_remote, runtime = local != Path(folder), self.specification.runtime
        if is_remote and RUNTIMES[runtime].is_native and not trust_remote_code:
            raise ValueError(
                f"`folder` is {os.fspath(folder)!r}, whose program is machine code; it is run only with "
                "`trust_remote_code=True`."
            )
        path = local / RUNTIMES[runtime].file
        try:
            self._run = RUNTIMES[runtime].load(path)
        except ImportError:
            raise
        except Exception as error:  # each runtime raises types of its own
            if isinstance(error, ValueError) and os.fspath(path) in str(error):
                raise
            raise ValueError(f"`{path}` cannot be loaded: {first_line(error)}.") from error

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
        with atomic_file(path) as partial:
            partial.write_bytes(pack_tensors(state, {_HASH_KEY: self.specification.weights_hash}))

    def load_state(self, path: str | os.PathLike) -> RecurrentState:
        """Read a state that `save_state` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged, or the state belongs to other weights.
        """
        name = os.fspath(path)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"There is no saved state at `{name}`.")
        state, metadata = unpack_tensors(Path(path).read_bytes(), name)
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
    weights_file: bool = False,
) -> ExportSpecification:
    """Export a model's step into a new folder.

    Args:
        model: a recurrent model of this package.
        folder: must not exist, or be empty.
        runtime: "torch", "aoti" (AOTInductor; needs a C++ compiler), "onnx", "executorch" or "c" (one
            C99 file, always with int8 weights, which is compiled and not loaded).
        tokenizer: saved with it.
        weights: "int8", "bfloat16", or None for the model's own type.
        weights_file: for "c": write the weights to a binary file, `model.weights`, instead of into the C file.

    Raises:
        FileExistsError: the folder has files.
        ImportError: the runtime's packages are not installed.
        TypeError, ValueError: as [`export_step`].
    """
    if runtime not in RUNTIMES:
        raise ValueError(f"`runtime` is {runtime!r}; it must be one of {', '.join(map(repr, RUNTIMES))}.")
    folder = Path(folder)
    check_new(folder)
    target = RUNTIMES[runtime]
    target.check_writing(runtime)
    if weights_file:
        if runtime != "c":
            raise ValueError(f"`weights_file` is True, but `runtime` is {runtime!r}; only 'c' has such a file.")
        target = target._replace(write=write_c_and_weights)
    if runtime == "c":
        if weights not in (None, "int8"):
            raise ValueError(f"`weights` is {weights!r}; in C they are always 'int8'.")
        program, weights = export_step(model, own_operators=True), "int8"  # the writer makes its own tables
    else:
        program = export_step(model, weights=weights, max_streams=target.max_streams)
    specification = describe(model, runtime, target.file, weights, target.max_streams)
    with new_folder(folder, _KIND, export_card(specification, weights_file), tokenizer) as staging:
        _write(target, program, staging / target.file, specification)
        write_json(specification.to_json(), staging / SPECIFICATION_FILE)
    return specification


def _write(target: Runtime, program: ExportedProgram, path: Path, specification: ExportSpecification) -> None:
    try:
        with quietly():
            target.write(program, path, [part.name for part in specification.state])
    except (ImportError, OSError, ValueError, MemoryError):
        raise
    except Exception as error:  # each runtime raises types of its own
        raise ValueError(
            f"The step of this {specification.model_type} model cannot be written for {specification.runtime!r}: "
            f"{first_line(error)}."
        ) from error


def _download(folder: str | os.PathLike, revision: str | None) -> Path:
    """The folder itself, or the local copy of a repository on the Hub."""
    path = Path(folder)
    if path.exists() or not isinstance(folder, str) or folder.count("/") != 1:
        return path
    try:
        check_repository(folder)
        return Path(snapshot_download(folder, revision=revision))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise FileNotFoundError(
            f"`folder` is {folder!r}; neither a directory nor a model on the Hub: {first_line(error)}."
        ) from error


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
        raise ValueError(f"`folder` is {os.fspath(folder)!r}, whose manifest does not belong to an export.")
    path = folder / SPECIFICATION_FILE
    specification = ExportSpecification.from_json(json.loads(path.read_text(encoding="utf-8")), os.fspath(path))
    if RUNTIMES[specification.runtime].file not in manifest["files"]:
        raise ValueError(f"`{path}` is damaged: the program has no checksum.")
    made_with, here = specification.versions.get("torch"), torch.__version__
    if specification.runtime == "aoti" and made_with != here:
        raise ValueError(
            f"`{os.fspath(folder)}` was compiled by torch {made_with}; this is torch {here}: export again."
        )
    return specification


_EXAMPLE = """```python
import torch
from hf_recurrent import ExportedStep

step = ExportedStep(".")  # this folder, or owner/name of this repository on the Hub
state = step.init_state(1)
for inputs in {inputs}:
    outputs, state = step(inputs, state)
```
"""
_C_EXAMPLE = """```c
#include "step.c"  /* or compile it by itself; link with -lm */

static struct model_state state;  /* buffers of past inputs are stored in half precision */
static float outputs[MODEL_OUTPUTS];
{weights}
model_reset(&state);
model_step(&state, {argument}'d', outputs);  /* a token id; for real values, a pointer to MODEL_INPUTS floats */
```

`model_step` returns 0, or 1 for a token id that is not in the vocabulary.
"""
_C_WEIGHTS = """
/* file: the MODEL_WEIGHTS_FILE_SIZE bytes of model.weights, aligned to 4 bytes, which stay in memory or flash */
const struct model_weights *weights = model_load(file, MODEL_WEIGHTS_FILE_SIZE);  /* null if they are damaged */
"""


def export_card(specification: ExportSpecification, weights_file: bool = False) -> str:
    """The text of README.md; `weights_file` as in [`save_exported_step`]."""
    tags = [specification.model_type, "recurrent", specification.runtime]
    metadata = ModelCardData(library_name="hf_recurrent", tags=tags)
    inputs = "token ids (B,), int64"
    if specification.input_size is not None:
        inputs = f"real values (B, {specification.input_size})"
    rows = "\n".join(
        f"| `{part.name}` | (B, {', '.join(map(str, part.shape))}) | {part.dtype} |" for part in specification.state
    )
    stored = f"; large weights are {specification.weights}" if specification.weights else ""
    sequence = "a text" if specification.input_size is None else "a sequence"
    outputs, pooled = specification.outputs.replace("_", " "), ""
    if specification.pooling is not None:
        which = {"mean": "the mean of", "last": "the last of"}[specification.pooling]
        pooled = f" The logits of a sequence are {which} its steps' logits."
    streams = f"B is at most {specification.max_streams:,}, the number of streams."
    if specification.max_streams == 1:
        streams = "B is 1."
    return f"""---
{metadata.to_yaml()}
---

# One step of a {specification.model_type} model, exported for {specification.runtime}

`{specification.program}` is a program for {RUNTIMES[specification.runtime].title}{stored}.
Inputs: {inputs}, then the parts of the state. Outputs: {outputs} (B, {specification.num_outputs}), then
the parts of the new state, in the same order. {streams} The state is zero where {sequence} begins.{pooled}

| part of the state | shape | type |
|---|---|---|
{rows}

{_example(specification, weights_file)}
A state works only with these weights, whose SHA-256 is
`{specification.weights_hash}`.
The checksums in `manifest.json` notice damage, not malice; load programs only from sources that you trust.
"""


def _example(specification: ExportSpecification, weights_file: bool) -> str:
    if specification.runtime == "c":
        return _C_EXAMPLE.format(
            weights=_C_WEIGHTS if weights_file else "", argument="weights, " if weights_file else ""
        )
    size = specification.input_size
    inputs = 'torch.tensor(list(b"def main():")).split(1)' if size is None else f"torch.rand(10, 1, {size})"
    loading = RUNTIMES[specification.runtime].loading
    return _EXAMPLE.format(inputs=inputs) + f"\nWithout this package, `{loading}` loads the program.\n"
