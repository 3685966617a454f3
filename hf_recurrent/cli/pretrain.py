"""`hf-recurrent pretrain`: train on streams, evaluate on held-out documents and save the model."""

import math
import os
import re
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import yaml
from accelerate import PartialState
from accelerate.utils import broadcast
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from hf_recurrent.cli.data_arguments import load_training_sources, token_vocabulary
from hf_recurrent.cli.memory_phases import build_teacher, second_phase
from hf_recurrent.cli.parsing import parse_pairs
from hf_recurrent.cli.pretrain_arguments import ModelArguments, PretrainArguments, parse_arguments
from hf_recurrent.cli.pretrain_report import describe_result, describe_run, draw_samples, print_samples, print_summary
from hf_recurrent.modeling.tokenization_byte import ByteTokenizer
from hf_recurrent.modeling.tokenization_dna import DNATokenizer
from hf_recurrent.presets import config_from_preset, preset_names
from hf_recurrent.trainers.block_trainer import BlockTrainer
from hf_recurrent.trainers.dmt_trainer import DmtTrainer
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments
from hf_recurrent.trainers.multi_stream_trainer import MultiStreamTrainer
from hf_recurrent.trainers.online_arguments import OnlineTrainingArguments
from hf_recurrent.trainers.online_trainer import OnlineTrainer
from hf_recurrent.trainers.recurrent_trainer import find_last_complete_checkpoint
from hf_recurrent.trainers.smt_arguments import DmtTrainingArguments, SmtTrainingArguments
from hf_recurrent.trainers.smt_trainer import SmtTrainer

# The underscore keeps it from being uploaded with the model: it may name local files.
ARGUMENTS_FILE = "_recipe.yaml"
_TRAINERS = {
    MultiStreamTrainingArguments: MultiStreamTrainer,
    OnlineTrainingArguments: OnlineTrainer,
    SmtTrainingArguments: SmtTrainer,
    DmtTrainingArguments: DmtTrainer,
}


