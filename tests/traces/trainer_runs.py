"""Runs of the four trainers: what they log, measure, learn, carry and save."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fixed_text import binary_corpora, text_corpora
from trace_values import Printed, Trace, of_bytes, of_directory, of_each, of_json
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed

from hf_recurrent import (
    ByteTokenizer,
    Copying,
    DmtTrainer,
    DmtTrainingArguments,
    MultiStreamTrainer,
    MultiStreamTrainingArguments,
    OnlineTrainer,
    OnlineTrainingArguments,
    Retrieval,
    SelectiveCopying,
    SmtRnnConfig,
    SmtRnnForCausalLM,
    SmtTeacherConfig,
    SmtTeacherModel,
    SmtTrainer,
    SmtTrainingArguments,
    config_from_preset,
)

COMMON = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 3,
    "eval_block_size": 32,
    "learning_rate": 5e-3,
    "logging_steps": 3,
    "max_steps": 8,
    "save_steps": 5,
    "save_total_limit": None,
    "max_grad_norm": 0.5,
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": "none",
}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2}
STATEFUL = ("memora", "hawk", "lru")
LLAMA = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
SELECTIVE = SelectiveCopying(length=24, num_tokens=4, vocab_size=8, num_validation_examples=20)
COPYING = Copying(num_tokens=3, delay=5, num_symbols=6, num_validation_examples=20)
RETRIEVAL = Retrieval(length=10, vocab_size=8, num_validation_examples=20)
RETRIEVAL_NOISE = Retrieval(length=10, vocab_size=8, label_noise=0.3, num_examples=100, num_validation_examples=20)
TASK_VOCABULARY = {"vocab_size": 8, "eos_token_id": None}
PROMPT = b"The river "
# Shared by all: the checkpoint that a resumed run starts from.
RESUMED_AT = 5


class Noise(TrainerCallback):
    """Something random in every step, so that a random state that is not restored changes the weights."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5 + torch.rand(()))


def build_model(preset: str = "memora-tiny", **overrides):
    set_seed(7)
    sizes = SIZES | ({"state_size": 24} if preset.startswith(STATEFUL) else {})
    sizes |= LLAMA if preset.startswith("llama") else {}
    return AutoModelForCausalLM.from_config(config_from_preset(preset, **sizes | overrides))


def build_pair(vocab_size: int = 256, backbone: str = "transformer"):
    set_seed(7)
    shape = {"vocab_size": vocab_size, "hidden_size": 16, "num_memory_tokens": 3, "num_attention_heads": 2}
    student = SmtRnnForCausalLM(SmtRnnConfig(backbone=backbone, num_hidden_layers=2, num_readout_layers=1, **shape))
    return student, SmtTeacherModel(SmtTeacherConfig(num_encoder_layers=2, num_decoder_layers=1, **shape))


def generated(model, prompt: bytes = PROMPT, count: int = 24) -> bytes:
    """The most probable continuation."""
    ids = torch.tensor([[byte % model.config.vocab_size for byte in prompt]])
    model.eval()
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    return bytes(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist())


class TrainerRun:
    """A trainer that is built anew for each part of a run.

    Args:
        trainer, arguments: the two classes.
        models: builds what is trained: the model, and the teacher where there is one.
        corpora: builds training and held-out data.
        noise: whether each step has something random.
        settings: fields of `arguments`.
    """

    def __init__(
        self,
        trainer: type,
        arguments: type,
        models: Callable[[], Any],
        corpora: Callable[[], tuple[Any, Any]] = text_corpora,
        noise: bool = False,
        **settings: Any,
    ):
        self.kinds, self.models, self.corpora, self.noise = (trainer, arguments), models, corpora, noise
        self.settings = COMMON | settings

    def __call__(self, folder: Path) -> Trace:
        return self.trace(folder)

    def resumed(self, folder: Path, whole: Path) -> Trace:
        """Continued by a new trainer from a checkpoint that the whole run has left in its folder."""
        torch.manual_seed(99)
        return self.trace(folder, whole / f"checkpoint-{RESUMED_AT}")

    def trace(self, folder: Path, checkpoint: Path | None = None, **changes: Any) -> Trace:
        settings = self.settings | changes
        models = self.models()
        models = models if isinstance(models, tuple) else (models,)
        args = self.kinds[1](output_dir=str(folder), **settings)
        train, held_out = self.corpora()
        trainer = self.kinds[0](*models, args, train, held_out, processing_class=ByteTokenizer())
        if self.noise:
            trainer.add_callback(Noise())
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            trainer.train(None if checkpoint is None else str(checkpoint))
            trainer.evaluate()
        trace = {"printed": Printed(printed.getvalue())} if settings.get("sample_every") else {}
        trace["logged steps"] = " ".join(str(entry["step"]) for entry in trainer.state.log_history)
        for entry in trainer.state.log_history:
            prefix = "train" if "train_loss" in entry else f"log {entry['step']}"
            trace |= of_json(prefix, {name: value for name, value in entry.items() if name != "step"})
        for number, model in enumerate(models):
            trace |= of_each("teacher/" if number else "model/", model.state_dict())
        trace |= of_directory("checkpoint/", folder / f"checkpoint-{settings['max_steps']}")
        if train.vocab_size == 256:
            trace["generated"] = of_bytes(generated(models[0], count=8 if len(models) > 1 else 24))
        return trace


def streams(models, **options) -> TrainerRun:
    return TrainerRun(MultiStreamTrainer, MultiStreamTrainingArguments, models, **{"block_size": 16} | options)


def online(models, **options) -> TrainerRun:
    return TrainerRun(OnlineTrainer, OnlineTrainingArguments, models, **options)


