"""`hf-recurrent decompress [MODEL] ARCHIVE`: the file that `compress` was given."""

import argparse
import json
from pathlib import Path

from hf_recurrent.cli import compress as shared
from hf_recurrent.cli.compress import PIPE, SUFFIX
from hf_recurrent.cli.parsing import command


def build_parser() -> argparse.ArgumentParser:
    parser = shared.FileParser(
        prog="hf-recurrent decompress",
        description="Decompress an archive of hf-recurrent compress, with the same MODEL, if any.",
        epilog="examples:\n  hf-recurrent decompress server.log.hfr\n"
        "  hf-recurrent decompress runs/memora-tiny-python argparse.py.hfr\n"
        "  hf-recurrent decompress memora-tiny server.log.hfr --output copy.log\n"
        "  hf-recurrent decompress notes.tar.hfr --output - | tar x",
    )
    shared.add_model_arguments(parser)
    parser.add_argument("file", metavar="ARCHIVE", type=Path, help="the archive, or - for standard input")
    parser.add_argument("--output", type=Path, help=f"the file, or - (default: ARCHIVE without {SUFFIX}; of -, -)")
    shared.add_writing_arguments(parser)
    return parser


def _decompress(arguments: argparse.Namespace) -> None:
    output = arguments.output or _default_output(arguments.file)
    is_piped = shared.check_paths(arguments, "ARCHIVE", output)
    from hf_recurrent.compression.archive import ArchiveError, read_header
    from hf_recurrent.compression.files import check_output, decompress_file, decompress_to, decompress_to_pipe

    if output != PIPE:
        check_output(output, force=arguments.force, resume=arguments.resume)
    try:
        with shared.input_file(arguments.file) as source, source.open("rb") as archive:
            length = source.stat().st_size
            header = read_header(archive, length)
            archive.seek(0)
            model = None if arguments.model is None else shared.load_byte_model(arguments)
            bar = shared.progress(arguments, "decompressing", header.size)
            with shared.one_thread(header.network), bar as report:
                if is_piped:
                    write = decompress_to_pipe if output == PIPE else decompress_to
                    with shared.output_file(output) as file:
                        write(file, archive, length, model, report)
                else:
                    decompress_file(source, output, model, report)
        if arguments.json:
            print(json.dumps({"file": str(arguments.file), "output": str(output), "bytes": header.size}))
    except ArchiveError as error:
        raise ArchiveError(f"`ARCHIVE` is {str(arguments.file)!r}: {error}") from error


def _default_output(archive: Path) -> Path:
    if archive == PIPE:
        return PIPE
    if archive.suffix != SUFFIX:
        raise ValueError(f"`ARCHIVE` is {str(archive)!r}, which does not end in {SUFFIX}; add --output.")
    return archive.with_suffix("")


main = command(build_parser, _decompress)
