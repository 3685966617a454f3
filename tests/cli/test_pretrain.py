"""`hf-recurrent pretrain` from the command line to the saved model."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_recurrent
from hf_recurrent.cli.main import COMMANDS
from hf_recurrent.cli.main import main as run_command
from hf_recurrent.cli.parsing import parse_pairs
from hf_recurrent.cli.pretrain import main
from hf_recurrent.cli.pretrain_arguments import parse_arguments
from hf_recurrent.cli.recipes import load_recipe, recipe_names
from hf_recurrent.presets import preset_names

SHORT = ["--use_cpu", "--max_steps", "2", "--disable_tqdm", "true", "--sample_every", "0", "--sample_bytes", "8"]
NO_ACCOUNTS = ["--accounts", "false"]
SMALL = ["--per_device_train_batch_size", "4", "--block_size", "16", "--per_device_eval_batch_size", "2"]
TINY = ["--config_overrides", "hidden_size=16", "state_size=16", "num_hidden_layers=1"]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", os.fspath(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", os.fspath(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text("All work and no play makes Jack a dull boy.\n" * (number + 1))
    return str(folder)


def run(corpus, *arguments):
    main(["--corpus", corpus, *SHORT, *SMALL, *NO_ACCOUNTS, *map(str, arguments)])


def test_from_files_to_a_model_that_loads(corpus, tmp_path, capsys):
    run(corpus, *TINY)
    out = capsys.readouterr().out
    directory = Path("runs/memora-tiny-notes")
    assert "bits per byte on 1 held-out document" in out
    assert "sample after 'All work and no play" in out
    assert (
        f"hf-recurrent generate {directory}" in out and f"hf-recurrent evaluate {directory} --corpus {corpus}" in out
    )
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.config.hidden_size == 16 and model.config.use_cache
    assert type(model) is hf_recurrent.MemoraForCausalLM and tokenizer("a")["input_ids"] == [97]
    metrics = json.loads((directory / "eval_results.json").read_text())
    assert 0 < metrics["eval_bits_per_byte"] < 16
    assert (directory / "README.md").is_file()
    assert not [path for path in directory.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl")]

    # The printed command, and the file of arguments, give the same again.
    command = next(line for line in out.splitlines() if "hf-recurrent evaluate" in line).split()[2:]
    run_command(["evaluate", *command, "--quiet", "--no_compressors", "--output", "result.json"])
    again = json.loads(Path("result.json").read_text())
    assert again["bits_per_byte"] == pytest.approx(metrics["eval_bits_per_byte"], rel=1e-5)
    main(["--recipe", str(directory / "_recipe.yaml"), "--use_cpu"])
    second = Path("runs/memora-tiny-notes-2")
    for name, tensor in load_file(directory / "model.safetensors").items():
        assert torch.equal(tensor, load_file(second / "model.safetensors")[name])


def test_the_end_is_a_table_of_counts_network_and_compressors(corpus, capsys, monkeypatch):
    counts = ["count_memory_slots=256", "count_memory_text=4096", "count_memory_window=256"]
    options = [*TINY, *counts, "--max_steps", 20, "--accounts", "true"]
    run(corpus, *options, "--output_dir", "whole")
    out = capsys.readouterr().out
    accounts = json.loads(Path("whole/_accounts.json").read_text())
    assert accounts["train_bytes"] == 20 * 4 * 16 and not accounts["notes"]
    rows = accounts["rows"]
    names = [name for name in rows if not name.startswith("PPMd")]
    assert names == ["counts alone", "network alone", "both", "xz -9, each file alone", "gzip -9, each file alone"]
    protocols = [name.partition(", ")[2] for name in rows if name.startswith("PPMd")]
    assert protocols == ["after the same bytes", "each file alone"]
    for name, row in rows.items():
        line = next(line for line in out.splitlines() if line.startswith(f"{name} "))
        assert line.split()[-2:] == ["-" if value is None else f"{value:.3f}" for value in row.values()]
    assert rows["both"]["adapting"] < rows["network alone"]["adapting"]
    result = json.loads(Path("whole/eval_results.json").read_text())
    assert rows["both"]["adapting"] == result["eval_bits_per_byte"]
    assert rows["network alone"]["frozen"] == result["eval_network_bits_per_byte"]
    assert f"(network alone {result['eval_network_bits_per_byte']:.3f}) on 1 held-out document" in out

    # The command gives the same accounts of the saved model.
    run_command(["evaluate", "whole", "--corpus", corpus, "--accounts", "--quiet", "--output", "again.json"])
    again = json.loads(Path("again.json").read_text())["accounts"]
    for name, row in rows.items():
        assert again["rows"][name]["adapting"] == pytest.approx(row["adapting"], rel=1e-5)
        assert (again["rows"][name]["frozen"] or 0) == pytest.approx(row["frozen"] or 0, rel=1e-5)

    monkeypatch.setattr("hf_recurrent.cli.pretrain_report._MOST_ACCOUNTED", 1000)
    capsys.readouterr()
    run(corpus, *options, "--output_dir", "large", "--json")
    printed = capsys.readouterr()
    results = json.loads(printed.out)
    assert (results["output_dir"], results["steps"], results["accounts"]) == ("large", 20, None)
    assert results["bits_per_byte"] == pytest.approx(rows["both"]["adapting"], rel=1e-5)
    assert "hf-recurrent evaluate large --accounts" in printed.err
    assert "json" not in Path("large/_recipe.yaml").read_text()
    assert not Path("large/_accounts.json").exists()


def test_resume_and_refusal_to_overwrite(corpus, capsys):
    run(corpus, *TINY, "--max_steps", 6, "--output_dir", "whole", "--save_steps", 3)
    with pytest.raises(SystemExit):
        run(corpus, *TINY, "--output_dir", "whole")
    assert (
        "`--output_dir` is 'whole', which has a model or checkpoints of a finished run; "
        "add --resume_from_checkpoint true" in capsys.readouterr().err
    )
    run(corpus, *TINY, "--max_steps", 6, "--output_dir", "more", "--resume_from_checkpoint", "whole/checkpoint-3")
    whole, more = (load_file(f"{name}/model.safetensors") for name in ("whole", "more"))
    assert all(torch.equal(whole[name], more[name]) for name in whole)
    capsys.readouterr()
    run(corpus, *TINY, "--max_steps", 6, "--output_dir", "whole", "--resume_from_checkpoint", "true")
    out = capsys.readouterr().out
    assert "resuming from whole/checkpoint-6" in out and "This run is finished: step 6 of 6" in out
    run(corpus, *TINY, "--output_dir", "new", "--resume_from_checkpoint", "true")
    assert "No checkpoint in new; starting a new run." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(corpus, *TINY, "--block_size", 8, "--output_dir", "whole", "--resume_from_checkpoint", "true")
    assert "`--block_size` 16, but it is 8 now" in capsys.readouterr().err


def test_training_a_saved_model_further(corpus):
    run(corpus, *TINY, "--output_dir", "first")
    run(corpus, "--model", "first", "--output_dir", "second", "--learning_rate", "0")
    first, second = (load_file(f"{name}/model.safetensors") for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_method_rtrl(corpus, capsys):
    run(corpus, *TINY, "--method", "rtrl", "--stride", 8)
    assert "rtrl at stride 8: 4 streams of 16-byte blocks" in capsys.readouterr().out
    recipe = Path("runs/memora-tiny-notes/_recipe.yaml")
    arguments = parse_arguments(["--recipe", str(recipe), "--use_cpu"])
    assert (arguments.training.method, arguments.training.stride, arguments.given["method"]) == ("rtrl", 8, "rtrl")
    assert parse_arguments(["--recipe", "none", "--method", "spatial", "--use_cpu"]).training.block_size == 1
    assert not hasattr(parse_arguments(["--method", "bptt", "--use_cpu"]).training, "method")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in recipe_names() if load_recipe(name)["model"] in preset_names()])
def test_every_recipe_runs(corpus, name):
    """With its own arguments except model size, data, length and precision."""
    model = load_recipe(name)["model"]
    overrides = ["hidden_size=16", "num_hidden_layers=1"]
    overrides += ["num_heads=4", "head_dim=8", "state_size=8"] if model.startswith("mamba2") else []
    overrides += ["state_size=16"] if model.startswith(("memora", "hawk")) else []
    overrides += ["num_attention_heads=4", "num_key_value_heads=4"] if model.startswith("llama") else []
    smt = load_recipe(name).get("method") == "smt"
    overrides += ["num_attention_heads=2", "num_memory_tokens=2"] if smt else []
    files = ["--context_length", "8", "--future_length", "4", "--dmt_steps", "2", "--dmt_rollout_length", "4"] * smt
    files += ["--config_overrides", *overrides, "--bf16", "false", "--dataloader_num_workers", "0"]
    files += ["--validation_fraction", "0.2", "--output_dir", "run"]
    files += ["--streams", "2"] if "streams" in load_recipe(name) else []
    files += ["--validation_corpus", corpus] if "validation_corpus" in load_recipe(name) else []
    run(corpus, "--recipe", name, *files)
    assert Path("run/model.safetensors").is_file()


def test_a_stock_preset_on_streams(corpus, capsys):
    files = [
        "--config_overrides",
        "hidden_size=16",
        "num_hidden_layers=1",
        "num_heads=4",
        "head_dim=8",
        "state_size=8",
    ]
    run(corpus, "--model", "mamba2-s0", *files, "--output_dir", "run")
    assert "windows" not in capsys.readouterr().out
    assert type(AutoModelForCausalLM.from_pretrained("run")).__module__.startswith("transformers.models.mamba2")
    assert "with_state" in Path("run/README.md").read_text()
    options = ["--greedy", "--max_new_tokens", "6", "--quiet"]
    run_command(["generate", "run", "--prompt", "All work", "--save_state", "a.state", *options])
    run_command(["generate", "run", "--state", "a.state", *options])
    run_command(["evaluate", "run", "--corpus", corpus, "--block_size", "16", "--no_compressors", "--quiet"])
    assert "whole episode" in capsys.readouterr().out


def test_recipes_explain_themselves():
    folder = Path(hf_recurrent.__file__).parent / "recipes"
    assert "default" in recipe_names() and len(recipe_names()) >= 5
    for name in recipe_names():
        comments = [line for line in (folder / f"{name}.yaml").read_text().splitlines() if line.startswith("#")]
        assert {"# Hardware", "# Expected"} <= {line.split(":")[0] for line in comments}, name
        assert any("hf-recurrent pretrain" in line for line in comments)


def test_command_line_takes_precedence_over_recipe(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(yaml.safe_dump({"model": "hawk-s0", "learning_rate": "2e-3", "block_size": 32}))
    arguments = parse_arguments(["--recipe", str(recipe), "--block_size", "64", "--use_cpu"])
    assert arguments.model.model == "hawk-s0"
    assert arguments.training.learning_rate == 2e-3 and arguments.training.block_size == 64
    assert arguments.given == {"model": "hawk-s0", "learning_rate": 2e-3, "block_size": 64, "use_cpu": True}
    assert parse_arguments(["--recipe", "none", "--use_cpu"]).training.learning_rate == 3e-4
    values = {"a": 1, "b": True, "c": "x", "d": 0.5, "e": 0.001}
    assert parse_pairs("--config_overrides", ["a=1", "b=true", "c=x", "d=0.5", "e=1e-3"]) == values


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "memora-s99"], "`--model` is 'memora-s99'; it must be a directory"),
        (["--corpus", "missing.txt"], "missing.txt"),
        (["--method", "uoro"], "`--method` is 'uoro'; it must be one of bptt, rtrl, snap1, truncated, spatial"),
        (["--model", "llama-s0", "--method", "rtrl"], "LlamaForCausalLM, which carries no state"),
        (["--recipe", "fastest"], "`--recipe` is 'fastest'; it must be a YAML file, none, or one of"),
        (["--config_overrides", "hidden_size"], "`--config_overrides` has 'hidden_size'; it must be NAME=VALUE"),
        (["--config_overrides", "width=3"], "has no field 'width'"),
        (["--block_size", "0"], "`--block_size` is 0; it must be 1 or more"),
        (["--block_size", "many"], "invalid int value: 'many'"),
        (["--blok_size", "1"], "unrecognized arguments: --blok_size; did you mean --block_size?"),
        (["--validation_fraction", "2"], "`--validation_fraction` is 2.0; it must be between 0 and 1"),
        (["--resume_from_checkpoint", "elsewhere"], "`--resume_from_checkpoint` is 'elsewhere'; directory not found"),
    ],
)
def test_bad_input_ends_with_one_sentence(corpus, capsys, arguments, words):
    with pytest.raises(SystemExit) as stop:
        main(["--corpus", corpus, *SHORT, *arguments])
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 2
    assert words in error and error.startswith("hf-recurrent pretrain: error: ") and "Traceback" not in error
    assert not list(Path().rglob("checkpoint-*"))


def test_recipe_with_unknown_key(tmp_path, capsys):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("learning_rat: 1\n")
    with pytest.raises(SystemExit):
        main(["--recipe", str(recipe)])
    assert "has the unknown key `learning_rat`; did you mean learning_rate?" in capsys.readouterr().err


@pytest.mark.long
def test_two_processes_through_the_script(corpus):
    """Judged by its files: gloo sometimes aborts at exit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port)]
    result = subprocess.run(
        [*launcher, str(root / "scripts" / "pretrain.py"), "--corpus", corpus, *SHORT, *SMALL, *TINY],
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    directory = Path("runs/memora-tiny-notes")
    assert (directory / "eval_results.json").is_file(), result.stderr[-3000:]
    streams = json.loads((directory / "checkpoint-2" / "streams.json").read_text())
    assert (streams["num_processes"], streams["num_streams"]) == (2, 8)
    assert result.stdout.count("bits per byte on 1 held-out") == 1
    assert result.stdout.count("saving to") == 1
    assert not Path("runs/memora-tiny-notes-2").exists()


def test_commands(capsys):
    run_command(["--help"])
    out = capsys.readouterr().out
    assert all(f"  {command}" in out for command in COMMANDS)
    run_command(["env"])
    assert "CPU scan kernel" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_command(["trian"])
    assert "; did you mean pretrain?" in capsys.readouterr().err
    run_command(["pretrain", "--help"])
    assert "--train_bytes" in capsys.readouterr().out
