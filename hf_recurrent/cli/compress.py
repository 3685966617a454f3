"""`hf-recurrent compress [MODEL] FILE`, and the parts that it shares with `decompress`."""

import argparse
import json
import lzma
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hf_recurrent.cli.loading import add_loading_arguments, check_byte_tokenizer, load_or_build
from hf_recurrent.cli.parsing import CommandParser, add_json_argument, check_file, check_parent, command
from hf_recurrent.cli.standard_output import discard_output
from hf_recurrent.cli.threads import thread_count
from hf_recurrent.presets import preset_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PIPE = Path("-")  # standard input or output
SUFFIX = ".hfr"
# xz is shown for comparison where it takes less than some seconds.
_LARGEST_FOR_XZ = 1 << 24


class FileParser(CommandParser):
    """The parser of `[MODEL] FILE`, with flags before, between and after them."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Accept flags between MODEL and FILE, where argparse takes the first word for FILE."""
        arguments, remaining = super().parse_known_args(args, namespace)
        if arguments.model is None and len(remaining) == 1 and (remaining == ["-"] or remaining[0][0] != "-"):
            arguments.model, arguments.file = str(arguments.file), Path(remaining.pop())
        return arguments, remaining


def build_parser() -> argparse.ArgumentParser:
    parser = FileParser(
        prog="hf-recurrent compress",
        description="Compress a file with predictions of its next byte: by counts of the bytes that\n"
        "followed the same contexts before, and with MODEL or --learn also by a network.\n"
        "Every machine can decompress an archive of counts; one of a network needs the\n"
        "same version of torch, kind of processor and MODEL, which the archive names.",
        epilog="examples:\n"
        "  hf-recurrent compress server.log\n"
        "  hf-recurrent compress server.log --learn\n"
        "  hf-recurrent compress runs/memora-tiny-python argparse.py\n"
        "  tar c notes | hf-recurrent compress - > notes.tar.hfr\n"
        "  hf-recurrent decompress server.log.hfr --output copy.log\n\n"
        "With --learn, the network learns while it reads, and so does decompress: new\n"
        "weights are enough then, and the weights of a checkpoint adapt to the file.",
    )
    add_model_arguments(parser)
    parser.add_argument("file", metavar="FILE", type=Path, help="the file, or - for standard input")
    parser.add_argument("--output", type=Path, help=f"the archive, or - (default: FILE{SUFFIX}; of -, -)")
    learn = "let a network learn from the file: MODEL's, or a small new one"
    parser.add_argument("--learn", action="store_true", help=learn)
    add = parser.add_argument_group("with --learn").add_argument
    add("--stride", type=int, help="T, bytes between two updates of the weights (default: 16)")
    add("--learning_rate", type=float, help="at the beginning; it falls linearly to a tenth (default: 2e-3)")
    parser.add_argument(
        "--streams",
        type=int,
        help="parts of the file that are compressed in parallel, each without context at its beginning (default: one "
        "for each 64 KiB, at most 16; 1 with --learn)",
    )
    parser.add_argument(
        "--no_mix",
        action="store_true",
        help="use the network's predictions alone; by default they are mixed with counts of the bytes that followed "
        "the same contexts before, which makes the archive smaller",
    )
    add_writing_arguments(parser)
    return parser


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and how it is built or loaded: the same arguments for both commands give the same weights."""
    optional = "or the name of a preset; without it, counts predict alone"
    add_loading_arguments(parser, takes_presets=True, device="cpu", optional=optional)
    parser.set_defaults(dtype="float32")
    parser.add_argument("--seed", type=int, default=0, help="seed of the new weights of a preset (default: 0)")


def add_writing_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="replace the output if it exists")
    parser.add_argument("--resume", action="store_true", help="continue after an interruption, if there was one")
    parser.add_argument("--quiet", action="store_true", help="hide progress and the summary")
    add_json_argument(parser)


def _compress(arguments: argparse.Namespace) -> None:
    file = arguments.file
    output = arguments.output or (file if file == PIPE else file.with_name(file.name + SUFFIX))
    is_piped = check_paths(arguments, "FILE", output)
    settings = _learning_settings(arguments)
    if output == PIPE and sys.stdout.isatty():
        raise ValueError("The archive would be written to the terminal; add > ARCHIVE, or --output ARCHIVE.")
    from hf_recurrent.compression.agreement import new_header
    from hf_recurrent.compression.files import check_output, compress_file, compress_to, mapped

    if output != PIPE:
        check_output(output, force=arguments.force, resume=arguments.resume)
    with input_file(file) as source:
        size = source.stat().st_size
        model, options = _network(arguments, settings, size)
        with one_thread(model):
            header = new_header(model, size, **options)
            begin = time.perf_counter()
            with progress(arguments, "compressing", size) as report:
                if is_piped:
                    with output_file(output) as archive:
                        compress_to(archive, mapped(source), model, header, report)
                else:
                    compress_file(source, output, model, header, report)
        seconds = time.perf_counter() - begin
        if arguments.json or not (arguments.quiet or output == PIPE):
            results = _results(file, source, output, seconds)
            if arguments.json:
                print(json.dumps(results))
            else:
                _summarize(results)


def _learning_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of learning that are given; a ValueError if an argument is for a network, and there is none."""
    settings = {name: getattr(arguments, name) for name in ("stride", "learning_rate")}
    settings = {name: value for name, value in settings.items() if value is not None}
    if settings and not arguments.learn:
        raise ValueError(f"`--{next(iter(settings))}` is given; it is used only with --learn.")
    if arguments.model in preset_names() and not arguments.learn:
        raise ValueError(
            f"`MODEL` is the preset {arguments.model}, whose new weights predict nothing; add --learn, or give a "
            "checkpoint."
        )
    for flag in ("no_mix", "streams"):
        if getattr(arguments, flag) and not arguments.learn and arguments.model is None:
            raise ValueError(f"`--{flag}` is given without MODEL and --learn; it is for a network.")
    return settings


