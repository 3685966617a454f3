#!/usr/bin/env python
"""Bytes per second of `generate_speculative`, compared with `generate()` of the same model in the same run.

The prompts are pieces of a file. One CPU thread is measured in CPU time; the ways take turns, and the best round
counts. K is `draft_tokens`, and a check is one reading of K + 1 bytes, relative to a single step. "identical" counts
the new bytes up to the first that is not that of `generate()`, over all prompts. The row without a draft is the same
loop in single steps, always greedy.

    hf-recurrent pretrain
    hf-recurrent pretrain --model memora-s2 --train_bytes 20e6
    python scripts/benchmark_speculative.py runs/memora-s2-python --draft runs/memora-tiny-python
"""

import argparse
from pathlib import Path

import benchmarking as bench
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_recurrent import SpeculativeOutput, generate_speculative
from hf_recurrent.generation.state_reader import StateReader

LOOKUP, NO_DRAFT = "prompt-lookup", "none, greedy"


def load(name: str, device: torch.device) -> PreTrainedModel:
    """A checkpoint, or a new model of a preset."""
    if Path(name).is_dir():
        return AutoModelForCausalLM.from_pretrained(name).to(device).eval()
    return bench.build_model(name, device).eval()


def cut_prompts(options: argparse.Namespace) -> list[torch.Tensor]:
    """Prompts (1, T) at equal distances in the file."""
    data = options.prompt_file.read_bytes()
    if len(data) < options.prompts * options.prompt_bytes:
        raise SystemExit(f"--prompt_file has {len(data)} bytes; {options.prompts * options.prompt_bytes} are needed.")
    starts = range(0, len(data) - options.prompt_bytes + 1, len(data) // options.prompts)[: options.prompts]
    return [torch.tensor([list(data[start : start + options.prompt_bytes])]) for start in starts]


def sampling(options: argparse.Namespace) -> dict[str, object]:
    """Arguments of both ways of generation."""
    return {"do_sample": True, "temperature": options.temperature} if options.temperature else {"do_sample": False}


def plain_texts(
    model: PreTrainedModel, prompts: list[torch.Tensor], options: argparse.Namespace
) -> list[torch.Tensor]:
    """The text of `generate()` after each prompt."""
    return [
        model.generate(
            prompt.to(model.device),
            attention_mask=torch.ones_like(prompt, device=model.device),
            max_new_tokens=options.bytes,
            eos_token_id=None,
            pad_token_id=0,
            **sampling(options),
        ).cpu()
        for prompt in prompts
    ]


def speculative_texts(
    model: PreTrainedModel,
    draft: PreTrainedModel | str,
    draft_tokens: int,
    prompts: list[torch.Tensor],
    options: argparse.Namespace,
) -> list[SpeculativeOutput]:
    """The result of `generate_speculative` after each prompt."""
    return [
        generate_speculative(
            model,
            prompt,
            draft=draft,
            draft_tokens=draft_tokens,
            max_new_tokens=options.bytes,
            eos_token_id=None,
            **sampling(options),
        )
        for prompt in prompts
    ]


@torch.no_grad()
def single_texts(
    model: PreTrainedModel, prompts: list[torch.Tensor], options: argparse.Namespace
) -> list[SpeculativeOutput]:
    """Greedy text in single steps by the same reader, so that the draft is not credited with the shorter loop."""
    results = []
    for prompt in prompts:
        reader, tokens = StateReader(model), prompt[0].tolist()
        logits, state = reader.read_prompt(prompt, None)
        for _ in range(options.bytes - 1):
            tokens.append(int(logits.argmax()))
            reading = reader.read(tokens[-1:], state)
            logits, state = reading.logits[-1], reading.states[1]
        sequences, forwards = torch.tensor([[*tokens, int(logits.argmax())]]), reader.forwards
        last = reader.read(sequences[0, -1:].tolist(), state).states[1]
        results.append(SpeculativeOutput(sequences, last, None, state, None, 0, 0, forwards, 0))
    return results


@torch.no_grad()
def check_seconds(model: PreTrainedModel, steps: list[int], options: argparse.Namespace) -> tuple[float, list[float]]:
    """Seconds of a single step, `model(byte, state=state)`, and of reading each number of bytes at once."""
    reader, state = StateReader(model), model.init_state(1)
    byte = torch.tensor([[65]], device=model.device)
    calls = {"single": lambda: model(byte, state=state, use_cache=True)}
    for count in steps:
        calls[str(count)] = lambda count=count: reader.read([65] * count, state)
    seconds = bench.seconds_in_turns(calls, 20 * options.rounds, options.device)
    return min(seconds["single"]), [min(seconds[str(count)]) for count in steps]


def main() -> None:
    """Print the tables."""
    parser = bench.option_parser(__doc__, rounds=3, threads=1, device=bench.CPU)
    parser.add_argument("model", help="directory or preset")
    parser.add_argument("--draft", required=True, help="directory or preset of the draft")
    parser.add_argument("--draft_tokens", type=int, nargs="+", default=[1, 2, 3, 7], help="K (default 1 2 3 7)")
    parser.add_argument("--bytes", type=int, default=300, help="new bytes per prompt (default 300)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for greedy (default)")
    parser.add_argument("--prompt_file", type=Path, default=Path(argparse.__file__), help="default: argparse.py")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt_bytes", type=int, default=128)
    options = bench.parse_and_set_up(parser)
    model, draft = load(options.model, options.device), load(options.draft, options.device)
    prompts = cut_prompts(options)

    ways = {
        "model": lambda: plain_texts(model, prompts, options),
        "draft": lambda: plain_texts(draft, prompts, options),
        f"{NO_DRAFT} 0": lambda: single_texts(model, prompts, options),
    }
    for name, proposer in ((options.draft, draft), (LOOKUP, LOOKUP)):
        for count in options.draft_tokens:
            ways[f"{name} {count}"] = lambda proposer=proposer, count=count: speculative_texts(
                model, proposer, count, prompts, options
            )
    found = {}
    seconds = bench.seconds_in_turns(
        {name: lambda name=name, way=way: found.__setitem__(name, way()) for name, way in ways.items()},
        options.rounds,
        options.device,
    )
    best = {name: min(values) for name, values in seconds.items()}
    new_bytes = options.bytes * len(prompts)
    single, checks = check_seconds(model, [1, *(count + 1 for count in options.draft_tokens)], options)

    how = f"temperature {options.temperature}" if options.temperature else "greedy"
    print(f"{new_bytes} bytes after {len(prompts)} prompts, {how}; {bench.conditions(options.device)}\n")
    plain = [
        [options.model, f"{model.num_parameters():,}", f"{new_bytes / best['model']:,.0f}", f"{single * 1e6:,.0f}"],
        [options.draft, f"{draft.num_parameters():,}", f"{new_bytes / best['draft']:,.0f}", ""],
    ]
    print(bench.markdown_table(["generate()", "parameters", "bytes/s", "µs per step"], plain) + "\n")
    lines = []
    for name in (NO_DRAFT, options.draft, LOOKUP):
        counts = [0] if name == NO_DRAFT else options.draft_tokens
        for count, check in zip(counts, checks[:1] if name == NO_DRAFT else checks[1:], strict=True):
            results: list[SpeculativeOutput] = found[f"{name} {count}"]
            proposed, accepted = (sum(getattr(r, key) for r in results) for key in ("proposed", "accepted"))
            same = sum(
                int((result.sequences == text)[0, options.prompt_bytes :].cumprod(0).sum())
                for result, text in zip(results, found["model"], strict=True)
            )
            lines.append(
                [
                    name,
                    str(count),
                    f"{check * 1e6:,.0f}",
                    f"{check / single:.2f}",
                    f"{accepted / proposed:.0%}" if proposed else "-",
                    f"{new_bytes / sum(result.forwards for result in results):.2f}",
                    f"{new_bytes / best[f'{name} {count}']:,.0f}",
                    f"{best['model'] / best[f'{name} {count}']:.2f}",
                    "-" if options.temperature else f"{same} of {new_bytes}",
                ]
            )
    columns = ["draft", "K", "check µs", "check / step", "accepted", "bytes / forward", "bytes/s", "speed-up"]
    print(bench.markdown_table([*columns, "identical"], lines))


if __name__ == "__main__":
    main()
