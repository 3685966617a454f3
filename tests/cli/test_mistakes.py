"""Plausible mistakes on every command line: one sentence that names the argument and its value, never a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent import ByteTokenizer, config_from_preset
from hf_recurrent.cli.main import main

TINY = "--config_overrides hidden_size=16 state_size=16 num_hidden_layers=1"
TRAIN = f"pretrain --use_cpu --corpus notes {TINY} --max_steps 2 --block_size 8 --sample_every 0 --report_to none"
# Command line → words of the sentence. MODEL and LLAMA are checkpoints, the latter without a state.
MISTAKES = [
    # The program
    ("trian", ["unknown command 'trian'", "did you mean"]),
    ("pushtohub MODEL", ["unknown command 'pushtohub'", "did you mean push-to-hub?"]),
    ("--help-me", ["unknown command '--help-me'"]),
    ("completion", ["the following arguments are required: shell"]),
    ("completion tcsh", ["shell", "'tcsh'", "fish"]),
    ("env --verbose", ["unrecognized arguments: --verbose"]),
    # Training
    (f"{TRAIN} --learning-rte 1e-3", ["--learning-rte", "did you mean --learning_rate?"]),
    (f"{TRAIN} --learning-rate fast", ["--learning-rate", "'fast'"]),
    (f"{TRAIN} --learning_rate 1e400", ["--learning_rate", "inf"]),
    (f"{TRAIN} --block-size 0", ["--block-size", "is 0", "1 or more"]),
    (f"{TRAIN} --per_device_train_batch_size -3", ["`--per_device_train_batch_size` is -3"]),
    (f"{TRAIN} --regime idd", ["--regime", "'idd'", "iid"]),
    (f"{TRAIN} --method rtl", ["--method", "'rtl'", "rtrl"]),
    (f"{TRAIN} --recipe memora-so", ["--recipe", "'memora-so'", "memora-s0"]),
    (f"{TRAIN} --model memora-tny", ["--model", "'memora-tny'", "memora-tiny"]),
    ("pretrain --use_cpu --corpus notes --model runs/absent", ["--model", "'runs/absent'", "directory not found"]),
    ("pretrain --use_cpu --corpus notes --model notes", ["--model", "'notes'"]),
    ("pretrain --use_cpu --corpus notes --config_overrides hiden_size=8", ["hiden_size"]),
    ("pretrain --use_cpu --corpus notes --config_overrides hidden_size", ["--config_overrides", "'hidden_size'"]),
    (f"{TRAIN} --corpus ntes", ["'ntes'", "does not exist"]),
    (f"{TRAIN} --corpus empty", ["'empty'", "directory without files"]),
    (f"{TRAIN} --corpus empty.txt", ["'empty.txt'", "is empty"]),
    (f"{TRAIN} --corpus latin.txt", ["latin.txt", "is not UTF-8 text", "add `--binary`"]),
    (f"{TRAIN} --corpus rows.jsonl --text_column txt", ["`--text_column`", "'txt'", "'text'"]),
    (f"{TRAIN} --corpus damaged.gz", ["damaged.gz", "is damaged"]),
    (f"{TRAIN} --corpus task:partiy", ["'partiy'", "parity"]),
    (f"{TRAIN} --corpus task:parity,lenght=8", ["lenght", "length"]),
    (f"{TRAIN} --corpus mnist:absent", ["mnist:absent", "directory not found"]),
    (f"{TRAIN} --validation_fraction 2", ["`--validation_fraction`", "2.0", "between 0 and 1"]),
    (f"{TRAIN} --max-eval-bytes 0", ["--max-eval-bytes", "0.0", "at least 1"]),
    (f"{TRAIN} --tokenizer bpe", ["--tokenizer", "'bpe'"]),
    (f"{TRAIN} --threads 0", ["`--threads` is 0", "at least 1"]),
    (f"{TRAIN} --threads two", ["--threads", "'two'"]),
    (f"{TRAIN} --report_to wandbb", ["--report_to", "'wandbb'", "did you mean wandb?"]),
    (f"{TRAIN} --report_to neptune", ["--report_to", "'neptune'", "not installed"]),
    (f"{TRAIN} --optim adamx", ["--optim", "adamx"]),
    (f"{TRAIN} --lr_scheduler_type cosin", ["--lr_scheduler_type", "cosin"]),
    (f"{TRAIN} --output_dir book.txt/x", ["book.txt/x"]),
    (f"{TRAIN} --output_dir MODEL", ["--output_dir", "which has a model"]),
    (f"{TRAIN} --resume_from_checkpoint absent", ["absent"]),
    (f"{TRAIN} --method rtrl --model llama-s0 --config_overrides num_attention_heads=2 hidden_size=16", ["Llama"]),
    (f"{TRAIN} --method smt --dmt_steps -1", ["--dmt_steps", "is -1"]),
    (f"{TRAIN} extra", ["extra"]),
    (f"{TRAIN} --validation_corpus absent", ["`--validation_corpus` is 'absent'", "does not exist"]),
    (f"{TRAIN} --max_corpus_bytes 3", ["`--max_corpus_bytes` is 3", "the first document"]),
    (f"{TRAIN} --corpus mnist:notes --dataset_split dev", ["`--dataset_split` is 'dev'", "train"]),
    # Evaluation
    ("evaluate MODLE --corpus notes", ["`MODEL` is 'MODLE'", "directory not found"]),
    ("evaluate notes --corpus notes", ["`MODEL` is 'notes'", "no `config.json`"]),
    ("evaluate book.txt --corpus notes", ["`MODEL` is 'book.txt'", "must be a directory"]),
    ("evaluate", ["the following arguments are required: MODEL"]),
    ("evaluate MODEL --corpus notes --split test", ["--split", "'test'", "validation"]),
    ("evaluate MODEL --corpus notes --num-streams 0", ["--num-streams", "is 0"]),
    ("evaluate MODEL --corpus notes --output no/results.json", ["--output", "no/results.json", "'no' not found"]),
    ("evaluate MODEL --corpus notes --dtype float8", ["--dtype", "'float8'"]),
    ("evaluate MODEL --corpus notes --device gpu", ["--device", "'gpu'"]),
    ("evaluate MODEL --corpus absent/", ["'absent/'", "does not exist"]),
    ("evaluate MODEL --corpus notes --max_bytes 1", ["`--max_bytes` is 1", "shortest episode"]),
    ("evaluate MODEL --corpus notes --max_eval_bytes 1", ["`--max_eval_bytes` is 1", "shortest episode"]),
    ("evaluate MODEL --split all --corpus mnist:notes --dataset_split dev", ["`--dataset_split` is 'dev'", "train"]),
    ("evaluate LLAMA --corpus notes --block_size 9999", ["`--block_size` is 9999", "positions"]),
    ("evaluate MODEL --corpus ~nouser/x", ["`--corpus`", "'~nouser/x'", "does not exist"]),
    ("evaluate MODEL --corpus mnist:~nouser/x", ["`--corpus`", "~nouser/x", "directory not found"]),
    ("evaluate MODEL --import ~nouser/x.py --corpus notes", ["`--import`", "'~nouser/x.py'", "file not found"]),
    # Scores
    ("score MODEL", ["the following arguments are required: FILE"]),
    ("score MODEL absent.txt", ["'absent.txt'", "does not exist"]),
    ("score MODEL ~nouser/x", ["`FILE`", "'~nouser/x'", "does not exist"]),
    ("score MODEL book.txt --per word", ["--per", "'word'", "line"]),
    ("score LLAMA book.txt", ["MODEL", "LLAMA", "without a recurrent state"]),
    ("score MODEL mnist:notes", ["`FILE`", "'mnist:notes'", "evaluate"]),
    # Generation
    ("generate MODEL", ["--prompt, --prompt_file or --state"]),
    ("generate MODEL --prompt a --temperature 0", ["--temperature", "is 0.0", "--greedy"]),
    ("generate MODEL --prompt a --top-p 1.5", ["--top-p", "is 1.5", "at most 1"]),
    ("generate MODEL --prompt a --max-new-tokens -1", ["--max-new-tokens", "is -1"]),
    ("generate MODEL --prompt_file absent.txt", ["--prompt_file", "'absent.txt'", "file not found"]),
    ("generate MODEL --prompt_file empty.txt", ["--prompt_file", "'empty.txt'", "must not be empty"]),
    ("generate MODEL --state book.txt", ["book.txt", "not a saved state"]),
    ("generate MODEL --prompt a --regex [", ["`--regex` is '['", "regular expression"]),
    ("generate MODEL --prompt a --json_schema book.txt", ["`--json_schema` is not JSON"]),
    ("generate MODEL --prompt a --json_schema latin.txt", ["`--json_schema` is 'latin.txt'", "not UTF-8"]),
    ("generate MODEL --prompt a --regex a --json_schema rows.jsonl", ["--regex", "--json_schema"]),
    ("generate MODEL --prompt a --draft absent", ["`--draft` is 'absent'", "directory not found"]),
    ("generate MODEL --prompt a --save_state no/s", ["--save_state", "no/s", "'no' not found"]),
    ("generate LLAMA --prompt a --save_state s", ["--save_state", "LlamaForCausalLM"]),
    ("generate MODEL --prompt a --seed -5", ["--seed", "-5"]),
    ("generate MODEL a", ["unrecognized arguments: a"]),
    # Chats
    ("chat", ["the following arguments are required: MODEL"]),
    ("chat MODEL --state book.txt", ["book.txt", "not a saved state"]),
    ("chat LLAMA", ["LLAMA", "without a recurrent state"]),
    ("chat MODEL --system brief", ["--system", "chat template"]),
    # Files
    ("compress book.txt --json --output -", ["`--json`", "standard output"]),
    # Learning
    ("learn MODEL", ["the following arguments are required: --source"]),
    ("learn MODEL --source absent.log", ["absent.log"]),
    ("learn MODEL --source book.txt --stride 3 --block-size 8", ["--block-size", "is 8", "--stride", "3"]),
    ("learn MODEL --source book.txt --rule bptt", ["--rule", "'bptt'", "rtrl"]),
    ("learn MODEL --source book.txt --save_every 0.5", ["--save_every", "0.5"]),
    ("learn MODEL --source tcp://example.org:80", ["tcp://example.org:80"]),
    ("learn MODEL --source book.txt --resume --restart", ["--restart", "--resume"]),
    ("learn MODEL --source book.txt --held_out absent.txt", ["`--held_out` is 'absent.txt'"]),
    ("plan --model hawk-tiny --block-size 0", ["`--block-size` is 0"]),
    ("learn LLAMA --source book.txt", ["`MODEL` is a LlamaForCausalLM", "recurrent"]),
    # Exports
    ("export MODEL --device adir", ["`--device` is 'adir'", "cannot be used"]),
    ("export MODEL --device cuda:77", ["`--device` is 'cuda:77'", "cannot be used"]),
    # The Hub
    ("push-to-hub MODEL", ["the following arguments are required: REPO_ID"]),
    ("push-to-hub MODEL a/b/c", ["a/b/c"]),
    ("push-to-hub runs/absent me/model", ["`PATH` is 'runs/absent'", "directory not found"]),
    # Experiments
    ("reproduce partiy", ["partiy", "parity"]),
    ("reproduce parity --override step=3", ["--override", "'step'"]),
    ("reproduce parity --only nothing", ["--only", "'nothing'"]),
    ("reproduce parity --processes 0", ["--processes", "is 0"]),
]


def save(path, preset: str, **fields) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_from_preset(preset, **fields)).save_pretrained(path)
    ByteTokenizer().save_pretrained(path)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    save(folder / "MODEL", "hawk-tiny", hidden_size=16, state_size=16, num_hidden_layers=1)
    save(folder / "LLAMA", "llama-s0", hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    (folder / "notes").mkdir()
    for number in range(4):
        (folder / "notes" / f"{number}.txt").write_text("All work and no play.\n" * (number + 1))
    (folder / "empty").mkdir()
    (folder / "runs").mkdir()
    (folder / "empty.txt").touch()
    (folder / "book.txt").write_text("It was a dark night.\n" * 20)
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    (folder / "rows.jsonl").write_text(json.dumps({"text": "a row"}) + "\n")
    (folder / "damaged.gz").write_bytes(b"\x1f\x8b no gzip")
    return folder


@pytest.fixture(autouse=True)
def inside(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("HF_HOME", os.fspath(workspace / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", os.fspath(workspace / "home"))


def check_sentence(status: int, error: str, words: list[str]) -> None:
    lines = [line for line in error.strip().splitlines() if line]
    assert status in (1, 2) and len(lines) == 1 and "Traceback" not in error, error
    assert lines[0].startswith("hf-recurrent") and ": error: " in lines[0]
    assert all(word in lines[0] for word in words), lines[0]


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line[-60:] for line, _ in MISTAKES])
def test_one_sentence(line, words, capsys):
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*") if "home" not in path.parts}
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    captured = capsys.readouterr()
    check_sentence(stop.value.code, captured.err, words)
    assert not captured.out
    # Nothing is begun, so that nothing has to be removed.
    after = {path: path.stat().st_mtime_ns for path in Path().rglob("*") if "home" not in path.parts}
    assert after == before


@pytest.mark.parametrize("line", ["trian", "evaluate MODLE --corpus notes"])
def test_as_real_processes(line):
    command = [sys.executable, "-m", "hf_recurrent.cli.main", *line.split()]
    result = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    check_sentence(result.returncode, result.stderr, dict(MISTAKES)[line])


@pytest.mark.sampled(4)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("line", ["--help", "env"])
def test_a_full_standard_output(line, unbuffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    command = [sys.executable, "-m", "hf_recurrent.cli.main", *line.split()]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2
    check_sentence(2, result.stderr, ["Standard output", "cannot be written: No space left on device."])


@pytest.mark.parametrize(
    ("line", "module", "package"),
    [
        (f"{TRAIN} --corpus rows.parquet", "pyarrow", "pip install datasets"),
        (f"{TRAIN} --corpus notes rows.jsonl.zst", "zstandard", "pip install zstandard"),
        (f"{TRAIN} --corpus images:pictures", "PIL", "pip install pillow"),
        (f"{TRAIN} --corpus hub:a/b", "datasets", "pip install"),
        ("generate absent --prompt a --regex a", "xgrammar", "pip install 'hf-recurrent[constraints]'"),
        ("learn MODEL --source book.txt --plot", "matplotlib", "hf-recurrent[plots]"),
        ("reproduce parity", "matplotlib", "hf-recurrent[plots]"),
        ("completion bash", "shtab", "pip install 'hf-recurrent[completion]'"),
        ("evaluate ADAPTER --corpus notes", "peft", "pip install 'hf-recurrent[peft]'"),
    ],
)
def test_missing_packages_are_named_before_work_begins(line, module, package, workspace, monkeypatch, capsys):
    for name in ("rows.parquet", "rows.jsonl.zst"):
        (workspace / name).write_bytes(b"never read")
    for folder in ("pictures", "ADAPTER"):
        (workspace / folder).mkdir(exist_ok=True)
    (workspace / "pictures" / "a.png").write_bytes(b"never read")
    (workspace / "ADAPTER" / "config.json").write_text("{}")
    (workspace / "ADAPTER" / "adapter_config.json").write_text("{}")
    for name in ("adapter_model.safetensors", "model.safetensors"):
        (workspace / "ADAPTER" / name).write_bytes(b"never read")
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("hf_recurrent.hub.loading.is_peft_available", lambda: module != "peft")
    monkeypatch.setattr("hf_recurrent.data.packing._pack", None)
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    check_sentence(stop.value.code, capsys.readouterr().err, [package])
