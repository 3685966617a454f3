"""Memories over time, and the part of the past that answers depend on."""

import numpy as np
import torch

from hf_recurrent import Retrieval, StackOperations, StringCopy
from papers.smt.memory_space import memories_over_time, relevant_past
from papers.smt.models import build_pair

SHAPE = {
    "hidden_size": 8, "num_memory_tokens": 2, "num_attention_heads": 2, "num_hidden_layers": 1, "num_readout_layers": 1
}  # fmt: skip


def test_relevant_past_of_the_past():
    tasks = {
        "retrieval": Retrieval(6, 4),
        "string copy": StringCopy(4, 3),
        "stack operations": StackOperations(8, 2, 3),
    }
    for name, task in tasks.items():
        inputs, targets = task.examples(np.arange(50))
        states = relevant_past(name, inputs)
        # The state before an answer, and the input, decide it.
        seen = {}
        for row, step in np.argwhere(targets >= 0):
            before = states[row, step - 1]
            answer = targets[row, step]
            assert seen.setdefault((before, step if name == "retrieval" else 0), answer) == answer
    assert relevant_past("stack operations", np.array([[1, 2, 0, 0, 2]])).tolist() == [[1, 5, 1, 0, 2]]
    assert relevant_past("retrieval", np.array([[3, 0, 2, 1, 0]])).tolist() == [[0, 1, 3, 3, 3]]


def test_memories_over_time_are_those_of_the_models():
    shape = SHAPE | {"num_memory_tokens": 1, "memory_size": 2, "memory_norm": False}
    rnn, teacher = build_pair(shape, 4, 0)
    inputs, _ = Retrieval(6, 4).examples(np.arange(3))
    labels, own = memories_over_time(rnn, teacher, inputs)
    ids = torch.from_numpy(inputs)
    torch.testing.assert_close(labels[:, 3], teacher.encode(ids[:, :4]).flatten(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own[:, 5], rnn(ids, use_cache=True).state["memory"].flatten(1), atol=1e-5, rtol=1e-5)
