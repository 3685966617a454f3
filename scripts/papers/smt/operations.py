"""Sequential operations per step of BPTT, SMT or DMT (SMT, appendix "Definitions")."""

from typing import Any

import torch
from torch import Tensor

from hf_recurrent import DmtObjective, SmtObjective
from papers.engine.experiment import Experiment, Settings
from papers.engine.training import measured_run
from papers.smt.models import BPTT, DMT, PAPER_MODEL, SMALL_MODEL, SMT, build_pair

# Nodes of the graph of gradients that only move numbers.
_MOVES = (
    "AccumulateGrad", "Alias", "AsStrided", "Cat", "Clone", "Copy", "Embedding", "Expand", "Gather", "Index",
    "MaskedFill", "Permute", "Reshape", "Roll", "Select", "Slice", "Split", "Squeeze", "Stack", "TBackward", "ToCopy",
    "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View", "Where",
)  # fmt: skip


class SequentialCost(Experiment):
    lines = {BPTT: {}, SMT: {}, DMT: {}}
    shared = {"vocab_size": 256, "future_length": 64}
    sizes = {
        "small": {"sizes": SMALL_MODEL, "lengths": [16, 32, 64, 128]},
        "paper": {"sizes": PAPER_MODEL, "lengths": [64, 128, 256, 512]},
    }

    def run(self, settings: Settings) -> dict[str, Any]:
        with measured_run() as record:
            pair = build_pair(settings["sizes"], settings["vocab_size"], settings["seed"])
            value = {
                str(length): step_operations(*pair, settings["label"], length, settings["future_length"])
                for length in settings["lengths"]
            }
        trained = pair[:1] if settings["label"] == BPTT else pair
        parameters = sum(model.num_parameters() for model in trained)
        return {**record, "device": "the CPU", "value": value, "num_parameters": parameters}


def critical_path(loss: Tensor) -> int:
    """Length of the longest chain of sequential operations that compute `loss`, by its graph of gradients.

    An operation is one that PyTorch differentiates as a whole, such as a linear map, a norm or an attention;
    operations that only move numbers count zero.
    """
    longest: dict[Any, int] = {}
    stack = [loss.grad_fn]
    while stack:
        node = stack[-1]
        inputs = [following for following, _ in node.next_functions if following is not None]
        missing = [following for following in inputs if following not in longest]
        if missing:
            stack.extend(missing)
            continue
        stack.pop()
        counts = not node.name().removeprefix("torch::autograd::").startswith(_MOVES)
        longest[node] = counts + max((longest[following] for following in inputs), default=0)
    return longest[loss.grad_fn]


def step_operations(rnn: Any, teacher: Any, method: str, length: int, future_length: int | None = None) -> int:
    """Sequential operations of an optimizer step, forward and backward, for any batch size.

    Args:
        rnn, teacher: models, which are not changed.
        method: "BPTT", "SMT" or "DMT".
        length: T of BPTT and DMT, and Tc.
        future_length: Tf, by default T.
    """
    return 2 * critical_path(step_loss(rnn, teacher, method, length, future_length or length))


def step_loss(rnn: Any, teacher: Any, method: str, length: int, future_length: int) -> Tensor:
    """The loss of a method on two sequences of zeros, with its graph of gradients."""
    ids = torch.zeros(2, length + future_length, dtype=torch.long, device=rnn.device)
    resets = torch.zeros_like(ids, dtype=torch.bool)
    last = torch.full_like(ids[:, :1], length - 1)
    if method == BPTT:
        return rnn(ids[:, :length], shift_labels=ids[:, :length], use_cache=False).loss
    if method == SMT:
        objective = SmtObjective(rnn, teacher, context_length=length, future_length=future_length)
        return objective(ids, ids, resets, last).total
    objective = DmtObjective(rnn, teacher, context_length=length)
    return objective(ids[:, :length], ids[:, :length], resets[:, :length], last, 0).total