@dataclass
class Run:
    """A run that is ready to start, with checked arguments."""

    arguments: PretrainArguments
    trainer: BlockTrainer
    checkpoint: str | None


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with `argv`, by default the arguments of the process; bad input exits with one sentence."""
    begin = time.time()
    try:
        run = prepare(argv)
    except (OSError, ValueError, ImportError) as error:
        _exit(error)
    trainer, output_dir = run.trainer, run.trainer.args.output_dir
    _say(run, describe_run(run.arguments.model.model, trainer, run.checkpoint))
    try:
        result = trainer.train(run.checkpoint)
    except ValueError as error:
        if trainer.state.global_step:
            raise
        _exit(error)  # a checkpoint of another run
    metrics = trainer.evaluate()
    if isinstance(trainer, SmtTrainer) and run.arguments.teacher.dmt_steps:
        metrics = _run_second_phase(run, metrics)
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_state()
    trainer.create_model_card(recipe=run.arguments.recipe)
    if trainer.args.push_to_hub:
        trainer.push_to_hub(recipe=run.arguments.recipe)
    if trainer.is_world_process_zero():
        Path(output_dir, ARGUMENTS_FILE).write_text(yaml.safe_dump(run.arguments.given), encoding="utf-8")
        print_samples(trainer)
        if trainer.train_dataset.unit == "pixel":
            draw_samples(trainer)
        print_summary(run.arguments, describe_result(trainer, metrics), time.time() - begin)
    trainer.accelerator.wait_for_everyone()
    PartialState().destroy_process_group()


def _run_second_phase(run: Run, before: dict[str, float]) -> dict[str, float]:
    """Train by DMT after SMT, resuming from its last checkpoint if the command is repeated."""
    second = second_phase(run.trainer, run.arguments.teacher)
    words = describe_run(run.arguments.model.model, second)
    _say(run, f"before: {describe_result(second, before)}, drift {before.get('eval_drift', math.nan):.3f}\n{words}")
    second.train(find_last_complete_checkpoint(second.args.output_dir))
    return second.evaluate()


def prepare(argv: Sequence[str] | None = None) -> Run:
    """Check the arguments and build corpus, model and trainer."""
    arguments = parse_arguments(argv)
    training = arguments.training
    logging.set_verbosity(training.get_process_log_level())
    logging.disable_progress_bar()  # of saving, because it breaks the bar of training
    if training.process_index:
        warnings.filterwarnings("ignore")
    checkpoint = _choose_output(arguments)
    set_seed(training.seed)
    vocab_size = token_vocabulary(arguments.data.corpus)
    if vocab_size is not None:
        training.sample_every, training.sample_prompts = 0, []  # the tokens are not text
    model, tokenizer = build_model(arguments.model, vocab_size)
    with training.main_process_first(desc="packing the corpus"):
        data = arguments.data
        train_corpus, eval_corpus = load_training_sources(data, tokenizer, data.validation_corpus)
    kind = _TRAINERS[type(training)]
    teacher = ()
    if arguments.teacher is not None:
        teacher = (build_teacher(arguments.teacher, model, arguments.model.model, is_new=kind is SmtTrainer),)
    trainer = kind(model, *teacher, training, train_corpus, eval_corpus, processing_class=tokenizer)
    return Run(arguments, trainer, checkpoint)


def _choose_output(arguments: PretrainArguments) -> str | None:
    """Choose an `output_dir` in which nothing is overwritten, and return the checkpoint to resume from."""
    training = arguments.training
    resume = str(training.resume_from_checkpoint or "").strip()
    wants_last = resume.lower() in ("true", "1", "yes", "last")
    if resume and not wants_last and resume.lower() not in ("false", "0", "no"):
        if not arguments.names_output_dir:
            training.output_dir = os.path.dirname(os.path.abspath(resume))
        return resume
    if not arguments.names_output_dir:
        # The first process decides for all: they start at different times, and it may create the directory.
        number = torch.tensor([_number_of_run(training.output_dir, wants_last)], device=training.device)
        number = int(broadcast(number)) if training.world_size > 1 else int(number)
        training.output_dir += f"-{number}" if number > 1 else ""
    if wants_last:
        checkpoint = find_last_complete_checkpoint(training.output_dir)
        if checkpoint is None and training.process_index == 0:
            print(f"No complete checkpoint in {training.output_dir}; starting a new run.", file=sys.stderr)
        return checkpoint
    if _holds_model(training.output_dir):
        raise ValueError(
            f"`--output_dir` is {training.output_dir!r}, which has a model or checkpoints; add "
            "--resume_from_checkpoint true to continue, or choose another directory."
        )
    return None


def _number_of_run(directory: str, resume: bool) -> int:
    """Number of the first free of DIRECTORY, DIRECTORY-2, DIRECTORY-3, …; to resume, of the last existing one."""
    number = 1
    while _holds_model(directory if number == 1 else f"{directory}-{number}"):
        number += 1
    return max(number - 1, 1) if resume else number


def _holds_model(directory: str) -> bool:
    if not os.path.isdir(directory):
        return False
    return any(
        re.fullmatch(r"(_replaced-)?checkpoint-\d+|(model|adapter_model).*\.safetensors", name)
        for name in os.listdir(directory)
    )


def build_model(
    arguments: ModelArguments, vocab_size: int | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A preset with new weights or a saved model, and its tokenizer.

    Args:
        arguments: the choice of the model.
        vocab_size: V of data that is not text; then a preset has no end token, and token ids are written as bytes.
    """
    overrides = parse_pairs("--config_overrides", arguments.config_overrides)
    name = arguments.model
    remote = {"trust_remote_code": arguments.trust_remote_code}
    if name in preset_names():
        if vocab_size is None:
            tokenizer = _tokenizer(arguments.tokenizer or "byte", remote)
            own = {"vocab_size": tokenizer.vocab_size}
        elif arguments.tokenizer is None:
            tokenizer, own = ByteTokenizer(eos_token=None), {"vocab_size": vocab_size, "eos_token_id": None}
        else:
            raise ValueError(f"`--tokenizer` is {arguments.tokenizer!r}, but `--corpus` is not text; leave it out.")
        return AutoModelForCausalLM.from_config(config_from_preset(name, **own | overrides)), tokenizer
    if not os.path.isdir(name) and name.count("/") != 1:
        raise ValueError(
            f"`--model` is {name!r}; it must be a directory, owner/name on the Hub, or one of "
            f"{', '.join(preset_names())}."
        )
    if overrides:
        raise ValueError(f"`--config_overrides` is {arguments.config_overrides}; with a saved model it must be empty.")
    try:
        model = AutoModelForCausalLM.from_pretrained(name, **remote)
        return model, _tokenizer(arguments.tokenizer or name, remote)
    except OSError as error:
        raise ValueError(f"`--model` is {name!r}; it cannot be loaded: {str(error).splitlines()[0]}") from error


def _tokenizer(name: str, remote: dict[str, bool]) -> PreTrainedTokenizerBase:
    own = {"byte": ByteTokenizer, "dna": DNATokenizer}
    return own[name]() if name in own else AutoTokenizer.from_pretrained(name, **remote)


def _exit(error: Exception) -> NoReturn:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"hf-recurrent pretrain: error: {error}", file=sys.stderr)
    raise SystemExit(2)


def _say(run: Run, text: str) -> None:
    if run.trainer.is_world_process_zero():
        print(text, flush=True)
