"""Record the traces of the code that is imported: `python tests/traces/record.py [--saved] [NAME ...]`.

Only for a change that is meant to change numbers. Records all runs, or the named ones, to traces.json, together
with the facts of the machine on which bits depend. PYTHONPATH says which code is recorded. With --saved, also the
archives in saved/, which otherwise stay as of the version that wrote them.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from saved_runs import save
from trace_machine import machine_facts
from trace_values import Trace, differences, recorded
from traced_runs import RESUMED, RUNS, SAVED, after_resuming

import hf_recurrent

TRACES_FILE = Path(__file__).with_name("traces.json")


def record(name: str, folder: Path, archive: bool) -> Trace:
    trace = RUNS[name](folder / "whole")
    if name in RESUMED:
        again = RUNS[name].resumed(folder / "again", folder / "whole")
        if found := list(differences(again, after_resuming(recorded(trace), again), tolerance=None)):
            raise SystemExit(f"{name!r}, resumed, is another run: {found}")
    if archive and name in SAVED:
        save(name, folder / "whole", SAVED[name])
    return recorded(trace)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs to record; all by default")
    parser.add_argument("--saved", action="store_true", help="also write the archives in saved/")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"recording {Path(hf_recurrent.__file__).parent}")
    facts, traces = machine_facts(), {}
    if arguments.names:
        stored = json.loads(TRACES_FILE.read_text(encoding="utf-8"))
        if stored["machine"] != facts:
            raise SystemExit("The recording is of another machine: record all runs.")
        traces = stored["traces"]
    for name in arguments.names or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            traces[name] = record(name, Path(folder).resolve(), arguments.saved)
        print(f"{name}: {len(traces[name])} values", flush=True)
    content = {"machine": facts, "traces": {name: traces[name] for name in RUNS if name in traces}}
    TRACES_FILE.write_text(json.dumps(content, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
