"""`hf-recurrent pretrain`: train on streams, evaluate on held-out documents and save the model."""

import json
import math
import os
import re
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import yaml
from accelerate import PartialState
from accelerate.utils import broadcast
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from hf_recurrent.argument_checks import import_optional
from hf_recurrent.checkpoints.files import checkpoint_number, list_checkpoints
from hf_recurrent.checkpoints.privacy import last_part
from hf_recurrent.checkpoints.resumed_arguments import IGNORED
from hf_recurrent.cli.data_arguments import load_training_sources, token_vocabulary
from hf_recurrent.cli.flags import name_typed, normalize
from hf_recurrent.cli.loading import build_new_model, check_byte_tokenizer
from hf_recurrent.cli.memory_phases import build_teacher, second_phase
from hf_recurrent.cli.parsing import check_model_name, explain_memory, one_line
from hf_recurrent.cli.pretrain_arguments import ModelArguments, PretrainArguments, parse_arguments
from hf_recurrent.cli.pretrain_report import (
    describe_result,
    describe_run,
    print_accounts,
    print_samples,
    print_summary,
)
from hf_recurrent.cli.threads import use_threads
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.mixture import Mixture
from hf_recurrent.evaluation.samples import check_prompts, prompt_from
from hf_recurrent.hub.loading import load_model, load_tokenizer
from hf_recurrent.learning_rules.rules import NonFiniteLossError
from hf_recurrent.modeling.tokenizer.tokenization_byte import ByteTokenizer
from hf_recurrent.modeling.tokenizer.tokenization_dna import DNATokenizer
from hf_recurrent.presets import preset_names
from hf_recurrent.trainers.agreement import same_error
from hf_recurrent.trainers.freed_memory import keep_freed_memory
from hf_recurrent.trainers.meta_initialization import build_on_meta
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments
from hf_recurrent.trainers.online_arguments import OnlineTrainingArguments
from hf_recurrent.trainers.public_trainers import DmtTrainer, MultiStreamTrainer, OnlineTrainer, SmtTrainer
from hf_recurrent.trainers.sharding import is_sharding_requested
from hf_recurrent.trainers.smt_arguments import DmtTrainingArguments, SmtTrainingArguments
from hf_recurrent.trainers.stop_signals import TrainingInterrupted
from hf_recurrent.trainers.stream_trainer import StreamTrainer

# The underscore keeps it from being uploaded with the model: it may name local files.
ARGUMENTS_FILE = "_recipe.yaml"
_TRAINERS = {
    MultiStreamTrainingArguments: MultiStreamTrainer,
    OnlineTrainingArguments: OnlineTrainer,
    SmtTrainingArguments: SmtTrainer,
    DmtTrainingArguments: DmtTrainer,
}


