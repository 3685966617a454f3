"""What SMT's experiments have in common: an RNN and its teacher, and the two ways to train it at equal steps."""

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
from hf_recurrent.reproduce.experiment import Settings
from hf_recurrent.reproduce.training import run_trainer

BPTT, SMT, SMT_DMT, TEACHER = "BPTT", "SMT", "SMT→DMT", "teacher"
# Fields of `SmtRnnConfig`; the teacher's encoder is as deep as the update, as in appendix E.
SMALL_MODEL: Settings = {
    "hidden_size": 32,
    "num_memory_tokens": 4,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_readout_layers": 1,
}
PAPER_MODEL: Settings = {
    "hidden_size": 256,
    "num_memory_tokens": 16,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "num_readout_layers": 4,
}
# Section E.3, for every method.
_OPTIMIZER = {"weight_decay": 0.01, "adam_beta2": 0.999, "max_grad_norm": 1.0}


def build_pair(sizes: Settings, vocab_size: int, seed: int) -> tuple[SmtRnnForCausalLM, SmtTeacherModel]:
    """A new RNN and its teacher, initialised with the seed.

    Args:
        sizes: fields of `SmtRnnConfig`.
    """
    set_seed(seed)
    shared = {key: value for key, value in sizes.items() if key not in ("num_hidden_layers", "num_readout_layers")}
    rnn = SmtRnnConfig(vocab_size=vocab_size, **sizes)
    teacher = SmtTeacherConfig(
        vocab_size=vocab_size,
        num_encoder_layers=sizes["num_hidden_layers"],
        num_decoder_layers=sizes["num_readout_layers"],
        **shared,
    )
    return SmtRnnForCausalLM(rnn), SmtTeacherModel(teacher)


def train_bptt(rnn: PreTrainedModel, data: Any, held_out: Any, settings: Settings, **arguments: Any) -> dict[str, Any]:
    """Backpropagation through time by a row's `steps`, `batch_size`, `bptt_learning_rate` and `seed`.

    Args:
        data, held_out: a task, of which a block is an example, or a corpus.
        arguments: other fields of [`MultiStreamTrainingArguments`].

    Returns:
        What a row records, and as `measured` what `MultiStreamTrainer.evaluate` finds on `held_out`.
    """
    arguments = {
        "block_size": getattr(data, "length", None),
        "learning_rate": settings["bptt_learning_rate"],
        **arguments,
    }
    return run_trainer(
        lambda args: MultiStreamTrainer(rnn, args, data, held_out),
        MultiStreamTrainingArguments,
        steps=settings["steps"],
        measure=_evaluate,
        **_shared(settings),
        **arguments,
    )


def train_smt_dmt(
    rnn: SmtRnnForCausalLM,
    teacher: SmtTeacherModel,
    data: Any,
    held_out: Any,
    settings: Settings,
    *,
    smt: Settings,
    dmt: Settings,
) -> dict[str, Any]:
    """SMT and then DMT: `steps` optimizer steps together, the last `dmt_steps` of them DMT's.

    Args:
        settings: a row with these, `batch_size`, `learning_rate`, `dmt_learning_rate`, `eval_windows` and `seed`.
        smt, dmt: other fields of the two phases' arguments.

    Returns:
        What a row records; as `measured_smt` and `measured` what [`SmtTrainer`] and [`DmtTrainer`] find on `held_out`
        behind their last step.
    """
    phases = []
    for trainer_class, arguments_class, rate, steps, arguments in (
        (SmtTrainer, SmtTrainingArguments, "learning_rate", settings["steps"] - settings["dmt_steps"], smt),
        (DmtTrainer, DmtTrainingArguments, "dmt_learning_rate", settings["dmt_steps"], dmt),
    ):
        phases.append(
            run_trainer(
                lambda args, kind=trainer_class: kind(rnn, teacher, args, data, held_out),
                arguments_class,
                steps=steps,
                learning_rate=settings[rate],
                eval_windows=settings["eval_windows"],
                measure=_evaluate,
                **_shared(settings),
                **arguments,
            )
        )
    first, second = phases
    return {
        **second,
        "num_parameters": rnn.num_parameters(),
        "seconds": round(first["seconds"] + second["seconds"], 1),
        "measured_smt": first["measured"],
    }


def _shared(settings: Settings) -> Settings:
    return {"seed": settings["seed"], "per_device_train_batch_size": settings["batch_size"], **_OPTIMIZER}


def _evaluate(trainer: MultiStreamTrainer) -> dict[str, float]:
    metrics = trainer.evaluate()
    return {name.removeprefix("eval_"): value for name, value in metrics.items()}
