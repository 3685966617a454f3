"""Samples of Python: share that parses, share copied from the training text, share that repeats itself.

    python scripts/benchmark_samples.py runs/before runs/memora-tiny-python

Every MODEL continues headers of held-out functions; one with a count memory also without it. A sample parses if
`ast.parse` accepts header and sample without the unfinished statement at the end. Copied: windows of 30 bytes that
occur in the documents that the model was trained on. Repeated: windows of 20 bytes that occurred before in the sample.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from benchmarking import load_with_training_bytes, markdown_table

from hf_recurrent.evaluation.byte_windows import KnownWindows
from hf_recurrent.evaluation.counts_alone import frozen, network_alone
from hf_recurrent.evaluation.python_samples import COPIED, function_headers, measure_samples, sample_continuations


def variants(name: str, model: Any) -> Iterator[tuple[str, Any]]:
    """The model; if it has a count memory, also without its short-term part, and without all of it."""
    yield name, model
    if getattr(model, "count_memory", None) is not None:
        with frozen(model):
            yield f"{name}, frozen", model
        with network_alone(model):
            yield f"{name}, network alone", model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--corpus", nargs="+", default=["python"], help="as in the runs")
    parser.add_argument("--split_seed", type=int, default=0, help="as in the runs")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--length", type=int, default=400, help="bytes of a sample")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--show", type=int, default=0, help="number of samples of each model to print")
    arguments = parser.parse_args()
    rows, shown, measures = [], [], ("parses", "copied", "repeated")
    for name in arguments.models:
        model, held_out, read = load_with_training_bytes(name, arguments.corpus, arguments.split_seed)
        known = KnownWindows(b"\0".join(read.documents()), COPIED)
        prompts = function_headers(held_out, arguments.samples)
        originals = [_following(held_out, prompt, arguments.length) for prompt in prompts]
        measured = [("held-out text itself", originals)]
        for label, variant in variants(name, model):
            samples = sample_continuations(variant, prompts, arguments.length, temperature=arguments.temperature)
            measured.append((label, samples))
            for prompt, sample in list(zip(prompts, samples, strict=True))[: arguments.show]:
                shown.append(f"--- {label}\n{(prompt + sample).decode('utf-8', 'replace')}")
        for label, samples in measured:
            row = measure_samples(prompts, samples, known)
            rows.append([label, f"{len(samples)}", *(f"{row[measure]:.1%}" for measure in measures)])
    print(markdown_table(["model", "samples", "parses", "copied from training", "repeats itself"], rows))
    print("\n".join(shown))


def _following(held_out: Any, header: bytes, length: int) -> bytes:
    """The bytes after a header in the held-out documents."""
    for episode in held_out:
        _, found, after = episode.tobytes().partition(header)
        if found:
            return after[:length]
    return b""


if __name__ == "__main__":
    main()
