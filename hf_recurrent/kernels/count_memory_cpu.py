"""The count memory as a compiled kernel: plain C, loaded with ctypes.

Importing this module raises ImportError where the kernel was not built, or was built from another version of its
source. The numbers equal the reference in `modeling/contexts/count_memory_reference.py`, bit for bit.

Shape letters: B streams, T steps.
"""

import ctypes
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .compiled import load_library

if TYPE_CHECKING:  # compression by counts alone starts without transformers
    from hf_recurrent.modeling.contexts.count_memory_layout import Block, MemoryShape, Rates

# Of the results of count_memory_cpu.c and of its large and small form. They differ, since archives name a memory so.
VERSION, LARGE_VERSION, SMALL_VERSION = 3, 6, 7
_POINTER = ctypes.c_void_p
_LEARNS, _INSERTS = 1, 2


def _structure(name: str, fields: Mapping[str, type]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": [*fields.items()]})


_ARRAYS = ("slots", "text", "index", "cells", "weights", "final_weights", "refinement", "counters")
_SIZES = ("slot_bits", "text_bits", "index_bits", "match_bits", "window", "rows")
_Memory = _structure("_Memory", dict.fromkeys(_SIZES, ctypes.c_int64) | dict.fromkeys(_ARRAYS, _POINTER))
_Rates = _structure(
    "_Rates",
    dict.fromkeys(("weights", "first_weights", "final", "rows"), ctypes.c_float)
    | dict.fromkeys(("least_cell", "refinement", "mode"), ctypes.c_int32),
)
_BLOCK_ARRAYS = (
    "tokens", "flags", "targets", "network", "nats", "probabilities", "logits", "pending", "pending_used",
)  # fmt: skip
_Block = _structure(
    "_Block",
    dict.fromkeys(("streams", "steps", "network_width", "first", "pending_size"), ctypes.c_int64)
    | dict.fromkeys(_BLOCK_ARRAYS, _POINTER),
)
_Coder = _structure(
    "_Coder",
    dict.fromkeys(("low", "range"), ctypes.c_uint32)
    | dict.fromkeys(("used", "size"), ctypes.c_int64)
    | {"bytes": _POINTER},
)
_Coding = _structure(
    "_Coding",
    dict.fromkeys(("streams", "steps", "decodes"), ctypes.c_int64)
    | dict.fromkeys(("bytes", "network", "coder"), _POINTER),
)
_FUNCTIONS = {
    "begin": (_POINTER,),
    "read": (_POINTER, _POINTER, _POINTER, _POINTER),
    "insert": (_POINTER, _POINTER, ctypes.c_int64, ctypes.c_int32),
    "begin_coder": (_POINTER, ctypes.c_int32),
    "finish_coder": (_POINTER,),
    "code": (_POINTER, _POINTER, _POINTER, _POINTER),
}


def _loaded(name: str, version: int) -> ctypes.CDLL:
    library = load_library(name, "hf_count_memory_version", version)
    for function, arguments in _FUNCTIONS.items():
        function = getattr(library, f"hf_count_memory_{function}")
        function.argtypes, function.restype = arguments, None
    return library


_library = _loaded("_count_memory_cpu", VERSION)


@cache
def large_library() -> ctypes.CDLL:
    """The kernel of large memories, loaded on first use; raises ImportError as this module does."""
    return _loaded("_count_memory_large_cpu", LARGE_VERSION)


@cache
def small_library() -> ctypes.CDLL:
    """The same of small memories."""
    return _loaded("_count_memory_small_cpu", SMALL_VERSION)


def _address(array: Any | None) -> int | None:
    """The address of an array or a tensor, which may be None."""
    if array is None:
        return None
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()


@lru_cache(maxsize=16)
def _rates(rates: "Rates"):
    return ctypes.byref(_Rates(*rates[:6], _LEARNS * rates.learns + _INSERTS * rates.inserts))


class Memory:
    """A long-term memory in arrays of [`MemoryShape.buffers`]; raises ImportError as this module does."""

    def __init__(self, arrays: Mapping[str, np.ndarray], shape: "MemoryShape"):
        self._arrays = arrays  # keeps them alive
        self._library = large_library() if shape.large else small_library() if shape.small else _library
        sizes = (shape.slots, shape.text, arrays["index"].shape[1])
        self._struct = _Memory(
            *(size.bit_length() - 1 for size in sizes),
            shape.match_bits,
            shape.window,
            shape.rows,
            *(_address(arrays[name]) for name in _ARRAYS),
        )
        self._pointer = ctypes.byref(self._struct)

    def begin(self) -> None:
        """Fill arrays of zeros with the values before the first byte."""
        self._library.hf_count_memory_begin(self._pointer)

    def read(self, states: Any, rates: "Rates", block: "Block") -> None:
        """Read a block; states (B, bytes) uint8 and results are changed in place, arrays only if the memory learns."""
        streams, steps = block.tokens.shape
        width = 0 if block.network is None else block.network.shape[-1]
        size = 0 if block.pending is None else block.pending.shape[1]
        addresses = [_address(getattr(block, name)) for name in _BLOCK_ARRAYS]
        self._library.hf_count_memory_read(
            self._pointer,
            _address(states),
            _rates(rates),
            ctypes.byref(_Block(streams, steps, width, block.first, size, *addresses)),
        )

    def insert(self, document: np.ndarray, end: int = -1) -> None:
        """Count the bytes (T,) uint8 of a document, and its end byte if it is not negative."""
        self._library.hf_count_memory_insert(self._pointer, document.ctypes.data, len(document), end)


class Coder:
    """The range coder of one piece of code: of an encoder, or of a decoder if there is a code.

    Args:
        code: to be decoded; None for an encoder.
        room: bytes that an encoder may write; a coded byte takes 17 at most.
    """

    def __init__(self, code: bytes | None = None, room: int = 0):
        self._decodes = code is not None
        self._bytes = np.zeros(room, np.uint8) if code is None else np.frombuffer(code, np.uint8)
        self._struct = _Coder(0, 0, 0, len(self._bytes), _address(self._bytes))
        self._pointer = ctypes.byref(self._struct)
        _library.hf_count_memory_begin_coder(self._pointer, self._decodes)

    @property
    def size(self) -> int:
        """Bytes of code so far."""
        return self._struct.used

    def code(self, symbols: np.ndarray, *arguments: Any) -> None:
        """Encode symbols, or decode them in place; [`CodingCall`] has the arguments."""
        CodingCall(self, symbols, *arguments).run()

    def finish(self) -> bytes:
        """The code of everything that was encoded."""
        _library.hf_count_memory_finish_coder(self._pointer)
        return self._bytes[: self._struct.used].tobytes()


class CodingCall:
    """A call that can be repeated: with the same arrays, whose values may change between calls.

    Args:
        coder: encodes or decodes the symbols of B streams.
        symbols: (T, B) uint8; a decoder writes them.
        network: (T, B, 256) float32, the network's logits; None without a network.
        memory: mixes in its predictions and learns; None for the network alone.
        states: (>= B, bytes) uint8, the memory's states of the streams; changed in place.
        rates: how fast the memory learns.
    """

    def __init__(
        self,
        coder: Coder,
        symbols: np.ndarray,
        network: np.ndarray | None = None,
        memory: Memory | None = None,
        states: np.ndarray | None = None,
        rates: "Rates | None" = None,
    ):
        self.coder, self._arrays = coder, (symbols, network, memory, states)  # keeps them alive
        steps, streams = symbols.shape
        self._job = _Coding(
            streams, steps, coder._decodes, _address(symbols), _address(network), ctypes.addressof(coder._struct)
        )
        self._library = _library if memory is None else memory._library
        self._arguments = (
            None if memory is None else memory._pointer,
            _address(states),
            None if rates is None else _rates(rates),
            ctypes.byref(self._job),
        )

    def run(self) -> None:
        """Encode or decode the symbols."""
        self._library.hf_count_memory_code(*self._arguments)
