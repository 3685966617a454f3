"""Four threads generate on one model, and each gets what it gets alone, bit for bit. Arguments: names of presets."""

import sys
import threading
from collections.abc import Callable
from functools import partial

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_recurrent import config_from_preset

BYTES = 300


def prompt(number: int, batch_size: int) -> torch.Tensor:
    return torch.arange(65 + number, 65 + number + batch_size * (3 + number)).view(batch_size, -1)


def greedy(model: PreTrainedModel, number: int, batch_size: int) -> list[torch.Tensor]:
    options = {"max_new_tokens": BYTES, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [model.generate(prompt(number, batch_size), **options)]


@torch.no_grad()
def sample(model: PreTrainedModel, number: int, batch_size: int) -> list[torch.Tensor]:
    generator, text = torch.Generator().manual_seed(number), [prompt(number, batch_size)]
    state = None
    for _ in range(BYTES):
        output = model(text[-1], state=state)
        state = output.state
        text.append(torch.multinomial(output.logits[:, -1].softmax(-1), 1, generator=generator))
    return [torch.cat(text, 1), output.logits, *state.values()]


def together(calls: list[Callable[[], list[torch.Tensor]]]) -> list[list[torch.Tensor]]:
    results, start = [[] for _ in calls], threading.Barrier(len(calls))

    def run(number: int) -> None:
        start.wait()
        results[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def check(preset: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_from_preset(preset)).eval()
    for generate, batch_sizes in CASES:
        calls = [partial(generate, model, number, size) for number, size in enumerate(batch_sizes)]
        alone = [call() for call in calls]
        for number, (own, found) in enumerate(zip(alone, together(calls), strict=True)):
            same = len(own) == len(found) and all(map(torch.equal, own, found))
            assert same, f"{preset}, {generate.__name__}: thread {number} got another result than alone"


CASES = ((greedy, (1, 1, 1, 1)), (sample, (1, 2, 5, 3)))
for preset in sys.argv[1:]:
    check(preset)
