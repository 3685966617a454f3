"""Runs of groups of processes, sharded (FSDP2) and replicated (DDP), for test_sharding.py.

    python sharding_program.py FOLDER SCENARIO[+SCENARIO ...] [SCENARIO ...]

Each scenario leaves FOLDER/SCENARIO.json. Those that are joined by + run in the same processes.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from forked_groups import run_group
from smt_cases import tiny_pair
from tiny_run import COUNT_SIZES, logged, table_model, tiny_corpora, tiny_model, tiny_trainer
from transformers import AutoModelForCausalLM, set_seed

from hf_recurrent import (
    ByteTokenizer,
    DmtTrainer,
    DmtTrainingArguments,
    SmtTrainer,
    SmtTrainingArguments,
    config_from_preset,
)
from hf_recurrent.checkpoints.tensor_files import is_sharded, whole, write_tensors
from hf_recurrent.trainers.meta_initialization import build_on_meta
from hf_recurrent.trainers.sharding import FullSharding, ShardingSettings

FOLDER = Path(sys.argv[1])
_SHORT = {"max_steps": 6, "save_steps": 3, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 4}


def finish(trainer, name, resume=None):
    """Train, evaluate, save, write a card; the first process leaves the results."""
    trainer.train(resume)
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.create_model_card()
    first = trainer.is_world_process_zero()
    write_tensors(trainer.trained_model.state_dict(), FOLDER / f"{name}.safetensors" if first else None)
    if first:
        result = {
            "losses": logged(trainer), "norms": logged(trainer, "grad_norm"),
            "mixed": logged(trainer, "mixed_bits_per_byte"), "evaluated": metrics["eval_bits_per_byte"],
            "sharded": trainer.sharding.is_sharded, "processes": trainer.args.world_size,
            "parts": sum(map(is_sharded, trainer.trained_model.parameters())),
        }  # fmt: skip
        (FOLDER / f"{name}.json").write_text(json.dumps(result))


def next_token(name, batch, resume=None, lora=False, tables=False, fields=None, **arguments):
    model = (table_model if tables else tiny_model)(**(fields or {}))
    if tables:
        arguments |= {"matrix_optimizer": "muon"}
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["gate_proj"]))
    arguments = _SHORT | {"per_device_train_batch_size": batch, "max_grad_norm": 0.1} | arguments
    finish(tiny_trainer(FOLDER / name, model, **arguments), name, resume and str(FOLDER / resume))


def memories(name, batch, kind, arguments_kind, resume=None, **arguments):
    common = {
        "per_device_train_batch_size": batch, "per_device_eval_batch_size": 3, "eval_block_size": 32,
        "block_size": 24, "context_length": 8, "learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True,
        "eval_windows": 4, "save_total_limit": None, "report_to": [],
    }  # fmt: skip
    args = arguments_kind(str(FOLDER / name), **common | _SHORT | arguments)
    trainer = kind(*tiny_pair(256), args, *tiny_corpora(), processing_class=ByteTokenizer())
    finish(trainer, name, resume and str(FOLDER / resume))


def same_weights():
    """Weights that are drawn part by part equal one process's: families whose random numbers differ in kind."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    different = []
    for family, overrides in (
        ("memora", {}), ("memora", {"recurrent_unit": "gru"}), ("hawk", {}), ("mgrade", {}), ("lru", {}),
        ("smt-rnn", {}), ("memora", COUNT_SIZES | {"ngram_orders": [2, 3], "ngram_rows": 64}),
    ):  # fmt: skip
        config = config_from_preset(f"{family}-tiny", num_hidden_layers=2, **overrides)
        build = partial(AutoModelForCausalLM.from_config, config)
        set_seed(3)
        plain = build()
        following = torch.rand(1)
        set_seed(3)
        model = build_on_meta(build)
        different += [] if torch.equal(following, torch.rand(1)) else [f"{family}: the generator"]
        FullSharding(torch.device("cpu"), ShardingSettings(), by_layer=True).shard(model)
        parts = dict(model.named_parameters())
        for name, weight in plain.named_parameters():
            is_table = "embed_ngrams" in name  # every process has it whole
            if is_sharded(parts[name]) == is_table or not torch.equal(whole(parts[name]), weight):
                different.append(f"{family}: {name}")
        buffers = dict(model.named_buffers())
        different += [
            f"{family}: {name}" for name, each in plain.named_buffers() if not torch.equal(each, buffers[name])
        ]
    if dist.get_rank() == 0:
        (FOLDER / "same_weights.json").write_text(json.dumps(different))


def disagree(rank, what):
    """The sentence of every process, if they get different arguments."""
    try:
        tiny_trainer(FOLDER / "disagree", **{what: [0.1, 0.2][rank]})
    except ValueError as error:
        (FOLDER / f"disagree{rank}.json").write_text(json.dumps(str(error)))


def disagree_about_data(rank):
    """The sentence of every process, if one of them has another corpus."""
    corpora = tiny_corpora()
    try:
        tiny_trainer(FOLDER / "disagree", corpora=corpora if rank == 0 else (corpora[1], corpora[1]))
    except ValueError as error:
        (FOLDER / f"disagree_about_data{rank}.json").write_text(json.dumps(str(error)))


