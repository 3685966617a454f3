"""The layers of a training block as two CUDA graphs, one forward and one backward.

The launches of small kernels take longer than the kernels: a step of a small model waits for Python. A graph launches
all of them at once, on tensors of its own: inputs are copied in, results and gradients out.

Shape letters: B streams, T steps, M model width.
"""

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..block.recurrent_state import RecurrentState
from ..block.training_kernels import is_plain_layer
from .captured_step import capturing, copies_of, warm_up
from .module_watch import is_plain_module

# Blocks of one shape before its capture, which takes as long as several: the odd last block of an evaluation has none.
_BLOCKS_BEFORE = 2
_DEVICES = {"cuda"}
_active_training = threading.local()


class _Recording(NamedTuple):
    """Static tensors of a capture, and the two functions that replay on them."""

    results: list[Tensor]  # the output, then the new state
    grad_output: Tensor
    grads: list[Tensor | None]  # of the tensors that need one, in their order
    forward: Callable[[], None]
    backward: Callable[[], None]


def _record_block(run: Callable[[], list[Tensor]], wanted: list[Tensor]) -> _Recording:
    """Capture `run`, on static tensors, and the gradients of its first result by the `wanted` tensors."""

    def differentiate(output: Tensor, grad: Tensor) -> list[Tensor | None]:
        return [*torch.autograd.grad(output, wanted, grad, allow_unused=True)]

    def run_both() -> None:
        output = run()[0]
        differentiate(output, torch.zeros_like(output))

    with torch.cuda.device(wanted[0].device):
        warm_up(run_both)
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, capture_error_mode="thread_local"):
            results = run()
        grad_output = torch.zeros_like(results[0])
        with torch.cuda.graph(backward, forward.pool(), capture_error_mode="thread_local"):
            grads = differentiate(results[0], grad_output)
    return _Recording([result.detach() for result in results], grad_output, grads, forward.replay, backward.replay)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, hidden, *parameters):
        ctx.block, ctx.turn = block, block.turn
        results = block.replay_forward(hidden)
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, *_):
        if grad is None:
            return None, *[None] * len(ctx.block.needs_grad)
        if ctx.turn != ctx.block.turn:
            raise RuntimeError("A block from a CUDA graph has one backward pass; set `cuda_graphs` to False for more.")
        return None, *ctx.block.replay_backward(grad)


class CapturedBlock:
    """The layers of one model for one kind of block ([`CapturedTraining`] chooses it)."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.blocks = self.turn = 0
        self.recording: _Recording | None = None
        self.failed = False
        self.last: Callable[[], object | None] = lambda: None  # the output of the last replay, if anything holds it

    def run(
        self, model: nn.Module, hidden: Tensor, state: RecurrentState, reset_mask: Tensor | None
    ) -> tuple[Tensor, RecurrentState] | None:
        """The output (B, T, M) and the new state; None where the layers have to run without a graph."""
        self.blocks += 1
        if self.recording is None and not self.failed and self.blocks > _BLOCKS_BEFORE:
            self._capture(model, hidden, state, reset_mask)
        # Until its backward pass, the graph's memory belongs to the block before.
        if self.recording is None or self.last() is not None:
            return None
        self.turn += 1
        rest = [state[name] for name in self.names] + ([] if reset_mask is None else [reset_mask])
        torch._foreach_copy_(self.inputs[1:], rest)
        output, *parts = _Replay.apply(self, hidden, *self.parameters)
        self.last = weakref.ref(output.grad_fn)
        return output, dict(zip(self.names, parts, strict=True))

    def replay_forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Copies of the results for these inputs."""
        self.inputs[0].detach().copy_(hidden)
        self.recording.forward()
        return tuple(copies_of(self.recording.results))

    def replay_backward(self, grad: Tensor) -> list[Tensor | None]:
        """Copies of the gradients of the hidden states and all parameters."""
        self.recording.grad_output.copy_(grad)
        self.recording.backward()
        self.turn += 1  # its activations are gone
        self.last = lambda: None
        copies = iter(copies_of([grad for grad in self.recording.grads if grad is not None]))
        wanted = iter(None if grad is None else next(copies) for grad in self.recording.grads)
        return [next(wanted) if needed else None for needed in self.needs_grad]

    def _capture(self, model: nn.Module, hidden: Tensor, state: RecurrentState, reset_mask: Tensor | None) -> None:
        """Capture both passes; after a failure, never try again."""
        self.names = [*state]
        given = [hidden, *state.values(), *([] if reset_mask is None else [reset_mask])]
        self.inputs = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in given]
        self.inputs[0].requires_grad_(hidden.requires_grad)
        # The same memory: gradients of the parameters themselves may belong to a stream that cannot be captured.
        weights = {
            f"model.{name}": nn.Parameter(parameter.detach(), parameter.requires_grad)
            for name, parameter in model.named_parameters()
        }
        self.needs_grad = [tensor.requires_grad for tensor in (self.inputs[0], *weights.values())]
        wanted = [tensor for tensor in (self.inputs[0], *weights.values()) if tensor.requires_grad]
        layers = _Layers(model)

        def run() -> list[Tensor]:
            hidden, *rest = self.inputs
            parts, resets = rest[: len(self.names)], rest[-1] if reset_mask is not None else None
            state = dict(zip(self.names, parts, strict=True))
            output, new_state = functional_call(layers, weights, (hidden, state, resets))
            return [output, *(new_state[name] for name in self.names)]

        device = hidden.device.type
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        try:
            # Weights that autocast has cached would keep the values of the capture for ever.
            with capturing(hidden.device), torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
                self.recording = _record_block(run, wanted)
        except RuntimeError as error:
            self.failed = True
            warnings.warn(f"Training runs without CUDA graphs, which is slower: {error}", stacklevel=2)


