"""The launch configurations of `recipes/accelerate`, one after another; run by test_accelerate_recipes.py.

    python recipes_program.py FOLDER [--push]

Each runs `hf-recurrent pretrain` on two processes, with the environment that `accelerate launch` makes of its file,
and continues the run of the one before from an earlier checkpoint. Writes FOLDER/statuses.json.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from forked_groups import run_group

import hf_recurrent
from hf_recurrent.cli import pretrain

RECIPES = Path(hf_recurrent.__file__).parent / "recipes" / "accelerate"
STEPS = 4
# Configuration → the configuration of the run whose checkpoint it continues, and its step.
CHAIN = {
    "ddp": None,
    "fsdp2": ("ddp", 1),
    "fsdp2-offload": ("fsdp2", 2),
    "fsdp2-checkpointing": ("fsdp2-offload", 3),
}
TINY = (
    "--use_cpu true --recipe none --report_to none --model memora-tiny "
    "--config_overrides hidden_size=16 state_size=16 num_hidden_layers=2 "
    f"--corpus notes --block_size 16 --per_device_train_batch_size 2 --max_steps {STEPS} "
    "--learning_rate 1e-2 --logging_steps 1 --save_steps 1 --save_total_limit 9 --eval_strategy steps --eval_steps 4 "
    "--sample_every 2 --sample_bytes 5"
).split()


def write_notes(folder: Path) -> None:
    """A few documents of different lengths, in FOLDER/notes."""
    (folder / "notes").mkdir()
    for number in range(12):
        (folder / "notes" / f"{number}.txt").write_text(f"Note {number}.\n" + "More of it. " * (7 * number % 11 + 3))


def launch_environment(name: str) -> dict[str, str]:
    """Variables that `accelerate launch --config_file` adds to the environment of its processes."""
    words = ["--config_file", str(RECIPES / f"{name}.yaml"), "--num_processes", "2", "pretrain.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    environment = prepare_multi_gpu_env(arguments)
    return {key: value for key, value in environment.items() if os.environ.get(key) != value}


def run(name: str, *flags: str) -> list[int]:
    return run_group(
        lambda _: pretrain.main([*TINY, "--output_dir", name, *flags]), 2, False, **launch_environment(name)
    )


def main() -> None:
    folder = Path(sys.argv[1])
    os.chdir(folder)
    write_notes(folder)
    torch.set_num_threads(1)
    statuses = {}
    for name, before in CHAIN.items():
        resume = ["--resume_from_checkpoint", "{}/checkpoint-{}".format(*before)] if before else []
        statuses[name] = run(name, *resume)
    if "--push" in sys.argv:
        push = ("--push_to_hub", "true", "--hub_model_id", "tester/memora-sharded", "--hub_strategy", "checkpoint")
        statuses["fsdp2-bfloat16"] = run("fsdp2-bfloat16", *push)
        # An existing repository refuses the upload, a new one its creation.
        wrong = (*push, "--output_dir", "refused", "--hub_token", "hf_wrong", "--hub_strategy", "end")
        statuses["upload"] = run("fsdp2", *wrong)
        statuses["creation"] = run("fsdp2", *wrong, "--output_dir", "refused2", "--hub_model_id", "tester/new")
    Path("statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    main()
