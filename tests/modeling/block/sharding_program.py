"""Builds every family on the meta device, shards it with FSDP2, initialises, trains a step and saves it.

python sharding_program.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, set_seed

from hf_recurrent import config_from_preset


def sharded(config, mesh):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.init_weights()
    return model


def main(folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    ids = torch.arange(16).view(2, 8)
    report = {}
    for family in ("memora", "hawk", "mgrade", "lru", "smt-rnn"):
        config = config_from_preset(f"{family}-tiny", num_hidden_layers=2)
        set_seed(0)
        model = sharded(config, mesh)
        set_seed(0)
        plain = AutoModelForCausalLM.from_config(config)
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        spread = {name: (weights[name].std().item(), weight.std().item()) for name, weight in plain.named_parameters()}
        model(ids, labels=ids).loss.backward()
        directory = folder / family
        model.save_pretrained(directory, state_dict=weights)
        loaded = AutoModelForCausalLM.from_pretrained(directory).eval()
        with torch.no_grad():
            difference = (loaded(ids).logits - model.eval()(ids).logits).abs().max().item()
        saved = json.loads((directory / "config.json").read_text())
        report[family] = {
            "wrapper": type(model).__name__,
            "spread": spread,
            "difference": difference,
            "code": sorted(file.name for file in directory.glob("*.py")),
            "auto_map": saved["auto_map"],
            "architectures": saved["architectures"],
        }
    print(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