class _Layers(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, hidden, state, reset_mask):
        return self.model.read_layers(hidden, state, reset_mask)[:2]


class CapturedTraining:
    """Replays the layers of one model while it is [`active`], where that gives the numbers of the layers themselves.

    Gradients go to the hidden states and the weights, not to the state before the block and not from the one after it.
    A graph keeps the memory of a block's activations, so that only the last shape has one.
    """

    def __init__(self, model: nn.Module):
        self.model = weakref.ref(model)
        self.clear()

    def clear(self) -> None:
        """Drop the graphs and their memory."""
        self.key: tuple | None = None
        self.block: CapturedBlock | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the block, this thread's blocks of the model are replayed."""
        before, _active_training.training = getattr(_active_training, "training", None), self
        try:
            yield
        finally:
            _active_training.training = before

    def run(
        self, model: nn.Module, hidden: Tensor, state: RecurrentState, reset_mask: Tensor | None
    ) -> tuple[Tensor, RecurrentState] | None:
        """See [`CapturedBlock.run`]."""
        parameters = [*model.parameters()]
        key = (
            hidden.dtype, hidden.shape, hidden.device, hidden.requires_grad, reset_mask is None,
            *((name, part.dtype, part.shape) for name, part in state.items()),
            *((id(parameter), parameter.data_ptr(), parameter.requires_grad) for parameter in parameters),
            torch.is_autocast_enabled(hidden.device.type), torch.get_autocast_dtype(hidden.device.type),
        )  # fmt: skip
        if self.block is None or key != self.key:
            if self.block is not None and self.block.last() is not None:
                return None
            self.key, self.block = key, CapturedBlock(parameters)
        return self.block.run(model, hidden, state, reset_mask)


def _may_replay(model: nn.Module, hidden: Tensor, state: RecurrentState) -> bool:
    return (
        torch.is_grad_enabled()
        and hidden.device.type in _DEVICES
        and model.training
        and not model.gradient_checkpointing
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and not (hidden.is_cuda and torch.cuda.is_current_stream_capturing())
        and not any(part.requires_grad for part in state.values())
        and all(map(_is_replayed_as_it_stands, model.modules()))
    )


def _is_replayed_as_it_stands(module: nn.Module) -> bool:
    parameters = (parameter for parameter in module._parameters.values() if parameter is not None)
    is_plain = is_plain_module(module) and is_plain_layer(module, type(module))
    return is_plain and all(type(parameter) is nn.Parameter for parameter in parameters)


def run_captured_block(
    model: nn.Module, hidden: Tensor, state: RecurrentState, reset_mask: Tensor | None
) -> tuple[Tensor, RecurrentState] | None:
    """The output (B, T, M) and the layers' new state of a training block, from CUDA graphs.

    None where the layers have to run themselves. Not to be called while torch compiles.
    """
    training = getattr(_active_training, "training", None)
    if training is None or training.model() is not model or not _may_replay(model, hidden, state):
        return None
    return training.run(model, hidden, {name: state[name] for name in model.layer_layout()}, reset_mask)
