"""Estimate the time of each experiment at the paper's size, from times that were measured on CPU cores.

python scripts/estimate_paper_sizes.py                        # prints the table
python scripts/estimate_paper_sizes.py --page docs/results.md  # and replaces it there

All measured times are in docs/performance.md. No run at the paper's size was made, and no GPU was measured.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_recurrent import AssociativeRecall, InductionHeads, config_from_preset
from hf_recurrent.tasks.task_names import task_from_name
from papers import load_experiment
from papers.engine.durations import core_seconds
from papers.engine.rows_file import read_rows, rows_path
from papers.engine.tuning import tuning_rows

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
BEGIN, END = "<!-- paper sizes -->", "<!-- end of paper sizes -->"
# "Training against Llama and Mamba2": operations per second of a core in a training step of Memora-S0.
CORE = 6 * 1_657_472 * 5_332
# "A step of Supervised Memory Training": seconds of a core for one timestep of a sequence, for its Tc + Tf + Z tokens,
# and for one step of BPTT through a sequence.
SMT_TIMESTEP, SMT_TOKENS, BPTT_STEP = 1.4647 / 4, 256 + 64 + 16, 21.7076 / 4 / 256
# "A step of real-time recurrent learning", 26.1 million parameters: seconds of a step of one stream, and of 64.
RTRL_PARAMETERS, RTRL_SECONDS = 26_100_000, {("rtrl", 1): 0.0320, ("rtrl", 64): 0.2225}
RTRL_SECONDS |= {("truncated", 1): 0.0236, ("truncated", 64): 0.1320}
# Bytes of an epoch of TinyStories, for rows that count epochs.
EPOCH = 2.0e9
# Assumed: a tenth of the bfloat16 peak of an H100. Small operations one after another are slower than that.
GPU = 100e12

Row = Mapping
Basis = Callable[[Row, Sequence[Row]], float]  # a row of the paper's size, the recorded rows → seconds of a core


@cache
def num_parameters(preset: str, kind=AutoModelForCausalLM, **overrides) -> int:
    """Of a preset, counted without memory."""
    with torch.device("meta"):
        return kind.from_config(config_from_preset(preset, **overrides)).num_parameters()


def by_operations(operations: Callable[[Row], float]) -> Basis:
    """6 operations per parameter and token, at the rate of Memora-S0."""
    return lambda row, _: 6 * operations(row) / CORE


def as_recorded(work: Callable[[Row], float]) -> Basis:
    """The recorded processor time of the small size, times the ratio of the work."""
    return lambda row, small: work(row) * sum(map(core_seconds, small)) / sum(map(work, small))


def num_bytes(row: Row) -> float:
    """That a row reads."""
    return row["bytes"] if "bytes" in row else row["epochs"] * EPOCH


def text_of_a_family(row: Row) -> float:
    return num_parameters(f"{row['family']}-tinystories") * num_bytes(row)


def text_of_a_unit(row: Row) -> float:
    widths = {key: row[key] for key in ("hidden_size", "state_size", "num_hidden_layers", "recurrent_unit")}
    return num_parameters("memora-tiny", **widths) * num_bytes(row)


def text_of_a_preset(row: Row) -> float:
    return num_parameters(row["preset"], **row["widths"], **row.get("fields", {})) * num_bytes(row)


def text_in_windows(row: Row) -> float:
    return text_of_a_preset(row) * row["overlap"]


def copied_bits(row: Row) -> float:
    steps_of_a_sequence = 2 * row["num_tokens"] + 7
    return num_parameters("lru-copy", num_hidden_layers=row["layers"]) * examples(row) * steps_of_a_sequence


def long_range(row: Row) -> float:
    """Sequences of the Long Range Arena, with assumed mean lengths of texts and expressions."""
    count, length = {"pixels": (50_000, 1024), "texts": (25_000, 1300), "list_ops": (96_000, 1000)}[row["task"]]
    parameters = num_parameters(row["preset"], AutoModelForSequenceClassification, **row["options"])
    return parameters * count * length * row["epochs"]


def examples(row: Row) -> float:
    return row["steps"] * row["batch_size"] * row.get("length", 1)


def selective_copying(row: Row) -> float:
    return num_parameters(row["preset"], **row["widths"]) * examples(row)


def recall(row: Row) -> float:
    task = InductionHeads if row["task"] == "induction heads" else AssociativeRecall
    return examples(row) * task(**row["task_options"]).length


def copied_strings(row: Row) -> float:
    return num_parameters(row["preset"], **row["widths"]) * examples(row) * 2 * row["max_length"]


def trajectories(row: Row) -> float:
    return row["num_trajectories"] * row["num_steps"] * row["epochs"]


def pixels(row: Row) -> float:
    is_small = row["pooling"] == 2
    images, length = (50_000, 1024) if row["dataset"] == "cifar" else (8_500, 196) if is_small else (60_000, 784)
    length = 1024 if row.get("padding") else length
    parameters = num_parameters(row["preset"], AutoModelForSequenceClassification, **row["options"])
    return images * length * row["epochs"] * parameters


def stream(row: Row) -> float:
    return num_parameters(row["preset"]) * row["segment_bytes"]


def gradients(row: Row) -> float:
    return row["batch_size"] * row["sizes"]["hidden_size"] ** 2 * row["sizes"]["num_hidden_layers"]


def online(row: Row, _: Sequence[Row]) -> float:
    widths = {key: row[key] for key in ("hidden_size", "state_size", "num_hidden_layers")}
    measured = 1 if row["streams"] == 1 else 64
    step = RTRL_SECONDS[row["method"], measured] * row["streams"] / measured
    steps = row["steps"] if "steps" in row else num_bytes(row) / row["streams"]
    return steps * step * num_parameters("memora-tiny", **widths) / RTRL_PARAMETERS


def memories(row: Row, _: Sequence[Row]) -> float:
    """SMT on each timestep, then DMT, whose RNN is unrolled as in BPTT."""
    digits = 784 // row.get("patch", 1) ** 2 if "crop" in row else None
    length = task_from_name(row["task"]).length if "task" in row else None
    context, future = length or row["context_length"], row.get("future_length", length)
    if row["method"] == "BPTT":
        steps = length or digits or context + future
        return row["steps"] * row.get("bptt_share", 1) * row["batch_size"] * steps * BPTT_STEP
    unrolled = length or digits or row["rollout_length"]
    timestep = SMT_TIMESTEP * (context + future + row["sizes"]["num_memory_tokens"]) / SMT_TOKENS
    smt = (row["timesteps"] or length) * timestep
    dmt = unrolled * BPTT_STEP + min(row["dmt_timesteps"] or length, unrolled) * timestep
    return row["batch_size"] * ((row["steps"] - row["dmt_steps"]) * smt + row["dmt_steps"] * dmt)


OPERATIONS, RECORDED = "6 · parameters · bytes, Memora-S0's rate", "small size, times the work"
SMT, RTRL = "a step of SMT and of BPTT", "a step of RTRL"
BASES: dict[str, tuple[str, Basis]] = {
    "selective-copying": (OPERATIONS, by_operations(selective_copying)),
    "stride-sweep": (OPERATIONS, by_operations(text_of_a_family)),
    "glru-alternatives": (OPERATIONS, by_operations(text_of_a_unit)),
    "memora-against-hawk": (OPERATIONS, by_operations(text_of_a_preset)),
    "rolling-window": (OPERATIONS, by_operations(text_in_windows)),
    "online-copy-curves": (OPERATIONS, by_operations(copied_bits)),
    "online-long-range": (OPERATIONS, by_operations(long_range)),
    "parity": (RECORDED, as_recorded(examples)),
    "recall": (RECORDED, as_recorded(recall)),
    "string-copying": (OPERATIONS, by_operations(copied_strings)),
    "long-range-arena": (OPERATIONS, by_operations(long_range)),
    "online-memora": (RTRL, online),
    "online-copy": (RECORDED, as_recorded(examples)),
    "gradient-alignment": (RECORDED, as_recorded(examples)),
    "drift": (RECORDED, as_recorded(stream)),
    "mgrade-table1": (RECORDED, as_recorded(pixels)),
    "mgrade-table2": (RECORDED, as_recorded(pixels)),
    "mgrade-full-resolution": (OPERATIONS, by_operations(pixels)),
    "mgrade-memory-accuracy": (RECORDED, as_recorded(pixels)),
    "flip-flop": (RECORDED, as_recorded(examples)),
    "lorenz": (RECORDED, as_recorded(trajectories)),
    "lorenz-components": (RECORDED, as_recorded(trajectories)),
    "smt-gradients": (RECORDED, as_recorded(gradients)),
    **dict.fromkeys(
        (
            *("smt-tasks", "smt-pixels", "smt-text", "smt-drift", "smt-future-length"),
            *("smt-length-generalization", "smt-memory-space", "smt-task-sweeps", "smt-sketches", "smt-backbones"),
            *("smt-scaling", "smt-compression", "smt-loss-weights"),
        ),
        (SMT, memories),
    ),
}

# Experiments whose estimates use the recorded rows of another one, of the same models and data.
SAME_WORK = {"mgrade-memory-accuracy": "mgrade-table1"}


def core_hours(name: str) -> tuple[list[float], list[float]]:
    """Hours of one core for each row of an experiment at the paper's size, with one seed, and for each candidate that
    is compared before."""
    experiment = load_experiment(name)
    recorded = read_rows(rows_path(load_experiment(SAME_WORK.get(name, name)), "small", RESULTS))
    rows = experiment.rows("paper")
    # Rows that share candidates compare them once.
    trials = {str(trial): trial for row in rows for trial in tuning_rows(experiment, "paper", row)}
    of_rows, of_trials = ([BASES[name][1](row, recorded) / 3600 for row in each] for each in (rows, trials.values()))
    return of_rows, of_trials


def rounded(hours: float) -> str:
    """With two digits: an estimate has no more."""
    return f"{max(round(hours, 2 - len(str(int(hours)))), 1):,.0f}"


def hardware(hours: Sequence[float]) -> str:
    """Rows run in parallel, each on one core."""
    total, longest = sum(hours), max(hours)
    if longest <= 48 and total <= 8 * 48:
        return "a desktop of 8 cores"
    if longest <= 24 * 7 and total <= 64 * 24 * 7:
        return "a server of 64 cores"
    return f"GPU, from {rounded(total * CORE / GPU)} h"


def table() -> str:
    lines = [
        "| experiment | rows | core-hours | longest row | measured basis | hardware |",
        "|---|---|---|---|---|---|",
    ]
    for name, (basis, _) in BASES.items():
        rows, trials = core_hours(name)
        hours = rows + trials
        cells = (name, f"{len(rows)}", rounded(sum(hours)), rounded(max(hours)), basis, hardware(hours))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--page", type=Path, help="Markdown page in which to replace the table")
    page, text = parser.parse_args().page, table()
    print(text)
    if page is not None:
        section = f"{BEGIN}\n{text}\n{END}"
        found = page.read_text(encoding="utf-8")
        page.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: section, found, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
