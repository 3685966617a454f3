"""The launch configurations that ship train, evaluate, sample, continue each other's checkpoints, and upload."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hub_process import TOKEN, run_program, run_words
from loopback_hub import LoopbackHub
from recipes_program import CHAIN, RECIPES, STEPS, TINY, write_notes
from safetensors.torch import load, load_file, save_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("recipes_program.py")
UPLOADED = {
    "model.safetensors", "config.json", "generation_config.json", "tokenizer_config.json", "tokenization_byte.py",
    "modeling_memora.py", "README.md", "provenance.json",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def results(folder):
    """Losses of all steps and the evaluation of a finished run."""
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["global_step"] == STEPS
    evaluated = json.loads((folder / "eval_results.json").read_text())["eval_bits_per_byte"]
    return [*(entry["loss"] for entry in state["log_history"] if "loss" in entry), evaluated]


@pytest.mark.long
def test_each_continues_the_run_of_the_one_before_and_a_sharded_model_is_uploaded_whole(tmp_path):
    with LoopbackHub(TOKEN) as hub:
        output = run_words([str(PROGRAM), str(tmp_path), "--push"], hub, tmp_path)
        statuses = json.loads((tmp_path / "statuses.json").read_text())
        assert [statuses.pop("upload"), statuses.pop("creation")] == [[1, 1], [2, 2]], output[-6000:]
        assert output.count("pretrain: error: Client error '401") == 2 and "Traceback" not in output
        assert set(statuses) == {path.stem for path in RECIPES.glob("*.yaml")}
        assert all(both == [0, 0] for both in statuses.values())
        whole = results(tmp_path / "ddp")
        for name in CHAIN:
            assert results(tmp_path / name) == pytest.approx(whole, rel=1e-6), name
        assert results(tmp_path / "fsdp2-bfloat16") == pytest.approx(whole, rel=1e-2)
        assert output.count(": sample after") >= 8 and output.count("--- sample after") == len(statuses)

        repository = hub.repositories["tester/memora-sharded"]
        files = hub.files("tester/memora-sharded")
        assert files.keys() >= UPLOADED
        assert {title for title in repository.titles if "step" in title} >= {"Training in progress, step 1"}
        assert "End of training" in repository.titles
        weights = load(files["model.safetensors"].content)
        assert sum(weight.numel() for weight in weights.values()) == 11_360
        saved = load_file(tmp_path / "fsdp2-bfloat16" / "model.safetensors")
        assert all(torch.equal(weights[name], weight) for name, weight in saved.items())

        model = AutoModelForCausalLM.from_pretrained(tmp_path / "fsdp2-bfloat16").eval()
        probe = torch.tensor([list(b"Note 3.\nMore of")])
        with torch.no_grad():
            expected = {"probe": probe, "logits": model(probe, use_cache=True).logits}
        save_file(expected, tmp_path / "memora-sharded.safetensors")
        run_program("load_program.py", hub, tmp_path, "memora-sharded", token=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_each_is_launched_by_accelerate(tmp_path, name):
    write_notes(tmp_path)
    command = ["-m", "accelerate.commands.launch", "--config_file", str(RECIPES / f"{name}.yaml")]
    command += ["--num_processes", "2", str(ROOT / "scripts" / "pretrain.py"), *TINY]
    with LoopbackHub(TOKEN) as hub:
        run_words([*command, "--output_dir", "run"], hub, tmp_path)
        last = tmp_path / "run" / f"checkpoint-{STEPS}"
        whole, _ = results(tmp_path / "run"), shutil.rmtree(last)
        run_words([*command, "--output_dir", "run", "--resume_from_checkpoint", "true"], hub, tmp_path)
    assert results(tmp_path / "run") == whole and last.is_dir()