def smt(models, **options) -> TrainerRun:
    settings = {"context_length": 6, "future_length": 4, "block_size": 12, "timesteps": 2, "eval_windows": 5}
    settings |= {"corpora": short_corpora}
    return TrainerRun(SmtTrainer, SmtTrainingArguments, models, **settings | options)


def dmt(models, **options) -> TrainerRun:
    settings = {"context_length": 6, "rollout_length": 5, "timesteps": 2, "eval_windows": 5}
    settings |= {"corpora": short_corpora}
    return TrainerRun(DmtTrainer, DmtTrainingArguments, models, **settings | options)


def short_corpora():
    """Held-out episodes that a model which reads byte by byte reads fast."""
    train, _ = text_corpora()
    return train, train.select([1, 3])


def several_evaluations():
    train, held_out = text_corpora()
    return train, {"prose": held_out, "numbers": train.select([0, 3])}


def selective():
    return SELECTIVE, SELECTIVE


def copying():
    return COPYING, COPYING


def retrieval():
    return RETRIEVAL, RETRIEVAL


def noisy_retrieval():
    return RETRIEVAL_NOISE, RETRIEVAL


EVALUATED = {"eval_strategy": "steps", "eval_steps": 4}

TRAINER_RUNS: dict[str, TrainerRun] = {
    # Continuous streams.
    "streams memora": streams(build_model, noise=True),
    "streams hawk": streams(lambda: build_model("hawk-tiny"), gradient_accumulation_steps=2, **EVALUATED),
    "streams mgrade": streams(lambda: build_model("mgrade-tiny")),
    "streams lru with dropout": streams(lambda: build_model("lru-tiny", dropout=0.2)),
    "streams smt_rnn": streams(lambda: build_pair()[0], corpora=short_corpora, block_size=6, max_steps=6),
    "streams independent": streams(build_model, regime="iid", eval_carry_state=False, gradient_accumulation_steps=2),
    "streams llama": streams(lambda: build_model("llama-s0")),
    "streams one byte": streams(build_model, block_size=1),
    "streams bfloat16": streams(build_model, bf16=True),
    "streams several evaluations": streams(build_model, corpora=several_evaluations, **EVALUATED),
    "streams gradient checkpointing": streams(lambda: build_model("hawk-tiny"), gradient_checkpointing=True),
    "streams binary": streams(build_model, corpora=binary_corpora, weight_decay=0.3, adam_beta2=0.9),
    "streams samples": streams(build_model, sample_every=4, sample_bytes=12, sample_prompts=["The ", "one "]),
    "streams train_bytes": streams(
        build_model, max_steps=7, train_bytes=7 * 64, data_seed=3, seed=5, lr_scheduler_type="linear", warmup_steps=2
    ),
    "streams task": streams(
        lambda: build_model(**TASK_VOCABULARY), corpora=selective, block_size=10, gradient_accumulation_steps=2
    ),
    "streams task, llama": streams(
        lambda: build_model("llama-s0", **TASK_VOCABULARY), corpora=selective, block_size=24, regime="iid"
    ),
    # Learning while reading.
    "online rtrl": online(build_model, noise=True),
    "online rtrl, strides": online(
        lambda: build_model(num_hidden_layers=1), block_size=8, stride=2, gradient_accumulation_steps=2, **EVALUATED
    ),
    "online rtrl, hawk": online(
        lambda: build_model("hawk-tiny"), block_size=6, stride=3, optim="rmsprop", learning_rate=5e-5
    ),
    "online rtrl, lru": online(lambda: build_model("lru-tiny"), block_size=4),
    "online rtrl, mingru bfloat16": online(lambda: build_model(recurrent_unit="mingru"), block_size=4, bf16=True),
    "online rtrl, task": online(
        lambda: build_model(**TASK_VOCABULARY), corpora=copying, block_size=5, gradient_accumulation_steps=2
    ),
    "online snap1": online(lambda: build_model(recurrent_unit="gru"), method="snap1", block_size=4, stride=2),
    "online snap1, dense linear": online(
        lambda: build_model("lru-tiny", recurrent_unit="dense_linear"), method="snap1", block_size=3
    ),
    "online truncated": online(build_model, method="truncated", block_size=6, stride=2),
    "online spatial": online(build_model, method="spatial", block_size=4),
    # Training on memories.
    "smt": smt(build_pair, noise=True),
    "smt detached": smt(
        lambda: build_pair(backbone="mlp"), detached=True, timesteps=0, start_share=0.6, uniformity_over="states"
    ),
    "smt accumulated": smt(
        build_pair, gradient_accumulation_steps=2, start_share=0.0, decoder_weight=0.5, **EVALUATED
    ),
    "smt gru": smt(lambda: build_pair(backbone="gru"), gradient_checkpointing=True),
    "smt bfloat16": smt(build_pair, bf16=True),
    "smt task": smt(
        lambda: build_pair(8), corpora=noisy_retrieval, block_size=None, timesteps=0, context_length=99, **EVALUATED
    ),
    "dmt": dmt(build_pair, noise=True),
    "dmt truncated": dmt(
        lambda: build_pair(backbone="mlp"), gradient_steps=2, gradient_accumulation_steps=2, start_share=0.6
    ),
    "dmt task": dmt(lambda: build_pair(8), corpora=retrieval, timesteps=0, context_length=4, **EVALUATED),
}
# Stopped after five steps and continued: the end has to equal the run of the same name.
RESUMED = (
    "streams memora",
    "streams hawk",
    "streams lru with dropout",
    "streams independent",
    "streams llama",
    "streams task",
    "online rtrl",
    "online rtrl, strides",
    "online rtrl, task",
    "online snap1",
    "smt",
    "smt accumulated",
    "dmt",
    "dmt task",
)
