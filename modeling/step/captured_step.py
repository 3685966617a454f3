"""One byte of all streams as one CUDA graph.

A step is hundreds of small operations, whose launches take longer than their work. A graph of them is launched at
once, on tensors of its own: inputs are copied in, results out.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..block.recurrent_state import RecurrentState, check_state
from .module_watch import is_plain_module

# Single steps before a graph is captured: a capture takes as long as dozens of steps.
_STEPS_BEFORE = 2
# Captures share the state of the device's random generator, so that only one runs at a time.
_one_at_a_time = threading.Lock()


@contextmanager
def capturing(device: torch.device) -> Iterator[None]:
    """Around a capture; one that fails would leave its stream current, and the random generator unusable."""
    with _one_at_a_time:
        if device.type != "cuda":
            yield
            return
        generator = torch.cuda.default_generators[device.index]
        state = generator.get_state()
        try:
            with torch.cuda.stream(torch.cuda.current_stream(device)):
                yield
        except RuntimeError:
            fresh = torch.Generator(device)
            fresh.set_state(state)
            generator.graphsafe_set_state(fresh.graphsafe_get_state())
            raise


def warm_up(run: Callable[[], object]) -> None:
    """Run twice on a stream of its own: libraries set themselves up, and kernels are compiled, at their first call."""
    current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(current)
    with torch.cuda.stream(aside):
        for _ in range(2):
            run()
    current.wait_stream(aside)


def copies_of(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of a graph's results, which it will write to again."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def _record(step: Callable[[], list[Tensor]], device: torch.device) -> tuple[list[Tensor], Callable[[], None]]:
    """The tensors that hold the results of `step`, and a function that runs it again."""
    with torch.cuda.device(device):
        warm_up(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = step()
    return results, graph.replay


class CapturedStep:
    """The step of one model for one shape of inputs, captured after a few steps without a graph."""

    def __init__(self, model: nn.Module, hidden: Tensor, weights: str | None = None):
        self.wanted = all(map(is_plain_module, model.modules()))
        self.steps = 0
        self.names: list[str] = []
        self.inputs: list[Tensor] = []
        self.results: list[Tensor] = []
        self.replay: Callable[[], None] | None = None
        self.lock = threading.Lock()

    @staticmethod
    def is_supported(model: nn.Module, hidden: Tensor) -> bool:
        """True for embedded inputs of a model of layers."""
        return hidden.is_floating_point() and hasattr(model, "read_layers")

    @staticmethod
    def accepts(hidden: Tensor) -> bool:
        """True on the default stream: steps on concurrent ones would overwrite each other's results."""
        default = torch.cuda.default_stream(hidden.device)
        return torch.cuda.current_stream(hidden.device) == default and not torch.cuda.is_current_stream_capturing()

    @staticmethod
    def key(hidden: Tensor) -> tuple:
        """Inputs with the same key share a graph."""
        return hidden.dtype, hidden.device, hidden.shape

    def run(self, model: nn.Module, hidden: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState] | None:
        """See [`run_single_step`]."""
        # Copies into the graph's inputs would convert what `forward` refuses.
        shapes = {name: torch.Size((len(hidden), *shape)) for name, shape in model.layer_layout().items()}
        check_state(state, shapes, hidden.device)
        if any(tensor.device != hidden.device for tensor in state.values()):
            return None
        with self.lock:
            self.steps += 1
            if self.replay is None and self.wanted and self.steps > _STEPS_BEFORE:
                self._make_graph(model, hidden, state)
            if self.replay is None:
                return None
            torch._foreach_copy_(self.inputs, [hidden, *(state[name] for name in self.names)])
            self.replay()
            hidden, *parts = copies_of(self.results)
        return hidden, dict(zip(self.names, parts, strict=True))

    def _make_graph(self, model: nn.Module, hidden: Tensor, state: RecurrentState) -> None:
        """Capture the step; after a failure, never try again."""

        def step() -> list[Tensor]:
            hidden, *parts = self.inputs
            hidden, new_state, _ = model.read_layers(hidden, dict(zip(self.names, parts, strict=True)))
            return [hidden, *(new_state[name] for name in self.names)]

        try:
            # Tensors made in inference mode could not be written outside of it.
            with capturing(hidden.device), torch.inference_mode(False), torch.no_grad():
                self.names = list(state)
                self.inputs = [torch.zeros_like(tensor) for tensor in (hidden, *state.values())]
                self.results, self.replay = _record(step, hidden.device)
        except RuntimeError as error:
            self.wanted = False
            warnings.warn(f"Single bytes run without a CUDA graph, which is slower: {error}", stacklevel=2)
