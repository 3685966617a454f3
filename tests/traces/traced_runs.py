"""All runs that are traced, by name; those in `RESUMED` can also be continued from the middle."""

from collections.abc import Callable
from pathlib import Path

from command_runs import COMMAND_RUNS, CONTINUED
from learner_runs import LEARNER_RUNS, RESUMED_LEARNERS
from measure_runs import MEASURE_RUNS
from trace_values import Trace
from trainer_runs import RESUMED as RESUMED_TRAINERS
from trainer_runs import RESUMED_AT, TRAINER_RUNS

RUNS: dict[str, Callable[[Path], Trace]] = {**TRAINER_RUNS, **LEARNER_RUNS, **MEASURE_RUNS, **COMMAND_RUNS}
RESUMED: tuple[str, ...] = (*RESUMED_TRAINERS, *RESUMED_LEARNERS)
# Runs whose middle lies in `saved/` as an earlier version wrote it → the files that they continue from.
CHECKPOINT = f"checkpoint-{RESUMED_AT}"
SAVED: dict[str, tuple[str, ...]] = {
    "streams memora": (CHECKPOINT,),
    "streams task": (CHECKPOINT,),
    "online rtrl, strides": (CHECKPOINT,),
    "smt": (CHECKPOINT,),
    "dmt": (CHECKPOINT,),
    "learner stride 4": ("middle",),
    "pretrain small": ("run/*.json", "run/*.yaml", "run/model.safetensors", "run/checkpoint-6"),
    "pretrain smt": ("run/*.json", "run/model.safetensors", "run/teacher"),
    "generate": ("model", "state", "sampled"),
}
# How close numbers are on another machine; numbers of bfloat16 have three digits.
CLOSE, CLOSE_IN_BFLOAT16 = 1e-4, 0.05
# Where a trace says how a run ends.
_END = ("model/", "teacher/", "checkpoint/", "end/", "generated")


def tolerance_of(name: str) -> float:
    """Of a run on another machine than its recording's."""
    return CLOSE_IN_BFLOAT16 if "bfloat16" in name else CLOSE


def after_resuming(expected: Trace, resumed: Trace) -> Trace:
    """The part of a whole run's trace that its continuation has to have: everything about the end."""
    if any(name.startswith(CONTINUED) for name in resumed):
        return {name: value for name, value in expected.items() if name.startswith(CONTINUED)}
    # The mean loss of all steps of one call of `train` is the continuation's alone.
    wanted = {name: value for name, value in expected.items() if not name.startswith("train/")}
    return {name: value for name, value in wanted.items() if name in resumed or name.startswith(_END)}
