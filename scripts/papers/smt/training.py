"""Train an RNN by BPTT or by SMT→DMT, at equal optimizer steps."""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_recurrent import (
    DmtTrainer,
    DmtTrainingArguments,
    MultiStreamTrainer,
    MultiStreamTrainingArguments,
    SmtRnnForCausalLM,
    SmtTrainer,
    SmtTrainingArguments,
    Task,
)
from papers.engine.experiment import Experiment, Settings
from papers.engine.pictures import mean_points, split_axes
from papers.engine.training import run_trainer
from papers.smt.models import BPTT, DMT, SMT, SMT_DMT, TEACHER, Pair, build_pair
from papers.smt.operations import step_operations

# Learning rates to choose from: factors of a row's for SMT and DMT, and as many for BPTT. The paper prints none.
_FACTORS = {"small": (0.3, 1.0), "paper": (0.3, 1.0, 3.0)}
_BPTT_RATES = {"small": (1e-3, 3e-3), "paper": (1e-4, 3e-4, 1e-3)}
# Appendix "Algorithms", for every method.
_OPTIMIZER = {"weight_decay": 0.01, "adam_beta2": 0.999, "max_grad_norm": 1.0}


class MethodComparison(Experiment):
    """BPTT against SMT→DMT; the table has the costs of the whole training."""

    lines = {BPTT: {"method": BPTT}, SMT_DMT: {"method": SMT_DMT}}

    def tuning_loss(self, row: Settings) -> float:
        value = row["value"][row["method"]]
        return -value if self.percent else value

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        costs = {"sequential operations": "sequential_operations", "tokens": "tokens"}
        return {**super().details(rows), **{column: f"{rows[-1][key]:,}" for column, key in costs.items()}}

    def draw_sweeps(self, axes: Any, rows: Sequence[Settings], key: str, **options: Any) -> None:
        """A panel for each value of a row's `key`, with a line for each method over the number that is `swept`."""
        names = list(dict.fromkeys(row[key] for row in rows))
        for panel, name in zip(split_axes(axes, 1, len(names), (4 * len(names), 4)), names, strict=True):
            for kind in (BPTT, SMT_DMT, TEACHER):
                own = [row for row in rows if row[key] == name and kind in row["value"]]
                if own:
                    places = mean_points((row["swept"], self.scale * row["value"][kind]) for row in own)
                    panel.plot(*zip(*places, strict=True), "o-", label=kind)
            if self.log_x:
                panel.set_xscale("log", base=2)
            panel.set(xlabel=name, ylabel=self.metric + (" (%)" if self.percent else ""), **options)
            panel.legend(fontsize="small")


def learning_rates(method: str, size: str, settings: Settings) -> list[Settings]:
    """Candidates of a row: for BPTT learning rates, for SMT→DMT factors of the row's `learning_rate` and
    `dmt_learning_rate`."""
    if method == BPTT:
        return [{"bptt_learning_rate": rate} for rate in _BPTT_RATES[size]]
    rates = ("learning_rate", "dmt_learning_rate")
    return [{key: settings[key] * factor for key in rates} for factor in _FACTORS[size]]


def train_on(task: Task, settings: Settings, lengths: Mapping[str, int]) -> tuple[dict[str, Any], Pair]:
    """Train a new RNN on a task by a row's `method` and `sizes`; SMT and DMT with the `context_length` and
    `future_length` of `lengths`, BPTT and DMT over whole examples. Results, (RNN, teacher)."""
    pair = build_pair(settings["sizes"], task.vocab_size, settings["seed"])
    if settings["method"] == BPTT:
        return train_bptt(pair[0], task, task, settings, block_size=task.length), pair
    return train_smt_dmt(pair, task, task, settings, {**lengths, "rollout_length": task.length}), pair


def train_bptt(
    rnn: SmtRnnForCausalLM, data: Any, held_out: Any, settings: Settings, *, block_size: int
) -> dict[str, Any]:
    """Backpropagation through time by a row's `steps`, `batch_size`, `bptt_learning_rate` and `seed`.

    Args:
        data, held_out: tasks or corpora.
        block_size: T; of a task, the length of an example.

    Returns:
        The record of [`run_trainer`] with the evaluation on `held_out` as `measured`, and `sequential_operations` and
        `tokens` of the whole run.
    """
    steps = settings["steps"]
    bptt = {"steps": steps, "learning_rate": settings["bptt_learning_rate"], "block_size": block_size}
    results = _run((rnn,), (data, held_out), settings, MultiStreamTrainer, MultiStreamTrainingArguments, **bptt)
    operations = steps * step_operations(rnn, None, BPTT, block_size)
    return {**results, "sequential_operations": operations, "tokens": steps * settings["batch_size"] * block_size}


