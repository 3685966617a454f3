"""Files for command lines: tiny models, corpora, recipes, states and runs, good ones and broken ones."""

import contextlib
import gzip
import json
import os
import pickle
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from hf_recurrent import ByteTokenizer, config_from_preset
from hf_recurrent.cli import generate, learn, pretrain

TINY = ["hidden_size=8", "state_size=8", "num_hidden_layers=1"]
TRAIN = [
    "--use_cpu", "--corpus", "notes", "--max_steps", "1", "--block_size", "8", "--eval_block_size", "16",
    "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "2", "--sample_bytes", "2",
    "--disable_tqdm", "true", "--report_to", "none", "--save_total_limit", "1",
]  # fmt: skip
SMT_TINY = ["hidden_size=8", "num_memory_tokens=2", "num_attention_heads=2", "num_hidden_layers=1"]
# Presets and fields of the models, by directory.
_MODELS = {
    "memora": ("memora-tiny", {"hidden_size": 8, "state_size": 8, "num_hidden_layers": 1}),
    "mgrade": ("mgrade-tiny", {"hidden_size": 8, "num_hidden_layers": 1}),
    "llama": (
        "llama-s0",
        {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
    "rnn": ("smt-rnn-tiny", {"hidden_size": 8, "num_memory_tokens": 2, "num_attention_heads": 2}),
}
_RECIPES = {
    "good.yaml": "model: hawk-tiny\nblock_size: 8\ncorpus: notes\n",
    "tags.yaml": "model: !!python/object/apply:os.system [touch executed]\n",
    "unknown_tag.yaml": "block_size: !foo 8\n",
    "list.yaml": "- a\n- b\n",
    "text.yaml": "just text",
    "empty.yaml": "",
    "unclosed.yaml": "a: [1, {b: ",
    "nul.yaml": "model: \x00\n",
    "bomb.yaml": "a: &a [x, x, x, x]\nb: &b [*a, *a, *a]\nc: &c [*b, *b, *b]\nd: &d [*c, *c, *c]\ne: [*d, *d, *d]\n",
    "deep.yaml": "model: " + "[" * 3000,
    "types.yaml": "block_size: [1, 2]\ncorpus: 5\n",
    "null.yaml": "block_size: null\nsave_total_limit: null\n",
    "dates.yaml": "run_name: 2020-01-01\nmodel: 2020-13-45\n",
    "numbers.yaml": "learning_rate: .inf\nwarmup_steps: .nan\n",
    "keys.yaml": "1: 2\n[a]: b\n",
    "prompts.yaml": 'sample_prompts: [""]\n',
    "surrogate.yaml": 'sample_prompts: ["\\ud800"]\n',
}


class Hostile:
    """Creates the file `executed` in the current folder when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def make_files(folder: Path) -> None:
    """Write everything below `folder`, which is the current folder."""
    torch.manual_seed(0)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        _texts(folder)
        _models(folder)
        pretrain.main([*TRAIN, "--config_overrides", *TINY, "--output_dir", "run"])
        learn.main(["memora", "--source", "log.txt", "--output_dir", "learned", "--stride", "16", "--quiet"])
        generate.main(["memora", "--prompt", "abc", "--max_new_tokens", "0", "--save_state", "good.safetensors"])
        _states(folder)
    for code in folder.rglob("*.py"):
        code.unlink()


def _texts(folder: Path) -> None:
    notes = folder / "notes"
    notes.mkdir()
    for number in range(4):
        (notes / f"{number}.txt").write_text("All work and no play makes Jack a dull boy.\n" * (number + 1))
    (folder / "empty folder").mkdir()
    row = json.dumps({"text": "Once upon a time."}) + "\n"
    files = {
        "log.txt": b"line of the log\n" * 9,
        "empty.txt": b"",
        "one.txt": b"a",
        "zeros.bin": bytes(100),
        "latin.txt": "caf\xe9".encode("latin-1"),
        "rows.jsonl": row.encode() * 9,
        "bad.jsonl": row.encode() + b'{"text": [1]}\n{"te',
        "deep.jsonl": b"[" * 5000 + b"\n",
        "rows.parquet": b"PAR1 not really",
        "good.txt.gz": gzip.compress(b"unpacked " * 9),
        "bad.txt.gz": gzip.compress(b"unpacked " * 9)[:20],
        "bad.zst": b"\x28\xb5\x2f\xfd\x00",
        "genome.fa": b">one\nACGTACGT\n>two\nACGT\n",
        "bad.fa": b"no header\n",
        "caf\xe9 \U0001f389.txt": b"unicode name " * 9,
        "line\nbreak.txt": b"name of two lines " * 9,
        "-dash.txt": b"a name like a flag " * 9,
        os.fsdecode(b"\xff\xfe.txt"): b"a name that is not UTF-8 " * 9,
        "metrics.json": b'{"bits_per_byte": 2.5}',
        "nan.json": b'{"bits_per_byte": NaN}',
        "text.json": b'{"bits_per_byte": "2.5"}',
        "list.json": b"[1, 2]",
        "deep.json": b"[" * 5000,
        "page.md": b"# Results\n",
        **{name: text.encode("utf-8", "surrogatepass") for name, text in _RECIPES.items()},
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "dangling.txt").symlink_to("nowhere")
    (folder / "loop.txt").symlink_to("loop.txt")


def _models(folder: Path) -> None:
    for name, (preset, sizes) in _MODELS.items():
        AutoModelForCausalLM.from_config(config_from_preset(preset, **sizes)).save_pretrained(folder / name)
        ByteTokenizer().save_pretrained(folder / name)
    sizes = _MODELS["rnn"][1]
    AutoModel.from_config(config_from_preset("smt-teacher-tiny", **sizes)).save_pretrained(folder / "rnn" / "teacher")
    tensors = load_file(folder / "memora" / "model.safetensors")
    for name in ("pickled", "adapter", "code", "nan", "headless"):
        AutoModelForCausalLM.from_config(config_from_preset("memora-tiny", **_MODELS["memora"][1])).save_pretrained(
            folder / name
        )
        ByteTokenizer().save_pretrained(folder / name)
    (folder / "pickled" / "model.safetensors").unlink()
    (folder / "pickled" / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile()))
    adapter = {"peft_type": "LORA", "r": 2, "target_modules": "all-linear", "base_model_name_or_path": "memora"}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    (folder / "adapter" / "adapter_model.bin").write_bytes(pickle.dumps(Hostile()))
    config = json.loads((folder / "code" / "config.json").read_text())
    config |= {
        "model_type": "unheard_of",
        "auto_map": {"AutoConfig": "hostile.A", "AutoModelForCausalLM": "hostile.A"},
    }
    (folder / "code" / "config.json").write_text(json.dumps(config))
    (folder / "code" / "hostile.txt").write_text("open('executed', 'w')")
    wrong = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
    save_file(wrong, folder / "nan" / "model.safetensors", metadata={"format": "pt"})
    save_file(dict(list(tensors.items())[1:]), folder / "headless" / "model.safetensors", metadata={"format": "pt"})


def _states(folder: Path) -> None:
    good = folder / "good.safetensors"
    with safe_open(good, framework="pt") as file:
        metadata = file.metadata()
    tensors = {name: torch.full_like(tensor, float("nan")) for name, tensor in load_file(good).items()}
    save_file(tensors, folder / "nan.safetensors", metadata=metadata)
    save_file({"a": torch.zeros(1)}, folder / "foreign.safetensors")
    (folder / "cut.safetensors").write_bytes(good.read_bytes()[:50])
