"""`hf-recurrent evaluate MODEL`: bits per byte over held-out episodes, beside general compressors."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent.cli.corpora import CORPUS_HELP, loading_options, source_of, task_of
from hf_recurrent.cli.loading import add_loading_arguments, load_model_and_tokenizer

if TYPE_CHECKING:
    from hf_recurrent.data.corpus import Corpus
    from hf_recurrent.tasks.task import Task


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command. Those of the corpus have pretrain's names and defaults: same split, same bytes."""
    parser = argparse.ArgumentParser(
        prog="hf-recurrent evaluate",
        description="Bits per byte of a model on held-out episodes, beside gzip, bz2 and xz on the same bytes.",
    )
    add_loading_arguments(parser)
    corpus = parser.add_argument_group("corpus", "the same values as in training give the same split")
    corpus.add_argument(
        "--corpus",
        nargs="+",
        default=["python"],
        help=CORPUS_HELP,
    )
    corpus.add_argument("--text_column", default="text", help="where rows of JSONL, Parquet and datasets have text")
    corpus.add_argument("--dataset_split", default="train", help="split of a dataset to read, before --split")
    corpus.add_argument("--dataset_config", help="configuration of a Hub dataset")
    corpus.add_argument("--streaming", action="store_true", help="read a Hub dataset over the network")
    corpus.add_argument("--binary", action="store_true", help="byte 0 is data; episodes have no end byte")
    corpus.add_argument("--max_corpus_bytes", type=_count, help="how much of the corpus to read, before --split")
    corpus.add_argument("--split", default="validation", choices=["validation", "train", "all"])
    corpus.add_argument("--validation_fraction", type=float, default=0.05)
    corpus.add_argument("--split_seed", type=int, default=0)
    corpus.add_argument(
        "--max_bytes",
        type=_count,
        help="evaluate whole episodes, picked at random but always the same, while they fit in",
    )
    run = parser.add_argument_group("evaluation")
    run.add_argument("--num_streams", type=int, default=8, help="episodes read side by side")
    run.add_argument(
        "--block_size",
        type=int,
        default=1024,
        help="bytes per block; for models without a state, and with --no_carry, the window that they see",
    )
    run.add_argument("--no_carry", action="store_true", help="zero the state at each block, as in IID training")
    run.add_argument("--no_compressors", action="store_true", help="leave out gzip, bz2 and xz")
    run.add_argument("--output", type=Path, help="write the results to this JSON file")
    run.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with `argv`, by default the process's arguments. Bad input ends it with one sentence."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        results = _evaluate(arguments)
        if arguments.output:
            _write(results, arguments.output)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    print(_table(results))


def _count(text: str) -> int:
    """A number of bytes; 20e6 is one too."""
    value = float(text)
    if not value >= 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of bytes of at least 1")
    return int(value)


def _evaluate(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.output and not arguments.output.absolute().parent.is_dir():
        raise FileNotFoundError(f"--output is `{arguments.output}`, whose directory does not exist.")

    from hf_recurrent.bits_per_byte import evaluate_bits_per_byte, supports_recurrent_state
    from hf_recurrent.compression import compressed_bits_per_byte

    task = task_of(arguments.corpus, arguments.max_bytes)
    model, tokenizer = load_model_and_tokenizer(arguments)
    if task is not None:
        return _answers(arguments, model, task)
    if not hasattr(tokenizer, "encode_bytes"):
        raise ValueError(
            f"MODEL `{arguments.model}` has a {type(tokenizer).__name__}, but this command needs a byte tokenizer; "
            "for other tokenizers use the metric in metrics/bits_per_byte."
        )
    corpus = _held_out(arguments, tokenizer)
    progress = not arguments.quiet
    carried = supports_recurrent_state(model) and not arguments.no_carry
    results = evaluate_bits_per_byte(
        model,
        corpus,
        num_streams=arguments.num_streams,
        block_size=arguments.block_size,
        carry_state=carried,
        progress=progress,
    )
    compressors = {} if arguments.no_compressors else compressed_bits_per_byte(corpus, progress=progress)
    return {
        **results,
        "model": arguments.model,
        "num_parameters": model.num_parameters(),
        "corpus": corpus.name,
        "split": arguments.split,
        "fingerprint": corpus.fingerprint,
        "context": "whole episode" if carried else f"windows of {arguments.block_size} bytes",
        "compressors": compressors,
    }


def _answers(arguments: argparse.Namespace, model: Any, task: "Task") -> dict[str, Any]:
    from hf_recurrent.tasks.evaluation import evaluate_task

    split = "train" if arguments.split == "train" else "validation"
    results = evaluate_task(model, task, task.num_validation_examples, batch_size=arguments.num_streams, split=split)
    return {
        **results,
        "model": arguments.model,
        "num_parameters": model.num_parameters(),
        "corpus": arguments.corpus[0],
        "split": split,
        "fingerprint": task.fingerprint,
    }


def _held_out(arguments: argparse.Namespace, tokenizer: Any) -> "Corpus":
    from hf_recurrent.data.corpus import load_corpus, load_splits

    source, options = source_of(arguments.corpus), {"tokenizer": tokenizer, **loading_options(arguments)}
    if arguments.split == "all":
        corpus = load_corpus(source, **options)
    else:
        fraction, seed = arguments.validation_fraction, arguments.split_seed
        train, validation = load_splits(source, validation_fraction=fraction, split_seed=seed, **options)
        corpus = validation if arguments.split == "validation" else train
    return corpus if arguments.max_bytes is None else limit_bytes(corpus, arguments.max_bytes)


def limit_bytes(corpus: "Corpus", max_bytes: int) -> "Corpus":
    """Whole episodes of `corpus` of at most `max_bytes` together, picked in a fixed random order.

    Raises:
        ValueError: not even the shortest episode fits in.
    """
    import numpy as np

    if corpus.num_bytes <= max_bytes:
        return corpus
    order = np.random.default_rng(0).permutation(len(corpus))
    lengths = np.diff(corpus.offsets)
    chosen, total = [], 0
    for index in order:
        if total + lengths[index] <= max_bytes:
            chosen.append(index)
            total += lengths[index]
    if not chosen:
        raise ValueError(f"--max_bytes is {max_bytes}, but the shortest episode has {lengths.min()} bytes.")
    return corpus.select(np.sort(chosen))


def _write(results: dict[str, Any], path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _table(results: dict[str, Any]) -> str:
    if "accuracy" in results:
        return (
            f"{results['corpus']}, {results['split']}: {results['num_examples']:,} examples, "
            f"{results['num_answers']:,} answers\n\n"
            f"answers right    {results['accuracy']:.2%}\n"
            f"examples right   {results['exact_match']:.2%}\n"
            f"nats per answer  {results['loss']:.4f}"
        )
    rows = {f"{results['model']} ({results['context']})": results["bits_per_byte"]}
    rows |= {f"{name} (each episode alone)": value for name, value in results["compressors"].items()}
    width = max(map(len, rows))
    # The first byte of an episode is given to a model, while a compressor has to write it.
    first_bytes = 8 * results["num_episodes"] / results["num_bytes"]
    amount = f"{results['num_episodes']:,} episodes, {results['num_bytes']:,} bytes"
    lines = [
        f"{results['corpus']}, {results['split']}: {amount}",
        "",
        f"{'':{width}}  bits per byte",
        *(f"{name:{width}}  {value:13.4f}" for name, value in rows.items()),
        "",
        f"A model is given the first byte of each episode: at 8 bits each, {first_bytes:.4f} more.",
    ]
    return "\n".join(lines)
