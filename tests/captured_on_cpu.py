"""A stand-in for the CUDA graphs of a training block, for machines without a GPU: it runs the layers again."""

import pytest
import torch

from hf_recurrent.modeling.step import captured_block


def run_again(run, wanted):
    """As two graphs: results and gradients stay where they were at first, and one backward pass follows a forward."""
    kept = {}

    def forward():
        with torch.enable_grad():
            kept["results"] = run()
        for result, new in zip(results, kept["results"], strict=True):
            result.copy_(new.detach())

    def backward():
        for grad, new in zip(grads, differentiate(kept.pop("results")[0], grad_output), strict=True):
            if grad is not None:
                grad.copy_(new)

    def differentiate(output, grad):
        return torch.autograd.grad(output, wanted, grad, allow_unused=True)

    first = run()
    results, grad_output = [result.detach().clone() for result in first], torch.zeros_like(first[0])
    grads = [None if grad is None else grad.clone() for grad in differentiate(first[0], grad_output)]
    return captured_block._Recording(results, grad_output, grads, forward, backward)


def capture_on_cpu(monkeypatch):
    """Blocks on the CPU are captured too."""
    monkeypatch.setattr(captured_block, "_record_block", run_again)
    monkeypatch.setattr(captured_block, "_DEVICES", {"cpu"})


GRAPHS = ["a graph", "a stand-in"]  # parameters of a fixture


def device_for(graph):
    """The device of one of `GRAPHS`."""
    if graph == "a stand-in":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return "cuda"
