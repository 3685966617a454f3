"""The surprise of a line: bits of each of its bytes, predicted before the model learns from any of them."""

import math

import numpy as np
import torch
import torch.nn.functional as F

from hf_recurrent.modeling.block.recurrent_state import upcast
from hf_recurrent.online.learner import OnlineLearner

LINE_END = b"\n"


def score_line(learner: OnlineLearner, line: bytes) -> np.ndarray:
    """Bits of every byte of a line after the stream so far, (T,) float32; the learner is unchanged.

    Args:
        learner: it has read at least one byte.
        line: T bytes.
    """
    context = learner.context()
    before = context["input_ids"]
    line_ids = torch.tensor([list(line)], device=before.device)
    with torch.no_grad():
        logits = learner.model(torch.cat([before, line_ids[:, :-1]], 1), state=context["state"], use_cache=True).logits
    nats = F.cross_entropy(upcast(logits[0, before.shape[1] - 1 :]), line_ids[0], reduction="none")
    return nats.cpu().numpy() / math.log(2)