def refuse(rank, resume):
    """The sentence of every process, if a run cannot continue a checkpoint."""
    try:
        tiny_trainer(FOLDER / "refuse", per_device_train_batch_size=2, data_seed=5).train(str(FOLDER / resume))
    except ValueError as error:
        (FOLDER / f"refuse{rank}.json").write_text(json.dumps(str(error)))


_SMT = {"kind": SmtTrainer, "arguments_kind": SmtTrainingArguments, "future_length": 4}
_DMT = {"kind": DmtTrainer, "arguments_kind": DmtTrainingArguments, "rollout_length": 8}
_COUNTS = {"tables": True, "fields": COUNT_SIZES}
_SAMPLES = {"sample_every": 2, "sample_bytes": 5}
# Name → processes, sharded, action of a rank, environment.
SCENARIOS = {
    "one": (1, False, lambda _: next_token("one", 4), {}),
    "fsdp": (2, True, lambda _: next_token("fsdp", 2, **_SAMPLES), {}),
    "fsdp_resumed": (2, True, lambda _: next_token("fsdp_resumed", 2, "fsdp/checkpoint-3"), {}),
    "one_resumed": (1, False, lambda _: next_token("one_resumed", 4, "fsdp/checkpoint-3"), {}),
    "fsdp_from_one": (2, True, lambda _: next_token("fsdp_from_one", 1, "one/checkpoint-3", streams=4), {}),
    "checkpointing": (2, True, lambda _: next_token("checkpointing", 2), {"FSDP_ACTIVATION_CHECKPOINTING": "true"}),
    "rtrl": (1, False, lambda _: next_token("rtrl", 4, online=True, stride=8), {}),
    "rtrl_fsdp": (2, True, lambda _: next_token("rtrl_fsdp", 2, online=True, stride=8), {}),
    "four": (4, True, lambda _: next_token("four", 1), {}),
    "ddp": (2, False, lambda _: next_token("ddp", 2), {}),
    "three": (3, True, lambda _: next_token("three", 8, "twelve/checkpoint-3", streams=12), {}),
    "twelve": (1, False, lambda _: next_token("twelve", 12), {}),
    "bfloat16": (2, False, lambda _: next_token("bfloat16", 2, bf16=True), {}),
    "bfloat16_fsdp": (2, True, lambda _: next_token("bfloat16_fsdp", 2, bf16=True), {}),
    "lora": (1, False, lambda _: next_token("lora", 4, lora=True), {}),
    "lora_fsdp": (2, True, lambda _: next_token("lora_fsdp", 2, lora=True, **_SAMPLES), {}),
    "lora_resumed": (2, True, lambda _: next_token("lora_resumed", 2, "lora_fsdp/checkpoint-3", lora=True), {}),
    "lora_one": (1, False, lambda _: next_token("lora_one", 4, "lora_fsdp/checkpoint-3", lora=True), {}),
    "tables": (1, False, lambda _: next_token("tables", 4, tables=True), {}),
    "tables_fsdp": (2, True, lambda _: next_token("tables_fsdp", 2, tables=True), {}),
    "tables_resumed": (
        2,
        True,
        lambda _: next_token("tables_resumed", 2, "tables_fsdp/checkpoint-3", tables=True),
        {},
    ),
    "tables_one": (1, False, lambda _: next_token("tables_one", 4, "tables_fsdp/checkpoint-3", tables=True), {}),
    "counts": (1, False, lambda _: next_token("counts", 4, **_COUNTS), {}),
    "counts_ddp": (2, False, lambda _: next_token("counts_ddp", 2, **_COUNTS), {}),
    "counts_fsdp": (2, True, lambda _: next_token("counts_fsdp", 2, **_COUNTS), {}),
    "counts_resumed": (
        2,
        True,
        lambda _: next_token("counts_resumed", 2, "counts_fsdp/checkpoint-3", **_COUNTS),
        {},
    ),
    "counts_one": (1, False, lambda _: next_token("counts_one", 4, "counts_fsdp/checkpoint-3", **_COUNTS), {}),
    "compiled_fsdp": (2, True, lambda _: next_token("compiled_fsdp", 2, torch_compile=True), {}),
    "smt": (2, False, lambda _: memories("smt", 2, **_SMT), {}),
    "smt_fsdp": (2, True, lambda _: memories("smt_fsdp", 2, **_SMT), {}),
    "dmt": (2, False, lambda _: memories("dmt", 2, **_DMT), {}),
    "dmt_fsdp": (2, True, lambda _: memories("dmt_fsdp", 2, **_DMT), {}),
    "same_weights": (2, True, lambda _: same_weights(), {}),
    "disagree": (2, True, lambda rank: disagree(rank, "learning_rate"), {}),
    "disagree_about_data": (2, True, disagree_about_data, {}),
    "refuse": (2, True, lambda rank: refuse(rank, "fsdp/checkpoint-3"), {}),
}


def main() -> None:
    torch.set_num_threads(1)
    for names in sys.argv[2:]:
        together = [SCENARIOS[name] for name in names.split("+")]  # one after another in the same processes
        processes, sharded, _, environment = together[0]

        def run_all(rank, together=together):
            for _, _, action, _ in together:
                action(rank)

        statuses = run_group(run_all, processes, sharded, **environment)
        if any(statuses):
            sys.exit(f"{names}: exit statuses {statuses}")


if __name__ == "__main__":
    main()
