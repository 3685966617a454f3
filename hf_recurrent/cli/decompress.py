"""`hf-recurrent decompress [MODEL] ARCHIVE`: the file that `compress` was given."""

import argparse
from pathlib import Path

from hf_recurrent.cli.compress import (
    SUFFIX,
    FileParser,
    add_model_arguments,
    add_writing_arguments,
    load_byte_model,
    one_thread,
    progress,
)
from hf_recurrent.cli.parsing import check_file, check_parent, command


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = FileParser(
        prog="hf-recurrent decompress",
        description="Decompress an archive of hf-recurrent compress, with the same MODEL, if any.",
        epilog="examples:\n  hf-recurrent decompress server.log.hfr\n"
        "  hf-recurrent decompress runs/memora-tiny-python argparse.py.hfr\n"
        "  hf-recurrent decompress memora-tiny server.log.hfr --output copy.log",
    )
    add_model_arguments(parser)
    parser.add_argument("file", metavar="ARCHIVE", type=Path, help="the archive")
    parser.add_argument("--output", type=Path, help=f"the file (default: ARCHIVE without {SUFFIX})")
    add_writing_arguments(parser)
    return parser


def _decompress(arguments: argparse.Namespace) -> None:
    check_file("ARCHIVE", arguments.file)
    output = arguments.output
    if output is None:
        if arguments.file.suffix != SUFFIX:
            raise ValueError(f"`ARCHIVE` is {str(arguments.file)!r}, which does not end in {SUFFIX}; add --output.")
        output = arguments.file.with_suffix("")
    check_parent("--output", output)
    from hf_recurrent.compression.archive import ArchiveError, read_header
    from hf_recurrent.compression.files import check_output, decompress_file

    check_output(output, force=arguments.force, resume=arguments.resume)
    try:
        with arguments.file.open("rb") as file:
            header = read_header(file, arguments.file.stat().st_size)
        model = None if arguments.model is None else load_byte_model(arguments)
        with one_thread(header.network), progress(arguments, "decompressing", header.size) as report:
            decompress_file(arguments.file, output, model, report)
    except ArchiveError as error:
        raise ArchiveError(f"`ARCHIVE` is {str(arguments.file)!r}: {error}") from error


main = command(build_parser, _decompress)
