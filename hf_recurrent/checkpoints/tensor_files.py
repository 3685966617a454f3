"""safetensors files, written and read tensor by tensor, so that no process holds all of them in memory.

The format (https://github.com/huggingface/safetensors): the length of the header as 8 bytes, the header as JSON, the
values of all tensors one after another. The package `safetensors` writes it from a dictionary of whole tensors only.
"""

import json
import os
from collections.abc import Mapping

import torch
from safetensors import SafetensorError, safe_open

from hf_recurrent.checkpoints.sharded_tensors import whole

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_ALIGNMENT = 8  # of the header, in bytes


def write_tensors(
    tensors: Mapping[str, torch.Tensor], path: str | os.PathLike | None, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file tensor by tensor; raise a TypeError if safetensors has no such type.

    Args:
        tensors: by name, on any device; of sharded ones, all processes give their parts at the same time.
        path: None in a process that only takes part in gathering sharded tensors.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    # Wide types first, so that every tensor is aligned to its type.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise TypeError(f"A checkpoint cannot hold `{name}` of type {tensor.dtype}.")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    if path is None:
        for name in names:
            whole(tensors[name])
        return
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            values = whole(tensors[name]).cpu().contiguous().reshape(-1)
            if values.stride() != (1,):  # one value, expanded
                values = values.clone(memory_format=torch.contiguous_format)
            file.write(values.view(torch.uint8).numpy().data)


def open_tensors(path: str | os.PathLike) -> safe_open:
    """Open a safetensors file of a checkpoint; raise a ValueError if it is missing or damaged."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"The checkpoint file `{os.fspath(path)}` is missing or damaged: {error}.") from error
