"""`hf-recurrent score MODEL FILE ...`: the log-probability of every byte, line or document, as JSON lines."""

import argparse
from pathlib import Path

from hf_recurrent.cli.data_arguments import TASK_PREFIX
from hf_recurrent.cli.imports import import_libraries
from hf_recurrent.cli.loading import add_loading_arguments, load_recurrent_model
from hf_recurrent.cli.parsing import CommandParser, check_at_least, check_model_name, check_output, command
from hf_recurrent.cli.threads import add_threads_argument, use_threads


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-recurrent score",
        description="Measure the log-probability (natural logarithm) of every byte, line or\n"
        "document, given everything before it in its document. Results are JSON lines on\n"
        "standard output, everything else is printed to standard error.",
        epilog="examples:\n"
        "  hf-recurrent score runs/hawk book.txt notes/\n"
        "  hf-recurrent score runs/hawk server.log --per line --output scores.jsonl\n"
        "  zcat logs.gz | hf-recurrent score runs/hawk - --per line | sort\n\n"
        "As in evaluate, the first byte of a document is given and has no probability.\n"
        "The end byte counts to the document and its last line.",
    )
    add_loading_arguments(parser)
    add = parser.add_argument
    files = "files, directories, globs or hub:owner/name, as for pretrain --corpus; - for standard input"
    add("files", nargs="+", metavar="FILE", help=files)
    add("--per", choices=["byte", "line", "document"], default="document", help="unit of a result (default: document)")
    add("--output", type=Path, help="write the results to this file, which is complete or absent")
    add("--text_column", default="text", help="column with the text in JSONL, Parquet and datasets")
    add("--dataset_split", default="train", help="split of a dataset to read")
    add("--dataset_config", help="configuration of a Hub dataset")
    add("--streaming", action="store_true", help="stream a Hub dataset instead of downloading it")
    add("--binary", action="store_true", help="byte 0 is data; documents have no end byte")
    add("--block_size", type=int, default=1024, help="bytes per forward pass (default: 1024)")
    add_threads_argument(parser)
    add("--quiet", action="store_true", help="hide progress and the summary")
    return parser


def _score(arguments: argparse.Namespace) -> None:
    check_at_least(1, arguments, "block_size")
    check_output("--output", arguments.output)
    if arguments.files.count("-") > 1:
        raise ValueError("`FILE` is - more than once; standard input can be read only once.")

    check_model_name("MODEL", arguments.model)
    import_libraries()
    from hf_recurrent.data.documents import ReadOptions
    from hf_recurrent.data.pixel_readers import pixel_format
    from hf_recurrent.evaluation.scores import read_documents, score_documents

    for name in arguments.files:
        if pixel_format([name]) is not None or name.startswith(TASK_PREFIX):
            raise ValueError(f"`FILE` is {name!r}, which is not text; measure images and tasks with evaluate.")
    dataset = (arguments.text_column, arguments.dataset_split, arguments.dataset_config, arguments.streaming)
    documents, size = read_documents(arguments.files, ReadOptions(*dataset, arguments.binary))
    model, tokenizer = load_recurrent_model(arguments, "; for windows of other models, use evaluate.")
    use_threads(arguments.threads, quiet=arguments.quiet)
    options = {name: getattr(arguments, name) for name in ("per", "output", "binary", "block_size", "quiet")}
    if not score_documents(documents, size, model, tokenizer, **options):
        raise ValueError(f"`FILE` is {' '.join(arguments.files)}, which is empty; there is nothing to score.")


main = command(build_parser, _score)