def train_smt_dmt(
    pair: Pair, data: Any, held_out: Any, settings: Settings, lengths: Mapping[str, int]
) -> dict[str, Any]:
    """SMT and then DMT: `steps` optimizer steps together, the last `dmt_steps` of them DMT's; with 0, SMT alone.

    Args:
        settings: a row with these, `batch_size`, `learning_rate`, `dmt_learning_rate`, `timesteps`, `dmt_timesteps`,
            `eval_windows` and `seed`; `dmt_batch_size`, if DMT has another one; `smt`, if there, has other fields of
            [`SmtTrainingArguments`].
        lengths: `context_length`, `future_length` and `rollout_length`.

    Returns:
        As [`train_bptt`]; `measured` is the evaluation at the end, `measured_smt` that before DMT.
    """
    dmt_steps, context = settings["dmt_steps"], lengths["context_length"]
    smt_steps = settings["steps"] - dmt_steps
    of_dmt = {**settings, "batch_size": settings.get("dmt_batch_size", settings["batch_size"])}
    shared = {"context_length": context, "eval_windows": settings["eval_windows"]}
    smt = {"steps": smt_steps, "future_length": lengths["future_length"], **shared, **settings.get("smt", {})}
    dmt = {"steps": dmt_steps, "rollout_length": lengths["rollout_length"], **shared}
    for key in ("learning_rate", "timesteps"):
        smt[key], dmt[key] = settings[key], settings[f"dmt_{key}"]
    first = _run(pair, (data, held_out), settings, SmtTrainer, SmtTrainingArguments, **smt)
    second = _run(pair, (data, held_out), of_dmt, DmtTrainer, DmtTrainingArguments, **dmt) if dmt_steps else first
    blocks = [getattr(data, "length", context + lengths[key]) for key in ("future_length", "rollout_length")]
    return {
        **second,
        "num_parameters": pair[0].num_parameters(),
        "seconds": round(first["seconds"] + (second["seconds"] if dmt_steps else 0.0), 2),
        "measured_smt": first["measured"],
        "sequential_operations": smt_dmt_operations(pair, settings, lengths),
        "tokens": smt_steps * settings["batch_size"] * blocks[0] + dmt_steps * of_dmt["batch_size"] * blocks[1],
    }


def smt_dmt_operations(pair: Pair, settings: Settings, lengths: Mapping[str, int]) -> int:
    """Sequential operations of [`train_smt_dmt`] with the same arguments."""
    dmt_steps = settings["dmt_steps"]
    smt = step_operations(*pair, SMT, lengths["context_length"], lengths["future_length"])
    return (settings["steps"] - dmt_steps) * smt + dmt_steps * step_operations(*pair, DMT, lengths["rollout_length"])


def method_values(results: dict[str, Any], measure: str) -> dict[str, float]:
    """One measure of an RNN after BPTT, or of an RNN after DMT and before it and of its teacher."""
    measured = results["measured"]
    if "measured_smt" not in results:
        return {BPTT: measured[measure]}
    before = results["measured_smt"][measure]
    return {SMT_DMT: measured[measure], SMT: before, TEACHER: measured[f"teacher_{measure}"]}


def _run(
    models: tuple[Any, ...],
    data: tuple[Any, Any],
    settings: Settings,
    trainer: Any,
    arguments_class: type[MultiStreamTrainingArguments],
    **arguments: Any,
) -> dict[str, Any]:
    """Train models with one trainer and evaluate."""
    return run_trainer(
        lambda args: trainer(*models, args, *data),
        arguments_class,
        measure=lambda trainer: {key.removeprefix("eval_"): value for key, value in trainer.evaluate().items()},
        seed=settings["seed"],
        per_device_train_batch_size=settings["batch_size"],
        per_device_eval_batch_size=16,
        **_OPTIMIZER,
        **arguments,
    )
