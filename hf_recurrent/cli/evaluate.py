"""`hf-recurrent evaluate MODEL`: bits per byte on held-out episodes, compared with general compressors."""

import argparse
import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import HfArgumentParser

from hf_recurrent.cli.data_arguments import (
    DataArguments,
    load_evaluation_source,
    load_training_sources,
    token_vocabulary,
)
from hf_recurrent.cli.imports import import_libraries
from hf_recurrent.cli.loading import add_loading_arguments, check_byte_tokenizer, load_model_and_tokenizer
from hf_recurrent.cli.parsing import (
    OneSentenceErrors,
    add_json_argument,
    check_at_least,
    check_checkpoint,
    check_model_name,
    check_parent,
    command,
    dataclass_of,
)
from hf_recurrent.cli.threads import add_threads_argument, use_threads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_recurrent.data.episode_source import EpisodeSource, EvaluationShare


class _Parser(OneSentenceErrors, HfArgumentParser):
    pass


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        (DataArguments,),
        prog="hf-recurrent evaluate",
        usage="hf-recurrent evaluate MODEL [--corpus CORPUS ...] [--ARGUMENT VALUE ...]",
        description="Measure bits per byte of a model on held-out episodes, next to gzip, bz2 and xz.",
    )
    add_loading_arguments(parser)
    run = parser.add_argument_group("evaluation")
    add = run.add_argument
    add("--split", default="validation", choices=["validation", "train", "all"])
    add("--num_streams", type=int, default=8, help="episodes read in parallel")
    block = "bytes per block; for models without a state, and with --no_carry, the context window"
    add("--block_size", "--eval_block_size", type=int, default=1024, help=block)
    rounding = "round the weights to this type first; both: also without, and print the differences"
    add("--quantize", choices=["bfloat16", "int8", "both"], help=rounding)
    add("--no_carry", action="store_true", help="reset the state at each block, as in IID training")
    add(
        "--frozen",
        action="store_true",
        help="measure also without the short-term memory of counts: nothing adapts inside an episode. Example: "
        "hf-recurrent evaluate runs/memora-tiny-python --frozen",
    )
    add(
        "--accounts",
        action="store_true",
        help="print a table of counts alone, the network alone and both, adapting inside an episode and frozen, "
        "next to compressors and PPMd after the same training bytes, which are read again for it",
    )
    add("--no_compressors", action="store_true", help="skip gzip, bz2 and xz")
    add(
        "--record",
        action="store_true",
        help="add the result to the checkpoint in the directory MODEL: to its record, its card, and on data of "
        "the Hub to .eval_results",
    )
    add("--output", type=Path, help="write the results to this JSON file")
    add_json_argument(run)
    add_threads_argument(run)
    add("--quiet", action="store_true", help="hide progress bars")
    return parser


