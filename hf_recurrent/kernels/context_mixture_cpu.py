"""Mixing of a model's probabilities with counts of the bytes that followed the same contexts before.

`context_mixture_cpu.c` is plain C, loaded with ctypes. Importing this module raises ImportError where the kernel was
not built, or was built from another version of its source.

Shape letters: B streams, V vocabulary (256).
"""

import ctypes

import numpy as np
import torch

from .compiled import load_library

_VERSION = 1  # of the results of context_mixture_cpu.c
_POINTER = ctypes.c_void_p
_library = load_library("_context_mixture_cpu", "hf_context_mixture_version", _VERSION)
_library.hf_context_mixture_size.argtypes = (ctypes.c_int64, ctypes.c_int64)
_library.hf_context_mixture_size.restype = ctypes.c_int64
_library.hf_context_mixture_begin.argtypes = (_POINTER, ctypes.c_int64, ctypes.c_int64)
_library.hf_context_mixture_begin.restype = None
_library.hf_context_mixture_predict.argtypes = (_POINTER, _POINTER, _POINTER)
_library.hf_context_mixture_predict.restype = None
_library.hf_context_mixture_read.argtypes = (_POINTER, _POINTER)
_library.hf_context_mixture_read.restype = None
_BYTES = 256


class ContextMixture:
    """Learns from every byte how likely each byte is in its contexts, and how far to trust them and the model.

    Args:
        streams: B; they share what they learn.
        line_bits: binary logarithm of the number of lines of 64 bytes that hold what contexts were followed by.
    """

    def __init__(self, streams: int, line_bits: int):
        self.streams, self.line_bits = streams, line_bits
        self.memory = torch.zeros(_library.hf_context_mixture_size(streams, line_bits), dtype=torch.uint8)
        _library.hf_context_mixture_begin(self.memory.data_ptr(), streams, line_bits)

    def predict(self, model: np.ndarray) -> np.ndarray:
        """Mixed probabilities (B, V) from the model's (B, V), float64."""
        model = np.ascontiguousarray(model, np.float64)
        if model.shape != (self.streams, _BYTES):
            raise ValueError(f"`model` has the shape {model.shape}; it must be {(self.streams, _BYTES)}.")
        mixed = np.empty_like(model)
        _library.hf_context_mixture_predict(self.memory.data_ptr(), model.ctypes.data, mixed.ctypes.data)
        return mixed

    def read(self, tokens: np.ndarray) -> None:
        """Learn from the next byte (B,) of every stream, after its prediction."""
        tokens = np.ascontiguousarray(tokens, np.uint8)
        if tokens.shape != (self.streams,):
            raise ValueError(f"`tokens` has the shape {tokens.shape}; it must be {(self.streams,)}.")
        _library.hf_context_mixture_read(self.memory.data_ptr(), tokens.ctypes.data)

    def load(self, memory: torch.Tensor) -> None:
        """Continue with a copy of the `memory` of such a mixture; the next call has to be [`predict`].

        Raises:
            ValueError: it belongs to another one.
        """
        own = self.memory[:_FIXED].tolist()
        if memory.dtype != torch.uint8 or memory.shape != self.memory.shape or memory[:_FIXED].tolist() != own:
            raise ValueError("The saved mixture has another size.")
        self.memory.copy_(memory)


_FIXED = 16  # bytes of `streams` and `line_bits`, on which all addresses depend
