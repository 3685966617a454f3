"""Peak memory of a process that trains a preset, and then resumes its checkpoint.

    torchrun --nproc_per_node 2 tests/trainers/sharding_memory.py memora-s6 FOLDER [--steps 2] [--optim sgd]

Sharded if the environment asks for it (ACCELERATE_USE_FSDP=true FSDP_VERSION=2, or `accelerate launch --config_file`).
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, set_seed

from hf_recurrent import ByteTokenizer, Corpus, MultiStreamTrainer, MultiStreamTrainingArguments, config_from_preset
from hf_recurrent.trainers.meta_initialization import build_on_meta
from hf_recurrent.trainers.sharding import is_sharding_requested


def peak() -> float:
    """Largest resident memory of this process so far, in GB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("preset")
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--block_size", type=int, default=32)
    parser.add_argument("--optim", default="adamw_torch")
    parser.add_argument("--resume")
    options = parser.parse_args()
    torch.set_num_threads(1)
    args = MultiStreamTrainingArguments(
        options.folder, per_device_train_batch_size=1, block_size=options.block_size, max_steps=options.steps,
        save_steps=2, logging_steps=1, save_total_limit=1, optim=options.optim, use_cpu=True, disable_tqdm=True,
        report_to=[], lr_scheduler_type="constant",
    )  # fmt: skip
    set_seed(0)
    config = config_from_preset(options.preset)
    before = peak()

    def build():
        return AutoModelForCausalLM.from_config(config)

    model = build_on_meta(build) if is_sharding_requested() else build()
    built = peak()
    corpus = Corpus.from_documents([bytes(range(32, 120)) * 20] * 8, ByteTokenizer(), name="toy")
    begin = time.time()
    trainer = MultiStreamTrainer(model, args, corpus, None, processing_class=ByteTokenizer())
    ready = peak()
    trainer.train(options.resume)
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(
            json.dumps({
                "sharded": trainer.sharding.is_sharded, "processes": args.world_size,
                "parameters": trainer.trained_model.num_parameters(), "GB before": before, "GB built": built,
                "GB ready": ready, "GB peak": peak(), "seconds": time.time() - begin, "losses": losses,
            }),
            flush=True,
        )  # fmt: skip
    os._exit(0)  # gloo sometimes aborts in its own clean-up


if __name__ == "__main__":
    main()