def _evaluate(arguments: argparse.Namespace) -> None:
    data = dataclass_of(DataArguments, arguments)
    _check(arguments)

    import_libraries()
    from hf_recurrent.checkpoints.files import write_json
    from hf_recurrent.checkpoints.provenance_files import find_provenance
    from hf_recurrent.data.corpus import Corpus
    from hf_recurrent.data.episode_losses import has_count_memory
    from hf_recurrent.data.episode_source import EvaluationShare, check_window
    from hf_recurrent.evaluation.accounts import measure_accounts
    from hf_recurrent.evaluation.compressors import compressed_bits_per_byte
    from hf_recurrent.evaluation.counts_alone import bytes_read
    from hf_recurrent.evaluation.tables import evaluation_table
    from hf_recurrent.modeling.block.recurrent_state import supports_recurrent_state
    from hf_recurrent.stock_models.with_state import with_state

    model, tokenizer = load_model_and_tokenizer(arguments)
    if token_vocabulary(data.corpus) is None:
        hint = " For other tokenizers, use the metric in metrics/bits_per_byte."
        check_byte_tokenizer("MODEL", arguments.model, tokenizer, hint)
    if arguments.accounts:
        train, source = load_training_sources(data, tokenizer)
    else:
        train, source = None, load_evaluation_source(data, tokenizer, arguments.split)
    source.check_model("corpus", model)
    use_threads(arguments.threads, quiet=arguments.quiet)
    carries = not arguments.no_carry and supports_recurrent_state(with_state(model))
    sizes = {"batch_size": arguments.num_streams, "block_size": arguments.block_size}
    share = EvaluationShare(**sizes, carry_state=carries, progress=not arguments.quiet)
    if arguments.frozen and not has_count_memory(model):
        raise ValueError(f"`--frozen` needs a count memory; `MODEL` {arguments.model!r} has none.")
    if source.episode_length is None:
        check_window("block_size", arguments.block_size, model)
    metrics, measured = _measure_all(source, model, share, arguments)
    results = {
        **measured,
        **metrics,
        "model": arguments.model,
        "num_parameters": model.num_parameters(),
        "corpus": ", ".join(data.corpus),
        "split": arguments.split,
        "fingerprint": source.fingerprint,
    }
    if train is not None:
        read = bytes_read(find_provenance(model), train)
        results["accounts"] = measure_accounts(model, source, share, metrics, read)
    elif "bits_per_byte" in metrics:
        results["context"] = "whole episode" if carries else f"windows of {arguments.block_size} bytes"
        compress = not arguments.no_compressors and isinstance(source, Corpus)
        results["compressors"] = compressed_bits_per_byte(source, progress=not arguments.quiet) if compress else {}
    if arguments.output:
        write_json(results, arguments.output)
    if arguments.record:
        from hf_recurrent.hub.eval_results import record_evaluation

        settings = {"block_size": arguments.block_size, "state_carried": carries, "split": arguments.split}
        record_evaluation(model, arguments.model, source, metrics, settings)
    print(json.dumps(results) if arguments.json else evaluation_table(source, metrics, results))


def _check(arguments: argparse.Namespace) -> None:
    check_parent("--output", arguments.output)
    check_at_least(1, arguments, "num_streams", "block_size")
    check_model_name("MODEL", arguments.model)
    if arguments.accounts:
        if token_vocabulary(arguments.corpus) is not None:
            raise ValueError(f"`--accounts` is for documents; `--corpus` is {', '.join(arguments.corpus)}.")
        others = (("split", "validation"), ("corpus_probabilities", []))
        for name, default in (*others, ("quantize", None), ("no_carry", False), ("no_compressors", False)):
            if getattr(arguments, name) != default:
                raise ValueError(f"`--accounts` cannot be combined with `--{name}`.")
    if arguments.record:
        check_checkpoint("MODEL", Path(arguments.model))
        if arguments.split == "all":
            raise ValueError("`--record` needs held-out data; `--split` is all, which has the training data too.")
        if arguments.quantize is not None:
            raise ValueError("`--record` cannot be combined with `--quantize`: the result is of other weights.")


def _measure_all(
    source: "EpisodeSource", model: "PreTrainedModel", share: "EvaluationShare", arguments: argparse.Namespace
) -> tuple[dict[str, float], dict[str, Any]]:
    """The metrics of `source`; and its sums, with the metrics of other weights and of the frozen model if wanted."""
    from hf_recurrent.evaluation.counts_alone import frozen
    from hf_recurrent.export.weight_types import round_weights

    def measure(weights: str | None) -> dict[str, float]:
        """The sums of `source.evaluate`, with a copy of the model whose weights are rounded."""
        measured_model = model if weights is None else copy.deepcopy(model)
        if weights is not None:
            round_weights(measured_model, weights)
        return source.evaluate(measured_model, share)

    quantize = arguments.quantize
    weights, others = (None, ["bfloat16", "int8"]) if quantize == "both" else (quantize, [])
    sums = measure(weights)
    rounded = {kind: source.evaluation_metrics(measure(kind)) for kind in others}
    measured: dict[str, Any] = {**sums, "weights": weights, "rounded_weights": rounded}
    if arguments.frozen:
        with frozen(model):
            measured["frozen"] = source.evaluation_metrics(measure(weights))
    return source.evaluation_metrics(sums), measured


main = command(build_parser, _evaluate)
