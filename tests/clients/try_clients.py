"""Try every client of the ecosystem with our models, one small check each, and print a table of the results.

    python tests/clients/try_clients.py --environment ../clients          # sets up the environment there first: 2.5 GB
    python tests/clients/try_clients.py --only peft trl                   # in this environment: what is installed
    python tests/clients/try_clients.py --environment ../clients --markdown docs/reference/clients.md

The checks are in `tests/clients/rows_*.py`, the versions in `tests/clients/requirements*.txt`. Each check runs in a
process of its own with a time limit.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CLIENTS = Path(__file__).resolve().parent
ROOT = CLIENTS.parents[1]
TABLE_BEGINS, TABLE_ENDS = "<!-- table of tests/clients/try_clients.py -->\n", "<!-- end of the table -->\n"
HEADER = ("client", "version", "what was tried", "result")


def set_up(folder: Path) -> Path:
    """Create or complete the environment; return its Python."""
    sys.path.insert(0, str(ROOT))
    from bootstrap import TORCH

    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # torch first: with the others, pip could choose another build.
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, "--editable", f"{ROOT}[data,evaluate]", "-r", str(CLIENTS / "requirements.txt")], check=True)
    subprocess.run([*pip, "--no-deps", "-r", str(CLIENTS / "requirements-no-deps.txt")], check=True)
    return python


def list_rows(python: Path) -> list[dict]:
    """All rows, with the versions in that environment."""
    done = subprocess.run(
        [str(python), str(CLIENTS / "run_client_row.py")], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def try_row(python: Path, row: dict, limit: float) -> tuple[str, str]:
    """(outcome, how) of one row: works, refused, missing, fails."""
    if row["missing"]:
        return "missing", ", ".join(row["missing"])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python), str(CLIENTS / "run_client_row.py"), row["name"], folder]
        try:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return "fails", f"not done after {limit:g} s"
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return "fails", f"the process ended with status {done.returncode}"
    if result["outcome"] == "fails":
        print(done.stderr[-3000:], file=sys.stderr)
    return result["outcome"], result["how"]


def describe(outcome: str, how: str) -> str:
    """The last cell of a row."""
    if outcome == "works":
        return f"works: {how}" if how else "works"
    return f"{outcome}: {how}"


def markdown(cells: list[tuple[str, ...]]) -> str:
    """A table for the documentation."""
    lines = [HEADER, tuple("---" for _ in HEADER), *cells]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def write_markdown(path: Path, table: str) -> None:
    """Replace the table between the two marks of a page."""
    before, rest = path.read_text(encoding="utf-8").split(TABLE_BEGINS)
    after = rest.split(TABLE_ENDS)[1]
    path.write_text(before + TABLE_BEGINS + table + TABLE_ENDS + after, encoding="utf-8")


def main() -> int:
    """Run the rows; the status is 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--environment", type=Path, help="folder of a virtual environment, made if it does not exist")
    parser.add_argument("--only", nargs="+", default=[], help="clients or names of rows")
    parser.add_argument("--limit", type=float, default=1800, help="seconds per row (default: %(default)g)")
    parser.add_argument("--markdown", type=Path, help="replace the table in this page")
    options = parser.parse_args()
    if options.markdown and options.only:
        parser.error("--markdown replaces the whole table; --only leaves rows out")
    python = set_up(options.environment.absolute()) if options.environment else Path(sys.executable)
    cells, outcomes = [], []
    for row in list_rows(python):
        if options.only and not {row["name"], row["client"]} & set(options.only):
            continue
        begin = time.monotonic()
        outcome, how = try_row(python, row, options.limit)
        outcomes.append(outcome)
        cells.append((row["client"], row["version"] or "", row["tried"], describe(outcome, how)))
        print(f"{time.monotonic() - begin:4.0f} s  {row['name']}: {describe(outcome, how)}", flush=True)
    print("\n" + markdown(cells))
    print(", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes)))
    if options.markdown:
        write_markdown(options.markdown, markdown(cells))
    return int("fails" in outcomes)


if __name__ == "__main__":
    raise SystemExit(main())
