"""One step of a model in each of its forms, for benchmarks: `forward`, the compiled step and the exported programs.

Shape letters: B streams.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from benchmarking import build_model
from transformers import PreTrainedModel

from hf_recurrent import save_exported_step
from hf_recurrent.checkpoints.weight_hashing import weights_hash
from hf_recurrent.export.exported_step import read_specification
from hf_recurrent.export.runtimes import RUNTIMES
from hf_recurrent.modeling.step.single_step import find_single_step, plain_forward

Step = Callable[[], object]
OURS = ("compiled", "direct", "forward")
PEERS = ("torch", "aoti", "onnx", "executorch")
NAMES = {
    "forward": "forward",
    "compiled": "compiled step",
    "direct": "compiled step, without `model()`",
    "torch": "torch.export",
    "aoti": "AOTInductor",
    "onnx": "onnxruntime",
    "executorch": "ExecuTorch",
}


def bytes_read(model: PreTrainedModel, weights: str | None = None) -> int:
    """Bytes of weights that one token needs: matrices in the type of `weights`, one row of an embedding of its own."""
    width = {None: 4, "bfloat16": 2, "int8": 1}[weights]
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    total = sum((width if each.dim() == 2 else each.element_size()) * each.numel() for each in model.parameters())
    return total - (0 if embedding is head else embedding.numel() * width)


def products(model: PreTrainedModel) -> int:
    """Floating-point operations of one token's matrix products."""
    return 2 * bytes_read(model, "int8")


class Steps:
    """A model's steps by name, each reading one token of every stream after the other.

    Args:
        name: preset, as `build_model` takes it.
        streams: B.
        folder: of exported programs, which are written once and then found again.
    """

    def __init__(self, name: str, streams: int = 1, folder: Path | None = None):
        self.name, self.streams, self.folder, self.model = name, streams, folder, build_model(name).eval()
        self.ids = torch.randint(1, 256, (streams, 1))

    def forward(self, weights: str | None) -> Step:
        """The model's `forward`, without a fast step."""
        state = self.model.init_state(self.streams)

        @torch.no_grad()
        def step():
            nonlocal state
            with plain_forward():
                state = self.model(self.ids, state=state).state

        return step

    def compiled(self, weights: str | None) -> Step:
        """The compiled step, called as `model(...)`."""
        self.model.compile_step(weights)
        state = self.model.init_state(self.streams)

        @torch.no_grad()
        def step():
            nonlocal state
            state = self.model(self.ids, state=state).state

        return step

    def direct(self, weights: str | None) -> Step:
        """The compiled step, called as an exported program is: without the checks and outputs of `model(...)`."""
        self.model.compile_step(weights)
        state = self.model.init_state(self.streams)
        with torch.no_grad():
            compiled = find_single_step(self.model, self.ids)

        def step():
            nonlocal state
            state = compiled.run(self.model, self.ids, state)[1]

        return step

    def exported(self, runtime: str, weights: str | None) -> Step:
        """An exported program, called without checks of its inputs."""
        path = self.export(runtime, weights)
        if runtime == "executorch":
            one_thread()
        run = RUNTIMES[runtime].load(path / read_specification(path).program)
        tensors = [self.ids[:, 0], *self.model.init_state(self.streams).values()]

        def step():
            tensors[1:] = run(tensors)[1:]

        return step

    def export(self, runtime: str, weights: str | None) -> Path:
        """The folder of an exported program."""
        folder = self.folder / f"{self.name}-{runtime}-{weights or 'float32'}"
        if folder.exists() and read_specification(folder).weights_hash != weights_hash(self.model):
            raise ValueError(f"`{folder}` was exported from other weights; remove it.")
        if not folder.exists():
            progress(f"exporting {folder.name}")
            save_exported_step(self.model, folder, runtime=runtime, weights=weights)
        return folder

    def get(self, kind: str, weights: str | None = None) -> Step:
        """A step by name of `OURS` or `PEERS`."""
        return getattr(self, kind)(weights) if kind in OURS else self.exported(kind, weights)


def one_thread() -> None:
    """Let ExecuTorch run on one thread; nothing public sets it."""
    from executorch.extension.pybindings import portable_lib

    portable_lib._unsafe_reset_threadpool(torch.get_num_threads())


def repeated(step: Step, count: int) -> Step:
    """The step, `count` times."""

    def run():
        for _ in range(count):
            step()

    return run


def progress(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def no_collection() -> Iterator[None]:
    """Inside the block, Python's garbage collector does not run."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
