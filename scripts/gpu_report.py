#!/usr/bin/env python
"""Everything about the speed on one GPU, unattended, in at most ten minutes: tables, plots and a JSON file.

    python scripts/gpu_report.py                             # into gpu_report/
    python scripts/gpu_report.py --parts scan training --minutes 4 --output scan_and_training
    python scripts/gpu_report.py --rehearse --minutes 2      # on a CPU, at tiny sizes, Triton in its interpreter

Each part runs in a process of its own with a time limit, a share of what is left; what one part does not use, the next
ones get. Every row is written to rows/ when it is measured, and report.json, report.md and the plots are made again
after every part and when Ctrl-C or SIGTERM ends the run, so that a run that is cut off keeps what it has. A part that
fails, hangs or is killed is reported, and leaves the others alone. Nothing is installed: a package that is missing is
a row that says so.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import gpu_report_pages as pages

HERE = Path(__file__).resolve().parent
# Part → its share of the time.
PARTS = {
    "environment": 8,
    "scan": 20,
    "training": 26,
    "tests": 14,
    "generation": 12,
    "profile": 6,
    "rtrl": 6,
    "smt": 6,
    "memory": 7,
}
_LEAST_SECONDS = 30  # imports alone take a part of it
_LAST_LINES = 400  # characters of an error that the report shows


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu_report"), help="folder (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=9.5, help="of all parts together (default %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--device", default="cuda", help="torch device (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU, Triton in its interpreter")
    arguments = parser.parse_args(argv)
    if arguments.minutes <= 0:
        parser.error(f"--minutes is {arguments.minutes}; it must be more than 0.")
    return arguments


def run_part(name: str, command: Sequence[str], rows: Path, seconds: float, rehearse: bool = False) -> dict:
    """Run one part in a process of its own; returns its outcome.

    Args:
        name: of the part.
        command: runs it; it writes rows as lines of JSON to `rows`.
        rows: that file.
        seconds: after which the process and its children are killed.
        rehearse: with Triton in its interpreter.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    if rehearse:
        environment["TRITON_INTERPRET"] = "1"
    log, begin = rows.with_suffix(".log"), time.monotonic()
    with open(log, "wb") as output:
        child = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = child.wait(max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill_group(child)
    outcome = "done" if status == 0 else "stopped at its time limit" if status is None else f"failed ({status})"
    if status is not None and status < 0:
        outcome = f"killed by {signal.Signals(-status).name}"
    result = {"part": name, "outcome": outcome, "seconds": round(time.monotonic() - begin, 1)}
    if status:
        words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        result["error"] = " ".join(words)[-_LAST_LINES:]
    return result | {"rows": read_rows(rows)}


def _kill_group(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # its children too, such as compilers
    child.wait()


def read_rows(path: Path) -> list[dict]:
    """The rows of a file of lines of JSON; a last one that was cut off is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def part_command(name: str, rows: Path, arguments: argparse.Namespace, seconds: float) -> list[str]:
    """The command that runs a part."""
    device = "cpu" if arguments.rehearse else arguments.device
    words = [sys.executable, str(HERE / "gpu_report_parts.py"), name, "--rows", str(rows), "--device", device]
    return [*words, "--seconds", f"{seconds:.0f}", *["--rehearse"] * arguments.rehearse]


def report(arguments: argparse.Namespace, command=part_command) -> list[dict]:
    """Run the parts one after another; returns their outcomes with rows.

    Args:
        arguments: of the script.
        command: makes the command of a part.
    """
    folder, end = arguments.output, time.monotonic() + 60 * arguments.minutes
    (folder / "rows").mkdir(parents=True, exist_ok=True)
    results: list[dict] = []
    for number, name in enumerate(arguments.parts):
        shares = [PARTS[part] for part in arguments.parts[number:]]
        left = end - time.monotonic()
        seconds = max(left * shares[0] / sum(shares), min(left / 2, _LEAST_SECONDS))
        rows = folder / "rows" / f"{name}.jsonl"
        rows.unlink(missing_ok=True)
        words, begin = command(name, rows, arguments, seconds), time.monotonic()
        try:
            results.append(run_part(name, words, rows, seconds, arguments.rehearse))
        except (KeyboardInterrupt, SystemExit):
            spent = round(time.monotonic() - begin, 1)
            results.append({"part": name, "outcome": "cut off", "seconds": spent, "rows": read_rows(rows)})
            raise
        finally:
            save(folder, results, arguments.rehearse)
    return results


def save(folder: Path, results: list[dict], rehearse: bool) -> None:
    """Print a line about the last part, and make report.json, the page and the plots of all parts so far."""
    last = results[-1]
    print(f"{last['part']:<12} {last['outcome']}, {last['seconds']:.0f} s, {len(last['rows'])} rows", flush=True)
    (folder / "report.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    try:
        pages.write(folder, results, rehearse)
    except Exception as error:  # a page that cannot be drawn must not end the measurements
        print(f"report.md: {type(error).__name__}: {error}", file=sys.stderr)


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        report(arguments)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        print(f"report: {arguments.output / 'report.md'}")


if __name__ == "__main__":
    main()
