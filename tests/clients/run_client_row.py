"""Runs one row in its own process: `run_client_row.py NAME FOLDER` prints its outcome as the last line, in JSON.

Without arguments, it lists all rows.
"""

import json
import os
import sys
import traceback
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# OpenMP's threads wait for each other actively: on busy cores, two of them take many times as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from client_rows import Row, all_rows, installed_version


def facts(row: Row) -> dict:
    """Everything of a row but its check."""
    missing, version = row.missing_packages(), installed_version(row.client)
    return {"name": row.name, "client": row.client, "version": version, "tried": row.tried, "missing": missing}


def main() -> int:
    """Run the row; the status is 1 if it fails."""
    if len(sys.argv) == 1:
        print(json.dumps([facts(row) for row in all_rows()]))
        return 0
    name, folder = sys.argv[1:]
    row = next(row for row in all_rows() if row.name == name)
    try:
        outcome, how = row.run(Path(folder))
    except Exception as error:
        traceback.print_exc()
        outcome, how = "fails", f"{type(error).__name__}: {error}".split("\n")[0]
    print(json.dumps({"outcome": outcome, "how": how}))
    return int(outcome == "fails")


if __name__ == "__main__":
    raise SystemExit(main())
