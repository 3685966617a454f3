"""Number of users for which a server of a model has room and time."""

import time

import torch
from transformers import PreTrainedModel

from hf_recurrent.modeling.block.recurrent_state import RecurrentState, state_size
from hf_recurrent.planning.report import size
from hf_recurrent.stock_models.with_state import with_state

# Of a stored session in addition to its state: its row, id and position.
_OVERHEAD = 1024
_SECONDS = 0.5  # of one measurement


def describe(name: str, found: dict[str, float]) -> str:
    """The table of [`serving_capacity`]."""
    rows = {
        "weights, once a process": size(found["weight_bytes"]),
        "state of a text": size(found["state_bytes"]),
        "states per GB": f"{found['states_per_gb']:,}",
        f"tokens per second of a core, {found['rows']} texts": f"{found['tokens_per_second']:,.0f}",
        f"users per core, {found['user_tokens_per_second']:g} tokens per second each": f"{found['users_per_core']:,}",
    }
    width, value = max(map(len, rows)), max(map(len, rows.values()))
    lines = [f"  {words:<{width}}  {shown:>{value}}" for words, shown in rows.items()]
    return "\n".join([name, *lines, "A server takes a part of the steps' time; benchmark_serving.py measures it."])


@torch.no_grad()
def serving_capacity(model: PreTrainedModel, rows: int, user_rate: float) -> dict[str, float]:
    """Count the memory of a text, and measure steps on one core with batches of `rows` texts.

    `users_per_core` get `user_rate` tokens per second each, if a server used no time itself.

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
    return {
        "state_bytes": state_bytes,
        "weight_bytes": sum(part.nbytes for part in model.parameters()),
        "states_per_gb": int(1e9 // (state_bytes + _OVERHEAD)),
        "rows": rows,
        "tokens_per_second": rate,
        "users_per_core": int(rate // user_rate),
        "user_tokens_per_second": user_rate,
    }


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
