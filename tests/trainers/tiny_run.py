"""A run of seconds, as a module for tests and as a program for those that need processes of their own.

    python tiny_run.py OUTPUT_DIR BATCH_SIZE ACCUMULATION [--resume PATH|true] [--slow] [--noise] [--online] [--tables]

Writes OUTPUT_DIR/record.json: world size, logged losses, evaluation; and OUTPUT_DIR/final.safetensors: the weights.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed

from hf_recurrent import (
    ByteTokenizer,
    Corpus,
    MultiStreamTrainer,
    MultiStreamTrainingArguments,
    OnlineTrainer,
    OnlineTrainingArguments,
    config_from_preset,
)
from hf_recurrent.checkpoints.tensor_files import write_tensors

MAX_STEPS = 12
PROGRAM = os.path.abspath(__file__)


def tiny_corpora():
    """29 documents of 5 to 300 bytes: shorter than a block, and longer than several."""
    documents = [bytes((i * 7 + j * j + i * j) % 90 + 32 for j in range(5 + 47 * i % 296)) for i in range(29)]
    return Corpus.from_documents(documents, ByteTokenizer(), name="toy").split(0.2)


def tiny_model(preset="memora-tiny", **overrides):
    set_seed(7)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2}
    if preset.startswith(("memora", "hawk")):
        sizes["state_size"] = 24
    return AutoModelForCausalLM.from_config(config_from_preset(preset, **sizes | overrides))


TABLE = "model.embed_ngrams.weight"
COUNT_SIZES = {
    "count_memory_slots": 1024, "count_memory_text": 16384, "count_memory_window": 256, "count_memory_rows": 16,
}  # fmt: skip


def table_model(**overrides):
    """[`tiny_model`] with tables of n-grams at its input and output."""
    return tiny_model(ngram_orders=[2, 3], ngram_rows=2048, ngram_output=True, **overrides)


def tiny_trainer(output_dir, model=None, callbacks=None, corpora=None, online=False, **arguments):
    train_corpus, eval_corpus = corpora or tiny_corpora()
    defaults = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 3,
        "eval_block_size": 32,
        "block_size": 16,
        "max_steps": MAX_STEPS,
        "learning_rate": 1e-2,
        "logging_steps": 3,
        "save_steps": 5,
        "save_total_limit": None,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    kind, kind_of_arguments = MultiStreamTrainer, MultiStreamTrainingArguments
    if online:
        kind, kind_of_arguments = OnlineTrainer, OnlineTrainingArguments
    args = kind_of_arguments(output_dir=os.fspath(output_dir), **defaults | arguments)
    return kind(
        tiny_model() if model is None else model,
        args,
        train_corpus,
        eval_corpus,
        processing_class=ByteTokenizer(),
        callbacks=callbacks,
    )


def sensitivities(trainer, group=0):
    carried = trainer.carried.get(group, 0)
    prefix = "sensitivities."
    return {name.removeprefix(prefix): tensor for name, tensor in carried.items() if name.startswith(prefix)}


def logged(trainer, key="loss"):
    return {entry["step"]: entry[key] for entry in trainer.state.log_history if key in entry}


class Noise(TrainerCallback):
    """Something random in every step, so that a random state that is not restored changes the weights."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for parameter in model.parameters():
            parameter.grad.mul_(0.5 + torch.rand(()))


class Slow(TrainerCallback):
    """Gives the test time to kill the process in the middle."""

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.25)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("batch_size", type=int)
    parser.add_argument("accumulation", type=int)
    parser.add_argument("--resume")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--noise", action="store_true")
    parser.add_argument("--online", action="store_true")
    parser.add_argument("--tables", action="store_true", help="a table and Muon")
    parser.add_argument("--save_steps", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    callbacks = [*([Slow()] if options.slow else []), *([Noise()] if options.noise else [])]
    trainer = tiny_trainer(
        options.output_dir,
        table_model() if options.tables else None,
        matrix_optimizer="muon" if options.tables else "adamw",
        callbacks=callbacks,
        online=options.online,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulation,
        save_steps=options.save_steps,
    )
    trainer.train(True if options.resume == "true" else options.resume)
    metrics = trainer.evaluate()
    is_first = trainer.is_world_process_zero()
    write_tensors(trainer.trained_model.state_dict(), options.output_dir / "final.safetensors" if is_first else None)
    if is_first:
        record = {
            "world_size": trainer.args.world_size,
            "losses": logged(trainer),
            "resets": logged(trainer, "state_resets"),
            "eval_bits_per_byte": metrics["eval_bits_per_byte"],
        }
        (options.output_dir / "record.json").write_text(json.dumps(record))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
