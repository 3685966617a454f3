"""Number of users for which a server of a model has room and time."""

import time
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from hf_recurrent.modeling.block.recurrent_state import RecurrentState, state_size
from hf_recurrent.planning.report import size
from hf_recurrent.stock_models.with_state import with_state

# Of a stored session in addition to its state: its row, id and position.
_OVERHEAD = 1024
_SECONDS = 0.5  # of one measurement


@dataclass(frozen=True)
class ServingCapacity:
    """States and users of a server.

    Args:
        state_bytes: of one text.
        weight_bytes: of the model, once a process.
        states_per_gb: that memory or disk has room for.
        rows: texts of one batch.
        tokens_per_second: of one core, in steps of a batch, without a server; its limit.
        users_per_core: at this limit, each of whom gets `user_tokens_per_second`.
        user_tokens_per_second: while a user waits for an answer.
    """

    state_bytes: int
    weight_bytes: int
    states_per_gb: int
    rows: int
    tokens_per_second: float
    users_per_core: int
    user_tokens_per_second: float

    def describe(self, name: str) -> str:
        """A table."""
        rows = {
            "weights, once a process": size(self.weight_bytes),
            "state of a text": size(self.state_bytes),
            "states per GB": f"{self.states_per_gb:,}",
            f"tokens per second of a core, {self.rows} texts": f"{self.tokens_per_second:,.0f}",
            f"users per core, {self.user_tokens_per_second:g} tokens per second each": f"{self.users_per_core:,}",
        }
        width, value = max(map(len, rows)), max(map(len, rows.values()))
        lines = [f"  {words:<{width}}  {shown:>{value}}" for words, shown in rows.items()]
        return "\n".join([name, *lines, "A server takes a part of the steps' time; benchmark_serving.py measures it."])


@torch.no_grad()
def serving_capacity(model: PreTrainedModel, rows: int, user_rate: float) -> ServingCapacity:
    """Count the memory of a text, and measure steps on one core.

    Raises:
        TypeError: the model has no recurrent state.
    """
    model = with_state(model)
    state_bytes = state_size(model.init_state(1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rate = max(_tokens_per_second(model, rows) for _ in range(3))
    finally:
        torch.set_num_threads(threads)
    weights = sum(part.numel() * part.element_size() for part in model.parameters())
    per_gb, users = int(1e9 // (state_bytes + _OVERHEAD)), int(rate // user_rate)
    return ServingCapacity(state_bytes, weights, per_gb, rows, rate, users, user_rate)


def _tokens_per_second(model: PreTrainedModel, rows: int) -> float:
    """Tokens that one core reads in a second of processor time, so that other programs do not count."""
    state: RecurrentState = model.init_state(rows)
    ids = torch.zeros(rows, 1, dtype=torch.long, device=model.device)
    for _ in range(3):  # the first steps compile
        state = model(input_ids=ids, state=state, use_cache=True).state
    steps, begin, wall = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - wall < _SECONDS or steps < 3:
        output = model(input_ids=ids, state=state, use_cache=True)
        ids, state = torch.multinomial(output.logits[:, -1].float().softmax(-1), 1), output.state
        steps += 1
    return rows * steps / (time.process_time() - begin)
