"""Estimate the processor time of the experiments' rows from a few steps of each, for `reproduce --overview`.

python scripts/time_experiments.py                            # rows that are neither recorded nor estimated
python scripts/time_experiments.py --override data=FOLDER     # of MNIST
python scripts/time_experiments.py smt-scaling --every 3      # every third row; the others count as much as the mean
"""

import argparse
import io
from contextlib import redirect_stdout
from pathlib import Path

from hf_recurrent.cli.parsing import parse_pairs
from papers import EXPERIMENTS, load_experiment
from papers.engine.durations import read_times, time_row, write_times
from papers.engine.rows_file import find_row, read_rows, row_key, rows_path

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help="experiments (default: all)")
    parser.add_argument("--size", default="small", choices=["small", "paper"])
    parser.add_argument("--override", nargs="+", default=[], metavar="NAME=VALUE", help="such as data=FOLDER")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="time every Nth row only")
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    overrides = parse_pairs("--override", arguments.override)
    times = read_times(arguments.size, arguments.output_dir)
    for name in arguments.names or EXPERIMENTS:
        experiment = load_experiment(name)
        stored = read_rows(rows_path(experiment, arguments.size, arguments.output_dir))
        rows = {row_key(row): row for row in experiment.rows(arguments.size)}
        rows = {key: row for key, row in rows.items() if "core_seconds" not in (find_row(stored, row) or {})}
        # Estimates of rows that are gone, or recorded with their processor time, are dropped.
        times[name] = {key: entry for key, entry in times.get(name, {}).items() if key in rows}
        for key, row in list(rows.items())[:: arguments.every]:
            if key in times[name]:
                continue
            row = {setting: overrides.get(setting, value) for setting, value in row.items()}
            with redirect_stdout(io.StringIO()):
                times[name][key] = time_row(experiment, arguments.size, row)
            print(f"{name}: {times[name][key]}", flush=True)
            write_times(times, arguments.size, arguments.output_dir)


if __name__ == "__main__":
    main()
