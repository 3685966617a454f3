"""Count memory: the bytes that followed the same contexts before, mixed with the network's prediction.

Two levels of memory. The *long-term* memory is in the weights: tables of the bytes that followed each context (orders
2 to 20, words, indentation, the line above) in the training text, with the text itself for long matches. It is filled
in one pass and frozen in use. The *short-term* memory is in the state of each stream: small tables of the contexts
that came last, the last W bytes for matches, and rows of mixing weights that adapt.

A byte is eight binary decisions, the nodes of a tree. In each context the counts below a node select an adaptive
probability (indirect modelling); sets of weights, selected by small contexts, mix the logits of these probabilities
and of the network; a second layer mixes the sets, and tables refine the result (Mahoney, "Data Compression
Explained", 2013). So the probabilities of all bytes sum to 1.

Shape letters: B streams or batch, T steps, V vocabulary (256).
"""

import importlib
from functools import cache, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..block.tensor_checks import has_values
from .count_memory_layout import REAL_STEP, RESET_STEP, SAMPLED_STEP, Block, MemoryShape, Rates
from .count_memory_reference import CountMemoryReference

STATE_PART = "count_memory"
READING = Rates()  # the shared memory stays as it is
_BYTES = 256
# Integer tensors, also for floating-point numbers: a model's type does not change them.
_TENSOR_TYPES = {"u1": torch.uint8, "<u2": torch.int16, "<u4": torch.int32, "<f4": torch.int32, "<i8": torch.int64}

# Outside of the modules, so that these can be copied, saved and sent.
_memories: WeakKeyDictionary[nn.Module, tuple[list[int], Any]] = WeakKeyDictionary()


@cache
def memory_class(small: bool = False) -> type:
    """The class of the compiled kernel, or the reference where it was not built."""
    try:
        kernel = importlib.import_module("hf_recurrent.kernels.count_memory_cpu")
        if small:
            kernel.small_library()
    except ImportError:
        return CountMemoryReference
    return kernel.Memory


