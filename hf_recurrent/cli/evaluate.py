"""`hf-recurrent evaluate MODEL`: bits per byte over held-out episodes, beside general compressors."""

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from hf_recurrent.cli.data_arguments import DataArguments, load_evaluation_source, token_vocabulary
from hf_recurrent.cli.loading import add_loading_arguments, load_model_and_tokenizer


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command. Those of the data are pretrain's: same values, same held-out episodes."""
    parser = HfArgumentParser(
        (DataArguments,),
        prog="hf-recurrent evaluate",
        usage="hf-recurrent evaluate MODEL [--corpus CORPUS ...] [--ARGUMENT VALUE ...]",
        description="Bits per byte of a model on held-out episodes, beside gzip, bz2 and xz on the same bytes.",
    )
    add_loading_arguments(parser)
    run = parser.add_argument_group("evaluation")
    run.add_argument("--split", default="validation", choices=["validation", "train", "all"])
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
        results, table = _evaluate(arguments)
        if arguments.output:
            _write(results, arguments.output)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    print(table)


def _evaluate(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The results, and the table of them."""
    if arguments.output and not arguments.output.absolute().parent.is_dir():
        raise FileNotFoundError(f"--output is `{arguments.output}`, whose directory does not exist.")
    for name in ("num_streams", "block_size"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"`{name}` is {getattr(arguments, name)}; it must be at least 1.")
    data = DataArguments(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(DataArguments)})
    is_text = token_vocabulary(data.corpus) is None

    from hf_recurrent.data.episode_source import EvaluationShare, check_window
    from hf_recurrent.evaluation.compressors import compressed_bits_per_byte
    from hf_recurrent.modeling.recurrent_state import supports_recurrent_state

    model, tokenizer = load_model_and_tokenizer(arguments)
    if is_text and not hasattr(tokenizer, "encode_bytes"):
        raise ValueError(
            f"MODEL `{arguments.model}` has a {type(tokenizer).__name__}, but this command needs a byte tokenizer; "
            "for other tokenizers use the metric in metrics/bits_per_byte."
        )
    source = load_evaluation_source(data, tokenizer, arguments.split)
    source.check_model("corpus", model)
    carries = supports_recurrent_state(model) and not arguments.no_carry
    share = EvaluationShare(
        batch_size=arguments.num_streams,
        block_size=arguments.block_size,
        carry_state=carries,
        progress=not arguments.quiet,
    )
    if source.episode_length is None:
        check_window("block_size", arguments.block_size, model)
    metrics = source.evaluation_metrics(source.evaluate(model, share))
    results = {
        **metrics,
        "model": arguments.model,
        "num_parameters": model.num_parameters(),
        "corpus": source.name,
        "split": arguments.split,
        "fingerprint": source.fingerprint,
    }
    if "bits_per_byte" not in metrics:
        amount = source.describe(held_out=True)
        return results, f"{source.name}, {arguments.split}: {amount}\n\n{source.describe_result(metrics)}"
    results["context"] = "whole episode" if carries else f"windows of {arguments.block_size} bytes"
    compress = not arguments.no_compressors
    results["compressors"] = compressed_bits_per_byte(source, progress=not arguments.quiet) if compress else {}
    return results, _bits_table(results)


def _write(results: dict[str, Any], path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _bits_table(results: dict[str, Any]) -> str:
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