class Run(NamedTuple):
    """A run that is ready to start, with checked arguments."""

    arguments: PretrainArguments
    trainer: StreamTrainer
    checkpoint: str | None


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with `argv`, by default the arguments of the process.

    Bad input exits with one sentence and status 2, a failure during training with one sentence and status 1, and a
    signal with 128 + its number, after saying how to continue.
    """
    begin, run = time.time(), None
    argv = list(sys.argv[1:] if argv is None else argv)
    typed = normalize(argv, None)[1]
    with _terminable(), redirect_stdout(sys.stderr) if "json" in typed else nullcontext():
        try:
            run = prepare(argv)
            results = _train(run, begin)
        except KeyboardInterrupt as error:
            _exit_on_signal(error, run)
        except NonFiniteLossError as error:
            _exit(str(error), run)
        except OSError as error:
            _exit(name_typed(str(error), typed), run)
        except (ValueError, ImportError) as error:
            if run is not None and run.trainer.state.global_step > (checkpoint_number(run.checkpoint or "") or 0):
                raise
            # Bad input, a checkpoint of another run, a directory that is in use, or a package that is missing.
            _exit(name_typed(str(error), typed))
        except (MemoryError, RuntimeError) as error:
            _exit(explain_memory(error), run)
    if "json" in typed and PartialState().is_main_process:
        print(json.dumps(results))
    PartialState().destroy_process_group()


def _train(run: Run, begin: float) -> dict[str, Any]:
    """Train, evaluate, save and report; the results, as `--json` prints them."""
    trainer, output_dir = run.trainer, run.trainer.args.output_dir
    _say(run, describe_run(run.arguments.model.model, trainer, run.checkpoint))
    if (step := checkpoint_number(run.checkpoint or "") or 0) >= (last := trainer.num_training_steps):
        _say(run, f"This run is finished: step {step:,} of {last:,}. It is evaluated and saved again.")
    trainer.records.recipe = last_part(run.arguments.recipe)
    result = trainer.train(run.checkpoint)
    metrics = trainer.evaluate()
    if isinstance(trainer, SmtTrainer) and run.arguments.teacher.dmt_steps:
        metrics = _run_second_phase(run, metrics)
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_state()
    trainer.create_model_card()
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
    accounts = None
    with trainer.model_for_first():
        if trainer.is_world_process_zero():
            print_samples(trainer)
            if run.arguments.data.accounts:
                accounts = print_accounts(trainer, metrics)
    if trainer.is_world_process_zero():
        Path(output_dir, ARGUMENTS_FILE).write_text(_saved_recipe(run), encoding="utf-8")
        prompt = next(iter(trainer.args.sample_prompts), None)
        print_summary(run.arguments, describe_result(trainer, metrics), time.time() - begin, prompt)
    trainer.accelerator.wait_for_everyone()
    return {
        "output_dir": output_dir,
        "steps": trainer.num_training_steps,
        "seconds": time.time() - begin,
        **{name.removeprefix("eval_"): value for name, value in metrics.items()},
        "accounts": accounts,
    }


def _run_second_phase(run: Run, before: dict[str, float]) -> dict[str, float]:
    """Train by DMT after SMT, resuming from its last checkpoint if the command is repeated."""
    second = second_phase(run.trainer, run.arguments.teacher)
    words = describe_run(run.arguments.model.model, second)
    _say(run, f"before: {describe_result(second, before)}, drift {before.get('eval_drift', math.nan):.3f}\n{words}")
    second.records.recipe = run.trainer.records.recipe
    second.train(bool(list_checkpoints(second.args.output_dir)))
    metrics = second.evaluate()
    run.trainer.records.continue_with(second.provenance)
    return metrics


def _saved_recipe(run: Run) -> str:
    """The arguments of training as YAML, with a comment about those that have changed on the way."""
    given, lines = dict(run.arguments.given), []
    changes, resumed = run.trainer.checkpointing.changes, checkpoint_number(run.checkpoint or "")
    for name, (before, _) in changes.items():
        if resumed >= run.trainer.num_training_steps or name in IGNORED:
            given[name] = before  # the new value did not act
        else:
            lines.append(f"# Since step {resumed:,}: {name} was {before} before.\n")
    return "".join(lines) + yaml.safe_dump(given)


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
    kind = _TRAINERS[type(training)]
    typed = normalize(sys.argv[1:] if argv is None else argv, None)[1]
    with same_error():
        vocab_size = token_vocabulary(arguments.data.corpus)
        if vocab_size is not None:
            training.sample_every, training.sample_prompts = 0, []  # the tokens are not text
        own = arguments.model
        if "config_overrides" not in typed and (vocab_size is not None or own.tokenizer not in (None, "byte")):
            # The recipe's count memory reads bytes.
            own.config_overrides = [part for part in own.config_overrides if not part.startswith("count_memory")]
        on_meta = kind in (MultiStreamTrainer, OnlineTrainer) and is_sharding_requested()
        model, tokenizer = build_model(arguments.model, vocab_size, on_meta=on_meta)
        check_prompts(training.sample_prompts, tokenizer)
    with same_error(), training.main_process_first(desc="packing the corpus"):
        data = arguments.data
        train_corpus, eval_corpus = load_training_sources(data, tokenizer, data.validation_corpus)
    # The prompts of a recipe suit its own corpus.
    if "corpus" in typed and "sample_prompts" not in typed and training.sample_prompts and data.corpus != ["python"]:
        held_out = eval_corpus.sources[0] if isinstance(eval_corpus, Mixture) else eval_corpus
        prompt = prompt_from(held_out, tokenizer) if isinstance(held_out, Corpus) else None
        training.sample_prompts = training.sample_prompts if prompt is None else [prompt]
    teacher = ()
    if arguments.teacher is not None:
        if arguments.model.lora_rank is not None:
            raise ValueError(f"`--lora_rank` cannot be combined with `--method {training.method}`.")
        with same_error():
            teacher = (build_teacher(arguments.teacher, model, arguments.model.model, is_new=kind is SmtTrainer),)
    trainer = kind(model, *teacher, training, train_corpus, eval_corpus, processing_class=tokenizer)
    use_threads(arguments.threads, checkpoint=checkpoint)
    if not trainer.sharding.is_sharded:
        keep_freed_memory()
    return Run(arguments, trainer, checkpoint)


def _choose_output(arguments: PretrainArguments) -> str | None:
    """Choose an `output_dir` in which nothing is overwritten, and return the checkpoint to resume from."""
    training = arguments.training
    resume = str(training.resume_from_checkpoint or "").strip()
    wants_last = resume.lower() in ("true", "1", "yes", "last")
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        if not arguments.names_output_dir:
            raise ValueError(
                "`--output_dir` is missing; with --max-restarts, a restarted run has to find its checkpoints."
            )
        wants_last |= not resume and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if resume and not wants_last and resume.lower() not in ("false", "0", "no"):
        if not os.path.isdir(resume):
            raise FileNotFoundError(
                f"`--resume_from_checkpoint` is {resume!r}; directory not found. For the last checkpoint, give true."
            )
        if not arguments.names_output_dir:
            training.output_dir = os.path.dirname(os.path.abspath(resume))
        return resume
    if not arguments.names_output_dir:
        # The first process decides for all: they start at different times, and it may create the directory.
        number = torch.tensor([_number_of_run(training.output_dir, wants_last)], device=training.device)
        number = int(broadcast(number)) if training.world_size > 1 else int(number)
        training.output_dir += f"-{number}" if number > 1 else ""
    if wants_last:
        if checkpoints := list_checkpoints(training.output_dir):
            return checkpoints[-1]
        if _holds_model(training.output_dir):
            raise ValueError(
                f"`--output_dir` is {training.output_dir!r}, which has a model but no checkpoint to resume."
            )
        if training.process_index == 0:
            print(f"No checkpoint in {training.output_dir}; starting a new run.", file=sys.stderr)
        return None
    if _holds_model(training.output_dir):
        content = "a model or checkpoints"
        if os.path.isfile(os.path.join(training.output_dir, ARGUMENTS_FILE)):  # written last
            content += " of a finished run"
        raise ValueError(
            f"`--output_dir` is {training.output_dir!r}, which has {content}; add --resume_from_checkpoint true to "
            "continue, or choose another directory."
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
    arguments: ModelArguments, vocab_size: int | None = None, *, on_meta: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A preset with new weights, with `on_meta` by [`build_on_meta`], or a saved model; and its tokenizer.

    With the V of data that is not text, a preset has no end token, and token ids are written as bytes.
    """
    name, overrides = arguments.model, arguments.config_overrides
    if name in preset_names():
        if arguments.lora_rank is not None:
            raise ValueError(f"`--lora_rank` needs a saved model; `--model` is {name!r}, which has new weights.")
        if vocab_size is None:
            tokenizer = _tokenizer(arguments, "byte")
            own = {"vocab_size": tokenizer.vocab_size}
        elif arguments.tokenizer is None:
            tokenizer, own = ByteTokenizer(eos_token=None), {"vocab_size": vocab_size, "eos_token_id": None}
        else:
            raise ValueError(f"`--tokenizer` is {arguments.tokenizer!r}, but `--corpus` is not text; leave it out.")

        def build() -> PreTrainedModel:
            return build_new_model(AutoModelForCausalLM, name, "--config_overrides", overrides, **own)

        return (build_on_meta(build) if on_meta else build()), tokenizer
    if not os.path.isdir(name) and name.count("/") == 1:
        check_model_name("--model", name)
    elif not os.path.isdir(name):
        raise ValueError(
            f"`--model` is {name!r}; it must be a directory, owner/name on the Hub, or one of "
            f"{', '.join(preset_names())}."
        )
    if overrides:
        raise ValueError(f"`--config_overrides` is {overrides}; with a saved model it must be empty.")
    trust = arguments.trust_remote_code
    model = load_model(AutoModelForCausalLM, name, argument="--model", trust_remote_code=trust)
    if arguments.lora_rank is not None:
        model = _with_adapter(model, arguments.lora_rank)
    return model, _tokenizer(arguments, name)