class CountMemory(nn.Module):
    """The long-term memory of a model, and the reading of streams with their short-term memory. It stays on the CPU.

    Any number of threads may read at once; learning needs the memory for itself.
    """

    def __init__(self, shape: MemoryShape):
        super().__init__()
        self.shape = shape
        self.state_bytes = shape.stream.itemsize
        for name, (size, dtype) in shape.buffers().items():
            if dtype.names:
                size, dtype = (*size, dtype.itemsize), np.dtype("u1")
            kind = "u1" if dtype.itemsize == 1 else dtype.str
            self.register_buffer(name, torch.zeros(size, dtype=_TENSOR_TYPES[kind]))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Forget everything."""
        if not has_values(self.slots):
            return
        fresh = {name: np.zeros(size, dtype) for name, (size, dtype) in self.shape.buffers().items()}
        memory_class(self.shape.small)(fresh, self.shape).begin()
        for name, array in fresh.items():
            buffer = getattr(self, name)
            init.copy_(buffer, torch.from_numpy(array.view(buffer.numpy().dtype).reshape(buffer.shape)))

    def _apply(self, fn, recurse=True):
        """Stay on the CPU, or on the meta device."""
        for name, buffer in self._buffers.items():
            moved = fn(buffer)
            self._buffers[name] = moved if moved.device.type in ("cpu", "meta") else moved.cpu()
        return self

    def state_layout(self) -> dict[str, tuple[int, ...]]:
        """Shape of the state of a stream."""
        return {STATE_PART: (self.state_bytes,)}

    def init_state(self, streams: int, device: torch.device | str | None = None) -> Tensor:
        """The states (B, bytes) of streams at the start of a document."""
        return torch.zeros(streams, self.state_bytes, dtype=torch.uint8, device=device)

    def arrays(self) -> dict[str, np.ndarray]:
        """The tensors as the arrays of [`MemoryShape.buffers`], in the same memory."""
        return {
            name: self.get_buffer(name).numpy().view(dtype).reshape(size)
            for name, (size, dtype) in self.shape.buffers().items()
        }

    def _memory(self) -> Any:
        """The kernel's view of the tensors as they are now."""
        places = [tensor.data_ptr() for tensor in self._buffers.values()]
        known = _memories.get(self)
        if known is None or known[0] != places:
            _memories[self] = known = places, memory_class(self.shape.small)(self.arrays(), self.shape)
        return known[1]

    def read(
        self,
        input_ids: Tensor,
        state: Tensor,
        network: Tensor | None = None,
        reset_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        logits_from: int | None = None,
        sampled: bool = False,
        rates: Rates = READING,
        pending: tuple[Tensor, Tensor] | None = None,
        in_place: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Read a block (B, T) after a state (B, bytes), and predict.

        Args:
            network: the network's logits after each step (B, T, V), or, for learning, its logits of the nodes on the
                way to each target (B, T, 8); None without a network.
            attention_mask: false where a step is padding.
            targets: the next bytes, negative for none.
            logits_from: the first step of which the log probabilities of all bytes are returned; None for none.
            sampled: the model itself has chosen the bytes, so the short-term memory does not learn from them.
            pending: bytes of running documents (B, P) uint8 and their numbers (B,) int64, for a memory that learns
                documents when they have ended; changed in place.
            in_place: `state` becomes the new state, which saves a copy; it lies on the CPU then.

        Returns:
            The negative log-likelihoods (B, T) of the targets in nats, 0 where there is none, or None; the log
            probabilities (B, T - logits_from, V) or None; and the new state.

        Raises:
            ValueError: the state is of another memory.
        """
        shape, device = tuple(input_ids.shape), input_ids.device
        self._check_state(state, shape[0], in_place)
        new_state = state if in_place else state.cpu().clone(memory_format=torch.contiguous_format)
        nats = None if targets is None else torch.zeros(shape)
        logits = None if logits_from is None else torch.zeros(shape[0], shape[1] - logits_from, _BYTES)
        block = Block(
            tokens=_on_cpu(input_ids, torch.uint8),
            flags=_flags(shape, reset_mask, attention_mask, sampled),
            targets=None if targets is None else _on_cpu(targets, torch.int32),
            network=None if network is None else _on_cpu(network.detach(), torch.float32),
            nats=nats,
            logits=logits,
            first=logits_from or 0,
            pending=None if pending is None else pending[0],
            pending_used=None if pending is None else pending[1],
        )
        self._memory().read(new_state, rates, block)
        if rates.learns or rates.inserts:
            self._note_change()
        results = (None if tensor is None else tensor.to(device) for tensor in (nats, logits))
        return *results, new_state.to(device)

    def _check_state(self, state: Tensor, streams: int, in_place: bool) -> None:
        if state.dtype != torch.uint8 or state.shape != (streams, self.state_bytes):
            raise ValueError(
                f"`state['{STATE_PART}']` is {state.dtype} of shape {tuple(state.shape)}; the batch and the memory "
                f"need torch.uint8, {(streams, self.state_bytes)}."
            )
        if in_place and not (state.is_cpu and state.is_contiguous()):
            raise ValueError(f"`state['{STATE_PART}']` must be contiguous and on the CPU to be changed in place.")

    def insert(self, document: Tensor, end_byte: int | None = None) -> None:
        """Count the bytes (T,) uint8 of a document, and its end byte, in the long-term memory."""
        self._memory().insert(_on_cpu(document, torch.uint8).numpy(), -1 if end_byte is None else end_byte)
        self._note_change()

    def _note_change(self) -> None:
        """The kernel has written to the tensors, which torch cannot see."""
        for buffer in self._buffers.values():
            torch.autograd.graph.increment_version(buffer)


def _flags(shape: tuple[int, int], reset_mask: Tensor | None, attention_mask: Tensor | None, sampled: bool) -> Tensor:
    """Flags of the steps, (B, T) uint8."""
    flags = _plain_flags(shape, sampled)
    if attention_mask is not None:
        flags = flags * (attention_mask.cpu() != 0)
    if reset_mask is not None:
        flags = flags | RESET_STEP * reset_mask.cpu().to(torch.uint8)
    return flags


@lru_cache(maxsize=64)
def _plain_flags(shape: tuple[int, int], sampled: bool) -> Tensor:
    """Flags without masks, which are only read: a single step takes microseconds."""
    return torch.full(shape, REAL_STEP | SAMPLED_STEP * sampled, dtype=torch.uint8)


def _on_cpu(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to("cpu", dtype).contiguous()
