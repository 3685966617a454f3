"""The arguments of `hf-recurrent watch`."""

import argparse
from pathlib import Path

from hf_recurrent.cli.parsing import CommandParser, check_at_least, check_parent
from hf_recurrent.cli.threads import add_threads_argument

DEFAULT_MODEL = "hawk-tiny"
# Rate and stride at which new weights get to know a log within its first hundreds of lines.
LEARNING_RATE, STRIDE = 1e-3, 32
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = CommandParser(
        prog="hf-recurrent watch",
        description="Read logs line by line as they grow, learn what is usual in them, and show the\n"
        "lines that are not. No training, no rules and no parsing are needed.",
        epilog="examples:\n"
        "  hf-recurrent watch /var/log/syslog\n"
        "  hf-recurrent watch server.log --no_follow\n"
        "  hf-recurrent watch app.log db.log --output lines.jsonl --metrics 9100\n"
        "  journalctl -f -o json | hf-recurrent watch -\n"
        "  hf-recurrent watch app.log --exec 'mail -s \"$WATCH_LOG\" root'\n\n"
        "Ctrl-C saves everything and stops; the same command continues at that line.\n"
        "--exec gets the line as JSON on standard input and in WATCH_ variables.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="files, or - for standard input")
    reading = parser.add_argument_group("reading")
    reading.add_argument("--no_follow", action="store_true", help="read the files from beginning to end, then stop")
    reading.add_argument(
        "--history",
        type=_bytes,
        default=64_000,
        metavar="BYTES",
        help="where to begin in a file that exists: so many bytes before its end, such as 2M, or all (default: 64k)",
    )
    reading.add_argument(
        "--format",
        choices=("auto", "text", "journald"),
        default="auto",
        help="journald: JSON of journalctl -o json, read as `program: message` (default: auto)",
    )
    reading.add_argument(
        "--max_line_bytes", type=int, default=4096, metavar="N", help="read only the first N of a line"
    )
    judging = parser.add_argument_group("judging")
    judging.add_argument(
        "--false_alarms",
        type=float,
        default=0.01,
        metavar="RATE",
        help="share of the lines of a log to flag while nothing is wrong (default: 0.01)",
    )
    judging.add_argument("--window", type=int, default=1000, metavar="LINES", help="a line is compared with so many")
    judging.add_argument("--learn_flagged", action="store_true", help="learn from flagged lines, too")
    learning = parser.add_argument_group("learning")
    learning.add_argument("--model", default=DEFAULT_MODEL, help=f"preset or checkpoint (default: {DEFAULT_MODEL})")
    learning.add_argument("--learning_rate", type=float, help=f"constant (default: {LEARNING_RATE:g})")
    learning.add_argument("--stride", type=int, default=STRIDE, help=f"bytes per update (default: {STRIDE})")
    learning.add_argument("--seed", type=int, default=0, help="seed of the new weights of a preset")
    learning.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    add_threads_argument(learning, "CPU threads; more do not help a single stream (default: 1)")
    parser.set_defaults(threads=1)
    output = parser.add_argument_group("results")
    output.add_argument("--all", action="store_true", help="show every line, not only unusual ones")
    output.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: on a terminal")
    output.add_argument("--output", type=Path, metavar="FILE", help="append every line as JSON, flagged or not")
    output.add_argument("--metrics", type=int, metavar="PORT", help="serve Prometheus metrics on 127.0.0.1:PORT")
    output.add_argument("--exec", metavar="COMMAND", help="run this shell command for every unusual line")
    output.add_argument("--output_dir", type=Path, metavar="DIR", help="state (default: runs/watch-LOG)")
    output.add_argument("--restart", action="store_true", help="forget the state in --output_dir and begin anew")
    output.add_argument("--save_every", type=float, default=300, metavar="SECONDS", help="between checkpoints")
    output.add_argument("--quiet", action="store_true", help="hide everything but unusual lines and problems")
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise an error that names the first argument that is not allowed."""
    check_at_least(1, arguments, "max_line_bytes", "stride")
    if not arguments.save_every > 0:
        raise ValueError(f"`--save_every` is {arguments.save_every:g}; it must be more than 0 seconds.")
    if arguments.metrics is not None and not 0 <= arguments.metrics < 1 << 16:
        raise ValueError(f"`--metrics` is {arguments.metrics}; it must be a port, from 0 to 65535.")
    doubled = [log for log in arguments.logs if arguments.logs.count(log) > 1]
    if doubled:
        raise ValueError(f"`LOG` has {doubled[0]!r} twice; each log is read once.")
    for log in arguments.logs:
        if log != "-" and Path(log).is_dir():
            raise ValueError(f"`LOG` is {log!r}, a directory; it must be a file.")
        if log.endswith((".gz", ".zst", ".xz", ".bz2")):
            raise ValueError(f"`LOG` is {log!r}, which is compressed; use `zcat {log} | hf-recurrent watch -`.")
    check_parent("--output", arguments.output)
    if arguments.output is not None and arguments.output.is_dir():
        raise IsADirectoryError(f"`--output` is {str(arguments.output)!r}; it must be a file, not a directory.")


def _bytes(text: str) -> int | None:
    if text == "all":
        return None
    number, unit = (text[:-1], text[-1]) if text[-1:] in ("k", "M", "G") else (text, "")
    try:
        value = float(number) * _UNITS[unit]
    except ValueError:
        value = -1.0
    if not 0 <= value < 2**62:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 64k or 2M, or all")
    return int(value)
