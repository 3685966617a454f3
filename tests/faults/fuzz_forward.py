"""Calls with random arguments, most of them wrong: no call crashes, wrong arguments are refused with a clear message,
and the results of all others equal plain code.

    python tests/faults/fuzz_forward.py --cases 3500 --seed 0

Cases run in children, so that a crash is known by its case; `--case N` with the same seed runs that one again.
"""

import argparse
import faulthandler
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable

import torch
import transformers
from forked import run_forked
from fuzz_model_cases import changed_weights_case, forward_case, generate_case, teacher_case
from fuzz_scan_cases import operator_case, scan_case, sensitivities_case
from fuzzing import Case, Failed, judge

KINDS: dict[Callable[[random.Random], Case], int] = {  # and how often each is drawn
    forward_case: 11,
    changed_weights_case: 3,
    generate_case: 2,
    scan_case: 5,
    operator_case: 2,
    sensitivities_case: 1,
    teacher_case: 1,
}
BATCH = 40  # cases of one child
SECONDS = 300.0  # of one child


def case_of(seed: int, number: int) -> Case:
    """The case of that number; every case has random numbers of its own."""
    draw = random.Random(f"{seed} {number}")
    torch.manual_seed(draw.randrange(1 << 30))
    return draw.choices(list(KINDS), list(KINDS.values()))[0](draw)


def run_case(seed: int, number: int) -> None:
    """Print one line: the number, the outcome and what was called."""
    print(number, "begins", flush=True)
    case = case_of(seed, number)
    print(number, "calls", case.what, flush=True)
    try:
        outcome = judge(case)
    except Failed as failure:
        outcome = f"FAILED: {failure}"
    print(number, "ends", " ".join(outcome.split()), flush=True)


def run_cases(seed: int, numbers: range) -> dict[int, tuple[str, str]]:
    """By number, the outcome and what was called."""
    outcomes: dict[int, tuple[str, str]] = {}
    waiting = list(numbers)

    def some() -> None:
        faulthandler.enable()
        for number in waiting[:BATCH]:
            run_case(seed, number)

    while waiting:
        child = run_forked(some, seconds=SECONDS)
        last, calls = waiting[0], {}
        for line in child.out.splitlines():
            number, event, *rest = line.split(" ", 2)
            if not number.isdigit():
                continue
            last = int(number)
            if event == "calls":
                calls[last] = rest[0]
            elif event == "ends":
                outcomes[last] = rest[0], calls[last]
        if last not in outcomes:
            how = "hangs" if child.timed_out else f"ends with status {child.status}"
            outcomes[last] = f"FAILED: the process {how}: {child.err[-2000:]}", calls.get(last, "while it was drawn")
        waiting = [number for number in waiting if number not in outcomes]
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=3500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this case only, in this process")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    arguments = parser.parse_args()
    prepare()
    if arguments.case is not None:
        faulthandler.enable()
        run_case(arguments.seed, arguments.case)
        return
    begin = time.monotonic()
    outcomes = run_cases(arguments.seed, range(arguments.cases))
    if arguments.verbose:
        for number, (outcome, what) in sorted(outcomes.items()):
            print(number, outcome, "|", what)
    counts = Counter((what.split()[0], outcome.split(":")[0]) for outcome, what in outcomes.values())
    for (kind, outcome), count in sorted(counts.items()):
        print(f"{kind:24} {outcome:10} {count}")
    refusals = Counter(outcome for outcome, _ in outcomes.values() if outcome.startswith("refused"))
    print(*(f"{outcome} {count}" for outcome, count in refusals.most_common()), sep="; ")
    failures = {number: case for number, case in sorted(outcomes.items()) if case[0].startswith("FAILED")}
    for number, (outcome, what) in failures.items():
        print(f"\ncase {number}: {what}\n    {outcome}\n    again: --seed {arguments.seed} --case {number}")
    print(f"{len(outcomes)} cases, {len(failures)} failures, {time.monotonic() - begin:.0f} s")
    sys.exit(bool(failures))


def prepare() -> None:
    """Settings of the process that forks."""
    torch.set_num_threads(1)  # children have no threads of a pool
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    main()