def _network(
    arguments: argparse.Namespace, settings: dict[str, Any], size: int
) -> "tuple[PreTrainedModel | None, dict[str, Any]]":
    """The model, None for counts alone, and the options of its header."""
    if not arguments.learn and arguments.model is None:
        return None, {}
    from hf_recurrent.compression.adaptive_predictor import AdaptiveSettings
    from hf_recurrent.compression.agreement import new_network
    from hf_recurrent.compression.files import default_streams

    adaptive = AdaptiveSettings(**settings) if arguments.learn else None
    is_new = arguments.model is None
    streams = arguments.streams or default_streams(size, adaptive)
    options = {"adaptive": adaptive, "streams": streams, "mixes": not arguments.no_mix, "is_new": is_new}
    return new_network() if is_new else load_byte_model(arguments), options


def one_thread(network: object) -> AbstractContextManager[None]:
    """One CPU thread if there is a network; counts alone need no torch."""
    return nullcontext() if network is None else thread_count(1)


def load_byte_model(arguments: argparse.Namespace) -> "PreTrainedModel":
    """The model of a checkpoint, or of a preset with new weights; it must read bytes."""
    model, tokenizer = load_or_build(arguments)
    check_byte_tokenizer("MODEL", arguments.model, tokenizer)
    return model


def check_paths(arguments: argparse.Namespace, name: str, output: Path) -> bool:
    """Check the input, the argument `name`, and the output; True if one is a pipe, where nothing can be continued."""
    if arguments.file != PIPE:
        check_file(name, arguments.file)
    if output != PIPE:
        check_parent("--output", output)
    elif arguments.json:
        raise ValueError("`--json` cannot be combined with the output -; both would be on standard output.")
    is_piped = PIPE in (arguments.file, output)
    if is_piped and arguments.resume:
        raise ValueError("`--resume` cannot be combined with -; a pipe is read from its beginning.")
    return is_piped


@contextmanager
def input_file(path: Path) -> Iterator[Path]:
    """The file, or a temporary copy of standard input."""
    if path != PIPE:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="hf-recurrent-") as directory:
        copy = Path(directory, "input")  # of the whole pipe: an archive begins with its size
        with copy.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield copy


@contextmanager
def output_file(path: Path) -> Iterator[IO[bytes]]:
    """Standard output, or a file that is complete or absent."""
    from hf_recurrent.checkpoints.atomic_files import atomic_file, naming_file

    if path != PIPE:
        with atomic_file(path) as partial, partial.open("wb") as file:
            yield file
        return
    try:
        with naming_file("standard output"):
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
    except OSError:
        discard_output()
        raise


@contextmanager
def progress(arguments: argparse.Namespace, description: str, size: int) -> Iterator[Callable[[int], None]]:
    """A function that shows the number of bytes done."""
    from tqdm.auto import tqdm

    with tqdm(
        total=size, unit="B", unit_scale=True, desc=description, disable=arguments.quiet, dynamic_ncols=True
    ) as bar:
        yield lambda done: bar.update(done - bar.n) and None


def _results(name: Path, source: Path, output: Path, seconds: float) -> dict[str, Any]:
    before, after, xz = source.stat().st_size, output.stat().st_size, None
    if before <= _LARGEST_FOR_XZ:
        xz = len(lzma.compress(source.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
    rates = {"bits_per_byte": 8 * after / before if before else None, "bytes_per_second": before / seconds}
    return {"file": str(name), "output": str(output), "bytes": before, "archive_bytes": after, "xz_bytes": xz, **rates}


def _summarize(results: dict[str, Any]) -> None:
    summary = "{file} → {output}: {bytes:,} → {archive_bytes:,} bytes".format(**results)
    if results["bytes"]:
        summary += f", {results['bits_per_byte']:.3f} bits per byte, {results['bytes_per_second'] / 1000:.1f} kB/s"
    print(summary, file=sys.stderr)
    if results["xz_bytes"] is not None:
        print(f"xz -9e: {results['xz_bytes']:,}", file=sys.stderr)


main = command(build_parser, _compress)