def _with_adapter(model: PreTrainedModel, rank: int) -> PreTrainedModel:
    """The model, frozen, with a new LoRA."""
    if rank < 1:
        raise ValueError(f"`--lora_rank` is {rank}; it must be at least 1.")
    peft = import_optional("peft", '`--lora_rank` needs peft: pip install "hf-recurrent[peft]"')
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank))


def _tokenizer(arguments: ModelArguments, default: str) -> PreTrainedTokenizerBase:
    name = default if arguments.tokenizer is None else arguments.tokenizer
    own = {"byte": ByteTokenizer, "dna": DNATokenizer}
    if name in own:
        return own[name]()
    argument = "--model" if arguments.tokenizer is None else "--tokenizer"
    tokenizer = load_tokenizer(name, argument=argument, trust_remote_code=arguments.trust_remote_code)
    check_byte_tokenizer(argument, name, tokenizer)
    return tokenizer


def _exit(error: str, run: Run | None = None) -> NoReturn:
    """Exit with a sentence; with status 1 and the way to continue if a run has begun, else with status 2."""
    _print_once(f"hf-recurrent pretrain: error: {one_line(error)}{_way_on(run)}")
    raise SystemExit(2 if run is None else 1)


def _exit_on_signal(error: KeyboardInterrupt, run: Run | None) -> NoReturn:
    saved = f"; saved {error.checkpoint}" if isinstance(error, TrainingInterrupted) else ""
    number = getattr(error, "number", signal.SIGINT)
    _print_once(f"\nhf-recurrent pretrain: stopped by {number.name}{saved}.{_way_on(run)}")
    raise SystemExit(128 + number)


def _way_on(run: Run | None) -> str:
    """The hint that continues a run which has ended early, if it has a checkpoint."""
    if run is None or not list_checkpoints(run.trainer.args.output_dir):
        return ""
    resume = f"--output_dir {shlex.quote(run.trainer.args.output_dir)} --resume_from_checkpoint true"
    return f"\nTo continue, rerun the command with {resume}"


def _print_once(text: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(text, file=sys.stderr)


@contextmanager
def _terminable() -> Iterator[None]:
    """Inside the block, SIGTERM raises a KeyboardInterrupt that carries it, as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> NoReturn:
        error = KeyboardInterrupt()
        error.number = signal.Signals(number)
        raise error

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # only the main thread receives signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(run: Run, text: str) -> None:
    if run.trainer.is_world_process_zero():
        print(text, flush=True)
