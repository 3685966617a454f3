"""What SMT's experiments have in common: an RNN and its teacher, and the two ways to train it at equal steps."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, set_seed

from hf_recurrent import (
    DmtTrainer,
    DmtTrainingArguments,
    MultiStreamTrainer,
    MultiStreamTrainingArguments,
    SmtRnnConfig,
    SmtRnnForCausalLM,
    SmtTeacherConfig,
    SmtTeacherModel,
    SmtTrainer,
    SmtTrainingArguments,
)
from hf_recurrent.modeling.modeling_smt_rnn import teacher_fields
from hf_recurrent.reproduce.experiment import Settings
from hf_recurrent.reproduce.smt_operations import step_operations
from hf_recurrent.reproduce.smt_sizes import BPTT, DMT, SMT
from hf_recurrent.reproduce.training import run_trainer

# Appendix "Algorithms", for every method.
_OPTIMIZER = {"weight_decay": 0.01, "adam_beta2": 0.999, "max_grad_norm": 1.0}


def build_pair(sizes: Settings, vocab_size: int, seed: int) -> tuple[SmtRnnForCausalLM, SmtTeacherModel]:
    """A new RNN and its teacher, initialised with the seed.

    Args:
        sizes: fields of `SmtRnnConfig`.
    """
    set_seed(seed)
    rnn = SmtRnnConfig(vocab_size=vocab_size, **sizes)
    return SmtRnnForCausalLM(rnn), SmtTeacherModel(SmtTeacherConfig(**teacher_fields(rnn)))


def train_bptt(
    rnn: PreTrainedModel, data: Any, held_out: Any, settings: Settings, *, block_size: int, **arguments: Any
) -> dict[str, Any]:
    """Backpropagation through time by a row's `steps`, `batch_size`, `bptt_learning_rate` and `seed`.

    Args:
        data, held_out: tasks or corpora.
        block_size: T, of a task an example.
        arguments: other fields of [`MultiStreamTrainingArguments`].

    Returns:
        What a row records, with `sequential_operations` and `tokens` of the whole run, and as `measured` what
        `MultiStreamTrainer.evaluate` finds on `held_out`.
    """
    results = run_trainer(
        lambda args: MultiStreamTrainer(rnn, args, data, held_out),
        MultiStreamTrainingArguments,
        steps=settings["steps"],
        learning_rate=settings["bptt_learning_rate"],
        block_size=block_size,
        measure=_evaluate,
        **_shared(settings),
        **arguments,
    )
    return {
        **results,
        "sequential_operations": settings["steps"] * step_operations(rnn, None, BPTT, block_size),
        "tokens": settings["steps"] * settings["batch_size"] * block_size,
    }


def train_smt_dmt(
    rnn: SmtRnnForCausalLM,
    teacher: SmtTeacherModel,
    data: Any,
    held_out: Any,
    settings: Settings,
    *,
    context_length: int,
    future_length: int,
    rollout_length: int,
    smt: Settings | None = None,
    dmt: Settings | None = None,
) -> dict[str, Any]:
    """SMT and then DMT: `steps` optimizer steps together, the last `dmt_steps` of them DMT's.

    Args:
        settings: a row with these, `batch_size`, `learning_rate`, `dmt_learning_rate`, `timesteps`, `dmt_timesteps`,
            `eval_windows` and `seed`.
        smt, dmt: other fields of the two phases' arguments.

    Returns:
        What a row records, as [`train_bptt`]; `measured` is that of the end, `measured_smt` that before DMT.
    """
    dmt_steps = settings["dmt_steps"]
    smt_steps = settings["steps"] - dmt_steps
    shared = {"context_length": context_length, "eval_windows": settings["eval_windows"], **_shared(settings)}
    first = run_trainer(
        lambda args: SmtTrainer(rnn, teacher, args, data, held_out),
        SmtTrainingArguments,
        steps=smt_steps,
        learning_rate=settings["learning_rate"],
        timesteps=settings["timesteps"],
        future_length=future_length,
        measure=_evaluate,
        **shared,
        **(smt or {}),
    )
    second = run_trainer(
        lambda args: DmtTrainer(rnn, teacher, args, data, held_out),
        DmtTrainingArguments,
        steps=dmt_steps,
        learning_rate=settings["dmt_learning_rate"],
        timesteps=settings["dmt_timesteps"],
        rollout_length=rollout_length,
        measure=_evaluate,
        **shared,
        **(dmt or {}),
    )
    blocks = [getattr(data, "length", context_length + length) for length in (future_length, rollout_length)]
    return {
        **second,
        "num_parameters": rnn.num_parameters(),
        "seconds": round(first["seconds"] + second["seconds"], 2),
        "measured_smt": first["measured"],
        "sequential_operations": smt_steps * step_operations(rnn, teacher, SMT, context_length, future_length)
        + dmt_steps * step_operations(rnn, teacher, DMT, rollout_length),
        "tokens": settings["batch_size"] * (smt_steps * blocks[0] + dmt_steps * blocks[1]),
    }


def _shared(settings: Settings) -> Settings:
    return {
        "seed": settings["seed"],
        "per_device_train_batch_size": settings["batch_size"],
        "per_device_eval_batch_size": 16,
        **_OPTIMIZER,
    }


def _evaluate(trainer: MultiStreamTrainer) -> dict[str, float]:
    return {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}


def training_words(row: Settings) -> str:
    """How the methods were trained, for the reports."""
    rates = row.get("bptt_learning_rates") or [row[key] for key in ("bptt_learning_rate",) if key in row]
    tuned = " or ".join(f"{rate:g}" for rate in rates) + (", whichever is better," if len(rates) > 1 else "")
    sampled = f"{row['timesteps']} timesteps of each sequence" if row["timesteps"] else "all timesteps"
    return (
        f"width {row['sizes']['hidden_size']}, {row['sizes']['num_memory_tokens']} memory tokens, "
        f"{row['sizes']['num_hidden_layers']} layers; {row['steps']:,} optimizer steps of {row['batch_size']} "
        f"sequences for every method, of SMT→DMT the last {row['dmt_steps']:,} are DMT's; learning rates "
        f"{row['learning_rate']:g} (SMT), {row['dmt_learning_rate']:g} (DMT)"
        + (f", {tuned} (BPTT)" if tuned else "")
        + f"; SMT on {sampled}"
    )


def cost_words(rows: Sequence[Settings]) -> str:
    """Sequential operations and tokens of whole runs, for the reports."""
    costs = {}
    for row in rows:
        name = row["label"] + (f" at T = {row['x']}" if "x" in row else "")
        costs[name] = f"{row['sequential_operations']:,} on {row['tokens']:,} tokens"
    words = "; ".join(f"{name} {cost}" for name, cost in costs.items())
    return f"Operations of the training that have to follow one another: {words}."
