#!/usr/bin/env python
"""Time that a count memory adds to its network: in blocks, in single steps, and alone.

The memory has counted --count_bytes of the corpus, so that its tables lie where a trained one's do. Networks have
random weights and the memory of contexts of the default recipe. The variants take turns, the best round of each
counts, in CPU time of one thread.

    python scripts/benchmark_counts.py
    python scripts/benchmark_counts.py --models memora-s0 --count_bytes 22e6
"""

from collections.abc import Callable
from dataclasses import replace

import benchmarking as bench
import torch
from transformers import PreTrainedModel

from hf_recurrent import ByteTokenizer
from hf_recurrent.cli.data_arguments import DataArguments, load_training_sources
from hf_recurrent.cli.pretrain import build_model
from hf_recurrent.cli.pretrain_arguments import parse_arguments
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.modeling.contexts.count_memory import CountMemory

BLOCK, BLOCKS, STEPS = 1024, 4, 400


def fill(memory: CountMemory, corpus: Corpus, size: float) -> None:
    """Count whole documents, until they have that many bytes."""
    for document in corpus:
        if (size := size - len(document)) < 0:
            return
        memory.insert(torch.tensor(document), corpus.end_token_id)


def read_blocks(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    """The losses of all bytes of (1, T), in blocks."""
    state = model.init_state(1)
    for begin in range(0, BLOCK * BLOCKS, BLOCK):
        block, labels = (tokens[:, begin + shift : begin + shift + BLOCK] for shift in (0, 1))
        state = model.token_losses(block, labels, state).state


def read_steps(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    """The probabilities of all 256 bytes after each single byte, as `generate` needs them."""
    state = model.init_state(1)
    for step in range(STEPS):
        state = model(tokens[:, step : step + 1], state=state, use_cache=True).state


def without_counts(model: PreTrainedModel, tokens: torch.Tensor, read: Callable) -> None:
    """The same by the network alone."""
    memory, model.count_memory = model.count_memory, None
    try:
        read(model, tokens)
    finally:
        model.count_memory = memory


@torch.no_grad()
def main() -> None:
    parser = bench.option_parser(__doc__, threads=1, rounds=20)
    parser.add_argument("--models", nargs="+", default=["memora-tiny", "memora-s0"])
    parser.add_argument("--corpus", nargs="+", default=["python"])
    parser.add_argument("--count_bytes", type=float, default=8e6)
    options = bench.parse_and_set_up(parser)
    train, held_out = load_training_sources(DataArguments(options.corpus), ByteTokenizer())
    document = next(document for document in held_out if len(document) > BLOCK * BLOCKS)
    tokens = torch.tensor(document, dtype=torch.int64)[None]
    recipe = parse_arguments(["--output_dir", "unused", "--use_cpu"]).model
    lines, filled = [], None
    for name in options.models:
        model = build_model(replace(recipe, model=name))[0].eval()
        if filled is None:
            filled = model.count_memory
            fill(filled, train, options.count_bytes)
        else:
            model.count_memory = filled
        for what, read, size in (("blocks", read_blocks, BLOCK * BLOCKS), ("single steps", read_steps, STEPS)):
            found = bench.seconds_in_turns(
                {
                    "network": lambda read=read, model=model: without_counts(model, tokens, read),
                    "both": lambda read=read, model=model: read(model, tokens),
                },
                options.rounds,
                torch.device("cpu"),
            )
            network, both = (min(found[key]) / size * 1e6 for key in ("network", "both"))
            lines.append([name, what, f"{network:.1f}", f"{both:.1f}", f"{both / network - 1:+.0%}"])
    title = f"Count memory, {bench.conditions(torch.device('cpu'))}, µs a byte"
    bench.report(title, ["model", "read in", "network", "with counts", "more (bar: 25 %)"], lines)


if __name__ == "__main__":
    main()
