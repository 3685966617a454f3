"""Messages of `pretrain` before, between and after its phases."""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from hf_recurrent.checkpoints.files import write_json
from hf_recurrent.cli.pretrain_arguments import PretrainArguments
from hf_recurrent.cli.user_code import import_flags
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.episode_source import EvaluationShare
from hf_recurrent.data.pixel_readers import import_pillow, save_image_sheet
from hf_recurrent.data.quantities import count_of, with_unit
from hf_recurrent.evaluation.accounts import measure_accounts
from hf_recurrent.evaluation.counts_alone import bytes_read
from hf_recurrent.evaluation.samples import generate_samples, sample_images
from hf_recurrent.evaluation.tables import accounts_table
from hf_recurrent.hub.model_card import describe_parameters
from hf_recurrent.trainers.online_arguments import OnlineTrainingArguments
from hf_recurrent.trainers.smt_arguments import DmtTrainingArguments, SmtTrainingArguments
from hf_recurrent.trainers.stream_trainer import StreamTrainer

# The underscore keeps it from being uploaded with the model.
ACCOUNTS_FILE = "_accounts.json"
_SHEET_FILE = "samples.png"
_IMAGES_DRAWN = 32
_MOST_ACCOUNTED = 32e6  # bytes that are read again for the accounts


def describe_run(model_name: str, trainer: StreamTrainer, checkpoint: str | None = None) -> str:
    """Model, data and method of a run that is about to start, and the checkpoint that it resumes."""
    args = trainer.args
    train, held_out = trainer.train_dataset, trainer.eval_dataset
    manner = args.regime
    if isinstance(args, OnlineTrainingArguments):
        manner = f"{args.method} at stride {args.stride}"
    elif isinstance(args, SmtTrainingArguments):
        manner = f"SMT, memories of {args.context_length} bytes that predict {args.future_length}"
    elif isinstance(args, DmtTrainingArguments):
        manner = "DMT, the RNN on its own memories"
    processes = f"{args.world_size} process{'es' if args.world_size > 1 else ''}"
    streams = f"{count_of(args.num_streams, 'stream')} of {args.block_size}-{train.unit} blocks"
    amount = trainer.num_training_steps * args.step_bytes
    size = with_unit(amount, "B") if train.unit == "byte" else f"{with_unit(amount)} {train.unit}s"
    lines = [
        f"{model_name}: {describe_parameters(trainer.model)}",
        f"{train.name}: {train.describe()} to train on; {held_out.describe(held_out=True)} held out",
        f"{manner}: {streams} on {processes}, {count_of(trainer.num_training_steps, 'step')}, {size}",
        f"saving to {args.output_dir}",
    ]
    return "\n".join(lines + [f"resuming from {checkpoint}"] * bool(checkpoint))


def print_samples(trainer: StreamTrainer) -> None:
    """Print sampled texts, or save a sheet of sampled images."""
    model, args, data = trainer.trained_model, trainer.args, trainer.train_dataset
    samples = generate_samples(model, trainer.processing_class, args.sample_prompts, args.sample_bytes)
    for prompt, sample in zip(args.sample_prompts, samples, strict=True):
        print(f"--- sample after {prompt!r}\n{prompt}{sample}\n---")
    if data.unit != "pixel":
        return
    path = os.path.join(args.output_dir, _SHEET_FILE)
    try:
        import_pillow(f"drawing {path}")
    except ImportError as error:
        print(error)
        return
    save_image_sheet(sample_images(model, _IMAGES_DRAWN, vocab_size=data.vocab_size), path)
    print(f"--- {_IMAGES_DRAWN} samples in {path}")


def _evaluation_flags(arguments: PretrainArguments) -> list[str]:
    """Flags with which `hf-recurrent evaluate` reads the same held-out documents."""
    data, given = arguments.data, arguments.given
    flags = ["--corpus", *(data.validation_corpus or data.corpus)]
    if data.validation_corpus:
        flags += ["--split", "all"]
    elif data.corpus_probabilities:
        flags += ["--corpus_probabilities", *(f"{share:g}" for share in data.corpus_probabilities)]
    split = () if data.validation_corpus else ("validation_fraction", "split_seed")
    for name in ("text_column", "dataset_split", "dataset_config", "max_corpus_bytes", *split):
        flags += [f"--{name}", f"{given[name]}"] if name in given else []
    flags += [f"--{name}" for name in ("streaming", "binary") if getattr(data, name)]
    flags += [] if data.packing else ["--packing", "false"]
    if data.max_eval_bytes is not None:
        flags += ["--max_eval_bytes", f"{int(data.max_eval_bytes)}"]
    if not arguments.training.eval_carry_state:
        flags += ["--no_carry"]
    if arguments.training.eval_block_size != 1024:
        flags += ["--block_size", f"{arguments.training.eval_block_size}"]
    return flags


def describe_result(trainer: StreamTrainer, metrics: dict[str, float]) -> str:
    return trainer.eval_dataset.describe_result({name.removeprefix("eval_"): metrics[name] for name in metrics})


def print_accounts(trainer: StreamTrainer, metrics: dict[str, float]) -> dict[str, Any] | None:
    """Print the accounts of a trained model, save and return them; for much data, print only the command that does."""
    train, held_out, args = trainer.train_dataset, trainer.eval_dataset, trainer.args
    if not isinstance(held_out, Corpus) or held_out.unit != "byte" or not args.eval_carry_state:
        return None
    read = bytes_read(trainer.provenance, train)
    if max(held_out.num_bytes, trainer.num_training_steps * args.step_bytes) > _MOST_ACCOUNTED:
        print(f"For the table of counts, network and compressors: hf-recurrent evaluate {args.output_dir} --accounts")
        return None
    sizes = {"batch_size": args.per_device_eval_batch_size, "block_size": args.eval_block_size}
    share = EvaluationShare(**sizes, progress=not args.disable_tqdm and sys.stderr.isatty())
    own = {name.removeprefix("eval_"): value for name, value in metrics.items()}
    accounts = measure_accounts(trainer.trained_model, held_out, share, own, read)
    write_json(accounts, Path(args.output_dir, ACCOUNTS_FILE))
    print(accounts_table(accounts), flush=True)
    return accounts


def print_summary(arguments: PretrainArguments, result: str, seconds: float, prompt: str | None) -> None:
    """Print the result, its location, and commands to try next, `generate` with a prompt if there is one."""
    output_dir = arguments.training.output_dir
    minutes, seconds = divmod(round(seconds), 60)
    own = f" {shlex.join(flags)}" if (flags := import_flags(arguments.user_code)) else ""
    generate = f"  hf-recurrent generate {shlex.quote(output_dir)}{own} --prompt {shlex.quote(prompt or '')}\n"
    print(
        f"\n{result}, after {minutes} min {seconds:02} s\n"
        f"Saved in {output_dir}. Next:\n"
        f"{generate if prompt else ''}"
        f"  hf-recurrent evaluate {output_dir}{own} {shlex.join(_evaluation_flags(arguments))}\n"
        f"  hf-recurrent push-to-hub {output_dir} your-name/{Path(output_dir).name}{own}",
        flush=True,
    )
