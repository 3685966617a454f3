"""Peak memory of a process that builds a preset on the meta device, saves its weights and loads them, in parts.

    ACCELERATE_USE_FSDP=true FSDP_VERSION=2 \\
        torchrun --nproc_per_node 2 tests/trainers/sharded_weights.py memora-s8 FOLDER --dtype bfloat16

Fails if a weight that was loaded differs from the one that was saved.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sharding_memory import peak
from transformers import AutoModelForCausalLM, set_seed

from hf_recurrent import config_from_preset
from hf_recurrent.checkpoints.tensor_files import write_tensors
from hf_recurrent.checkpoints.weights import load_weights
from hf_recurrent.trainers.meta_initialization import build_on_meta
from hf_recurrent.trainers.sharding import FullSharding, ShardingSettings


def local_sums(model: torch.nn.Module) -> dict[str, tuple[float, float]]:
    """Sum and norm of this process's part of each weight."""
    sums = {}
    for name, part in model.named_parameters():
        values = part.detach().to_local()
        sums[name] = float(values.sum(dtype=torch.float64)), float(values.norm(dtype=torch.float32))
    return sums


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("preset")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    set_seed(0)
    peaks = {"Python and its libraries": peak()}
    config = config_from_preset(options.preset)
    model = build_on_meta(lambda: AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)))
    peaks["on the meta device"] = peak()
    FullSharding(torch.device("cpu"), ShardingSettings(), by_layer=True).shard(model)
    peaks["initialised in parts"] = peak()
    before, first = local_sums(model), dist.get_rank() == 0
    options.folder.mkdir(exist_ok=True)
    write_tensors(model.state_dict(), options.folder / "model.safetensors" if first else None)
    peaks["saved"] = peak()
    dist.barrier()
    with torch.no_grad():
        for weight in model.parameters():
            weight.to_local().zero_()
    load_weights(model, os.fspath(options.folder))
    peaks["loaded"] = peak()
    assert local_sums(model) == before, "a weight differs"
    if first:
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        print(json.dumps({"parameters": model.num_parameters(), "weights GB": size / 1e9, "peak GB": peaks}))
    dist.barrier()
    os._exit(0)  # gloo sometimes aborts in its own clean-up


if __name__ == "__main__":
    main()
