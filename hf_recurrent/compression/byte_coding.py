"""Coding of the bytes of B streams: by counts of contexts, by a network's predictions, or by a mixture of both.

Counts come from a count memory that learns every byte after it was coded. The same bits come from every compiler
and processor; only a network ties an archive to a machine. Nothing here imports torch, so that counts alone start at
once.

Shape letters: B streams, T steps.
"""

import importlib.util
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import hf_recurrent

if TYPE_CHECKING:
    from hf_recurrent.compression.predictors import Predictor
    from hf_recurrent.kernels.count_memory_cpu import Coder
    from hf_recurrent.modeling.contexts.count_memory_layout import MemoryShape

_LAYOUT = "modeling/contexts/count_memory_layout.py"
_LEAST_SLOTS, _MOST_SLOTS, _MOST_LARGE_SLOTS = 1 << 10, 1 << 20, 1 << 19
_LEAST_TEXT, _MOST_TEXT = 1 << 12, 1 << 24
_MOST_WINDOW = 1 << 20
_CHUNK = 512  # steps
# Tuned on files that no document reports: plays, Python, logs and help texts.
_FIRST_COUNT = 6  # of the cells
_FIRST_WEIGHT, _LARGE_FIRST_WEIGHT = np.float32(0.08), np.float32(0.04)  # of the mixing weights
_RATES = {"weights": 0.006, "first_weights": 0.04, "final": 0.002, "least_cell": 200, "refinement": 10}
_LARGE_RATES = _RATES | {"final": 0.001}


@cache
def require_kernel() -> ModuleType:
    """The compiled kernel of the count memory, with its coder; an ImportError says so if it was not built."""
    try:
        kernel = importlib.import_module("hf_recurrent.kernels.count_memory_cpu")
        kernel.large_library()
        return kernel
    except ImportError as error:
        raise ImportError(
            f"compression needs the compiled kernel of the count memory: {error}; install hf-recurrent where a C "
            "compiler is available."
        ) from error


@cache
def memory_layout() -> ModuleType:
    """The module `count_memory_layout`. Its package imports transformers, which takes seconds, so it is read alone."""
    name = f"hf_recurrent.{_LAYOUT.removesuffix('.py').replace('/', '.')}"
    if name in sys.modules:
        return sys.modules[name]
    path = next(path for folder in hf_recurrent.__path__ if (path := Path(folder, _LAYOUT)).is_file())
    spec = importlib.util.spec_from_file_location("hf_recurrent.compression._count_memory_layout", path)
    layout = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(layout)
    return layout


class Counts(NamedTuple):
    """A count memory to begin with; it is changed by coding."""

    shape: "MemoryShape"
    arrays: Mapping[str, np.ndarray]


def counts_version(large: bool = True) -> int:
    """The version of the kernel's results in large memories, or in others. An archive names its memory by it."""
    return require_kernel().LARGE_VERSION if large else require_kernel().VERSION


def empty_counts(size: int, large: bool = True) -> Counts:
    """An empty memory for `size` bytes of data; its sizes depend on nothing else."""

    def power_of_two(least: int, wanted: int, most: int) -> int:
        return min(max(1 << max(wanted - 1, 0).bit_length(), least), most)

    slots = power_of_two(_LEAST_SLOTS, size // 4, _MOST_LARGE_SLOTS if large else _MOST_SLOTS)
    text = power_of_two(_LEAST_TEXT, size, _MOST_TEXT)
    shape = memory_layout().MemoryShape(slots, text, min(text, _MOST_WINDOW), 0, large)
    arrays = {name: np.zeros(size, dtype) for name, (size, dtype) in shape.buffers().items()}
    require_kernel().Memory(arrays, shape).begin()
    arrays["cells"][..., 1] = _FIRST_COUNT
    weights = arrays["weights"][:, : shape.bias]
    weights[weights > 0] = _LARGE_FIRST_WEIGHT if large else _FIRST_WEIGHT
    return Counts(shape, arrays)


class ByteCoding:
    """Encodes or decodes bytes, and learns from them, with a network, with counts, or with both."""

    def __init__(self, streams: int, predictor: "Predictor | None", counts: Counts | None):
        self.streams, self.counts = streams, counts
        self._predictor, self._memory, self._states, self._rates = predictor, None, None, None
        self._call, self._symbols, self._logits = None, np.zeros((1, 0), np.uint8), None
        if counts is not None:
            self._memory = require_kernel().Memory(counts.arrays, counts.shape)
            rates = _LARGE_RATES if counts.shape.large else _RATES
            self._states = np.zeros((streams, counts.shape.stream.itemsize), np.uint8)
            self._rates = memory_layout().Rates(**rates, learns=True, inserts=True)

    @property
    def chunk(self) -> int:
        """Steps that are coded in one call; a network reads each byte before it predicts the next."""
        return _CHUNK if self._predictor is None else 1

    def code(self, coder: "Coder", symbols: np.ndarray) -> None:
        """Encode symbols (T, n) uint8 of the first n streams, or decode them in place, and read them.

        T is at most `chunk`. The other streams have ended.
        """
        memory = self._memory, self._states, self._rates
        if self._predictor is None:
            coder.code(symbols, None, *memory)
            return
        width, call = symbols.shape[1], self._call
        if call is None or call.coder is not coder or width != self._symbols.shape[1]:
            self._symbols, self._logits = np.zeros((1, width), np.uint8), np.zeros((1, width, 256), np.float32)
            self._call = call = require_kernel().CodingCall(coder, self._symbols, self._logits, *memory)
        self._symbols[:] = symbols
        self._logits[:] = self._predictor.logits[:width]
        call.run()
        symbols[:] = self._symbols
        self._predictor.read(symbols[0] if width == self.streams else np.pad(symbols[0], (0, self.streams - width)))

    def state_dict(self) -> dict[str, Any]:
        """JSON values and tensors for [`load_state_dict`]."""
        import torch

        values: dict[str, Any] = {} if self._predictor is None else {"predictor": self._predictor.state_dict()}
        return values | {name: torch.from_numpy(array) for name, array in self._changing().items()}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Continue from the values of [`state_dict`]."""
        if self._predictor is not None:
            self._predictor.load_state_dict(values["predictor"])
        for name, array in self._changing().items():
            saved = values[name].numpy()
            if saved.shape != array.shape or saved.dtype != array.dtype:
                raise ValueError(f"`{name}` has another size.")
            array[...] = saved

    def _changing(self) -> dict[str, np.ndarray]:
        """The bytes of the memory and of the streams' states."""
        if self.counts is None:
            return {}
        arrays = {name: array.view(np.uint8).reshape(-1) for name, array in self.counts.arrays.items()}
        return arrays | {"states": self._states}
