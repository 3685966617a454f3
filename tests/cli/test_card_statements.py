"""Every statement of a card is compared with what really acted: steps of optimizers, bytes of batches, evaluations."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, metadata_load
from huggingface_hub.repocard_data import model_index_to_eval_results
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, Trainer

from hf_recurrent import ByteTokenizer, MultiStreamTrainer, MultiStreamTrainingArguments, load_corpus, load_splits
from hf_recurrent.checkpoints.fingerprints import base_weights_fingerprint, weights_fingerprint
from hf_recurrent.checkpoints.provenance_files import read_provenance
from hf_recurrent.cli.learn import main as learn
from hf_recurrent.cli.pretrain import main as pretrain
from hf_recurrent.cli.push_to_hub import main as push_to_hub
from hf_recurrent.evaluation.bits_per_byte import evaluate_bits_per_byte
from hf_recurrent.learning_rules.block_learning import CompiledUpdate

RUN = [
    "--use_cpu", "--disable_tqdm", "true", "--report_to", "none", "--sample_every", "0", "--sample_bytes", "4",
    "--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "2", "--logging_steps", "1",
    "--save_steps", "3", "--save_total_limit", "9", "--accounts", "false",
]  # fmt: skip
BPTT = [*RUN, "--block_size", "16", "--max_steps", "6"]
TINY = ["--config_overrides", "hidden_size=16", "state_size=16", "num_hidden_layers=1"]
SMT = [
    *RUN, "--method", "smt", "--max_steps", "4", "--context_length", "6", "--eval_windows", "2",
    "--future_length", "3", "--dmt_rollout_length", "5",
    "--config_overrides", "hidden_size=16", "num_memory_tokens=2", "num_attention_heads=2",
]  # fmt: skip


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    for name in ("HF_HOME", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for folder, line in (
        ("notes", "All work and no play makes Jack a dull boy.\n"),
        ("poems", "O rose, thou art sick.\n"),
    ):
        Path(folder).mkdir()
        for number in range(8):
            Path(folder, f"{number}.txt").write_text(line * (number + 1))


@pytest.fixture
def acted(monkeypatch):
    """The learning rate of every step, and the tokens of all batches, since the last `clear`."""
    seen = SimpleNamespace(rates=[], decays=[], tokens=0)

    def look(optimizer, *_):
        largest = max(optimizer.param_groups, key=lambda group: sum(weight.numel() for weight in group["params"]))
        seen.rates.append(largest["lr"])
        seen.decays.append(largest.get("weight_decay"))

    step = Trainer.training_step

    def count(self, model, inputs, *arguments):
        seen.tokens += inputs["input_ids"].numel()
        return step(self, model, inputs, *arguments)

    update, run = CompiledUpdate.step, CompiledUpdate.run

    def look_and_update(self, scale):
        look(self.optimizer)
        update(self, scale)

    def look_and_run(self, *arguments, **how):
        end = run(self, *arguments, **how)
        for _ in range(end.done):
            look(self.optimizer)
        return end

    monkeypatch.setattr(Trainer, "training_step", count)
    monkeypatch.setattr(CompiledUpdate, "step", look_and_update)  # of a learner, without the optimizer's own step
    monkeypatch.setattr(CompiledUpdate, "run", look_and_run)
    hook = register_optimizer_step_pre_hook(look)
    yield seen
    hook.remove()


def rows(card: str, label: str) -> list[list[str]]:
    """The cells after `label` of every table of a card that has such a row."""
    return [
        [cell.strip() for cell in line.strip("|\n ").split("|")[1:]]
        for line in card.splitlines()
        if line.startswith(f"| {label} |")
    ]


def rate_words(rates: list[float]) -> str:
    first, last, most = rates[0], rates[-1], max(rates)
    if min(rates) == most:
        return f"{first:.4g}"
    words = f"{first:.3g} at first, {last:.3g} at last"
    return words if most in (first, last) else f"{words}, {most:.3g} at most"


def card_of(directory: str) -> str:
    return Path(directory, "README.md").read_text(encoding="utf-8")


def measured(directory: str, corpus: str = "notes") -> float:
    """Bits per byte of the saved weights on the held-out documents."""
    held_out = load_splits(corpus, tokenizer=ByteTokenizer())[1]
    return evaluate_bits_per_byte(AutoModelForCausalLM.from_pretrained(directory), held_out, progress=False)[
        "bits_per_byte"
    ]


def metric(directory: str, name: str = "bits_per_byte") -> float:
    """The metric on the card, by the Hub's own readers, which have to agree."""
    path = Path(directory, "README.md")
    loaded = ModelCard.load(path, ignore_metadata_errors=False).data.eval_results
    _, results = model_index_to_eval_results(metadata_load(path)["model-index"])
    assert [vars(result) for result in loaded] == [vars(result) for result in results]
    (value,) = [result.metric_value for result in results if result.metric_type == name]
    return value


def refused(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as stop:
        pretrain(list(map(str, arguments)))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_bptt(acted):
    pretrain(["--corpus", "notes", *BPTT, *TINY, "--output_dir", "run", "--learning_rate", "3e-3"])
    card, model = card_of("run"), AutoModelForCausalLM.from_pretrained("run")
    assert rows(card, "Updates") == [["6"]] and len(acted.rates) == 6
    assert rows(card, "Learning rate") == [[rate_words(acted.rates)]] and max(acted.rates) == 3e-3
    assert rows(card, "Bytes read")[0][0].startswith(f"{acted.tokens} (") and acted.tokens == 6 * 4 * 16
    assert rows(card, "Trained parameters") == [[f"{model.num_parameters():,}"]]
    assert rows(card, "Weight decay")[0][0].startswith(f"{acted.decays[0]:g} (") and acted.decays[0] > 0
    assert rows(card, "Gradient clipping") == [["norm 1"]]
    train, held_out = load_splits("notes", tokenizer=ByteTokenizer())
    (data,) = rows(card, "Data")[0]
    assert (
        f"`notes`, {len(train)} documents, {train.num_bytes:,} bytes, fingerprint `{train.fingerprint[:16]}`" == data
    )
    assert metric("run") == pytest.approx(measured("run"), abs=1e-4)
    assert f"({held_out.num_bytes} bytes in 1 episode)" in card and "It began with new weights." in card
    data = ModelCard.load("run/README.md").data
    assert (data.base_model, data.datasets, data.license) == (None, None, "apache-2.0")
    for part in ("Sequence Learning from Continuous Streams", "training_curve.png"):
        assert part in card
    assert Path("run/training_curve.png").stat().st_size > 1000
    prompt = json.loads(re.search(r"prompt = tokenizer\((.*), return_tensors", card)[1])
    assert bytes(held_out[0]).decode().startswith(prompt) and f"\n{prompt}" in card.split("```text")[1]


def test_files_of_provenance_are_listed_and_public(capsys):
    pretrain(["--corpus", str(Path("notes").resolve()), *BPTT, *TINY, "--output_dir", "run"])
    manifest = json.loads(Path("run/checkpoint-3/manifest.json").read_text())
    assert len(manifest["files"]["provenance.json"]["sha256"]) == 64
    for path in ("run/provenance.json", "run/checkpoint-3/provenance.json", "run/README.md"):
        text = Path(path).read_text()
        assert str(Path.cwd()) not in text and str(Path.home()) not in text, path
    capsys.readouterr()
    push_to_hub(["run", "me/notes", "--dry_run"])
    shown = capsys.readouterr().out
    assert "provenance.json" in shown and "training_curve.png" in shown and "me/notes" in shown
    damaged = Path("run/checkpoint-6/provenance.json")
    damaged.write_text(damaged.read_text().replace('"bptt"', '"bptx"'))
    error = refused(
        capsys, "--corpus", "notes", *BPTT, *TINY, "--output_dir", "run", "--resume_from_checkpoint", "true"
    )
    assert "`provenance.json` differs from its checksum" in error


@pytest.mark.long
def test_smt_then_dmt(acted):
    pretrain(["--corpus", "notes", *SMT, "--output_dir", "run", "--dmt_steps", "3", "--dmt_learning_rate", "2e-3"])
    card = card_of("run")
    assert rows(card, "Updates") == [["4"], ["3"]]
    assert rows(card, "Learning rate") == [[rate_words(acted.rates[:4])], [rate_words(acted.rates[4:])]]
    assert "DAgger Memory Training (DMT)" in card and acted.tokens == 4 * 4 * 9 + 3 * 4 * 11
    first, second = (int(cells[0].split()[0]) for cells in rows(card, "Bytes read"))
    assert (first, second) == (4 * 4 * 9, 3 * 4 * 11)
    assert metric("run") == pytest.approx(measured("run"), abs=1e-4)
    # Results before DMT belong to other weights, namely the weights of the last checkpoint of SMT.
    before = measured("run/checkpoint-4")
    (earlier,) = [line for line in card.splitlines() if line.startswith("| phase 1, update 4 | Bits per byte")]
    assert float(earlier.split("|")[3]) == pytest.approx(before, abs=1e-4) and abs(before - metric("run")) > 2e-4
    assert "Pretraining Recurrent Networks without Recurrence" in card

    # The same command again trains nothing and says the same.
    del acted.rates[:]
    arguments = ["--dmt_steps", "3", "--dmt_learning_rate", "2e-3", "--resume_from_checkpoint", "true"]
    pretrain(["--corpus", "notes", *SMT, "--output_dir", "run", *arguments])
    assert not acted.rates and rows(card_of("run"), "Updates") == [["4"], ["3"]]
    assert metric("run") == pytest.approx(measured("run"), abs=1e-4)

    # DMT in a run of its own, from the saved model and its teacher.
    options = [*SMT[: SMT.index("--future_length")], "--rollout_length", "5"]
    options[options.index("smt")] = "dmt"
    pretrain(["--corpus", "poems", *options, "--model", "run", "--output_dir", "more"])
    phases = read_provenance("more").phases
    assert [phase.method for phase in phases] == ["smt", "dmt", "dmt"] and phases[2].base.name == "run"
    assert phases[2].teacher is not None and phases[2].teacher.phases == []  # it is the first phase's
    assert read_provenance("more").gaps == []


def test_continued_from_a_saved_model(acted):
    pretrain(["--corpus", "notes", *BPTT, *TINY, "--output_dir", "first"])
    rates = [acted.rates.copy()]
    acted.rates.clear()
    fingerprint = weights_fingerprint(AutoModelForCausalLM.from_pretrained("first"))
    pretrain(["--corpus", "poems", *BPTT, "--model", "first", "--output_dir", "second", "--learning_rate", "1e-3"])
    rates.append(acted.rates.copy())
    card = card_of("second")
    assert rows(card, "Learning rate") == [[rate_words(part)] for part in rates] and rates[0] != rates[1]
    assert [cells[0].split(",")[0] for cells in rows(card, "Data")] == ["`notes`", "`poems`"]
    assert f"It began with the weights of `first` (weights `{fingerprint[:16]}`)." in card
    assert metric("second") == pytest.approx(measured("second", "poems"), abs=1e-4)

    # Weights that were changed by something else are not described as the run's.
    model = AutoModelForCausalLM.from_pretrained("second")
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    model.save_pretrained("second")
    pretrain(["--corpus", "notes", *BPTT, "--model", "second", "--output_dir", "third"])
    assert "The weights were changed by something that was not recorded." in card_of("third")


def test_changed_arguments_act_from_the_resumed_step_on(acted, caplog):
    run = ["--corpus", "notes", *BPTT, *TINY]
    pretrain([*run, "--output_dir", "a", "--learning_rate", "1e-3"])
    before = acted.rates[:3]
    acted.rates.clear(), acted.decays.clear()
    changes = ["--learning_rate", "4e-3", "--weight_decay", "0.3", "--max_grad_norm", "0.5", "--save_steps", "2"]
    changes += ["--prediction_loss_only", "true", "--resume_from_checkpoint", "a/checkpoint-3", "--output_dir", "b"]
    pretrain([*run, *changes])
    # The rates equal a whole run's with the new arguments.
    expected = acted.rates.copy()
    acted.rates.clear()
    pretrain([*run, "--output_dir", "c", "--learning_rate", "4e-3"])
    assert expected == acted.rates[3:] and acted.decays[:3] == [0.3] * 3
    card = card_of("b")
    assert rows(card, "Learning rate") == [[rate_words(before), rate_words(expected)]]
    decays = rows(card, "Weight decay")[0]
    assert decays[0].startswith("0.1 (") and decays[1].startswith("0.3 (")
    assert rows(card, "Gradient clipping") == [["norm 1", "norm 0.5"]] and rows(card, "Updates") == [["6"]]
    assert "| | updates 1 to 3 | updates 4 to 6 |" in card
    assert sorted(path.name for path in Path("b").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    assert metric("b") == pytest.approx(measured("b"), abs=1e-4)
    recipe = Path("b/_recipe.yaml").read_text()
    assert "# Since step 3: learning_rate was 0.001 before.\n" in recipe
    assert yaml.safe_load(recipe)["learning_rate"] == 4e-3
    assert "continues with `learning_rate` 0.004 (before: 0.001), `max_grad_norm` 0.5 (before: 1.0)" in caplog.text
    assert "Without effect on a resumed run: `prediction_loss_only`." in caplog.text
    assert "do not match" not in caplog.text  # of `Trainer`


@pytest.mark.long
def test_a_finished_run_is_not_made_longer_in_silence(acted, capsys):
    run = ["--corpus", "notes", *BPTT, *TINY, "--output_dir", "run"]
    pretrain(run)
    card, acted.rates[:] = card_of("run"), []
    again = [*run, "--resume_from_checkpoint", "true"]
    for change in (["--max_steps", 9], ["--max_steps", -1, "--train_bytes", "2000"]):
        error = refused(capsys, *again, *change)
        assert "has ended after 6" in error and "--model run" in error and change[-2].strip("-") in error
    assert "is at step 6" in refused(capsys, *again, "--max_steps", 5)
    assert "`--optim` is 'sgd'" in refused(capsys, *again, "--optim", "sgd")
    assert "`--block_size`" in refused(capsys, *again, "--block_size", 8)
    error = refused(capsys, *again, "--config_overrides", *TINY[1:], "norm_eps=0.001")
    assert "`norm_eps` of the model is 0.001, but 1e-06 in the checkpoint" in error
    assert card_of("run") == card and not acted.rates
    # Another learning rate has no step left to act in, and the card keeps that which acted.
    pretrain([*again, "--learning_rate", "5e-2"])
    assert not acted.rates and rows(card_of("run"), "Learning rate") == rows(card, "Learning rate")
    assert yaml.safe_load(Path("run/_recipe.yaml").read_text())["learning_rate"] == 8e-3  # of the default recipe

    # With a schedule that has no end, the longer run equals the run of the larger number of steps.
    constant = [*run[:-1], "long", "--lr_scheduler_type", "constant"]
    pretrain(constant)
    pretrain([*constant, "--resume_from_checkpoint", "true", "--max_steps", "8"])
    pretrain([*constant, "--output_dir", "whole", "--max_steps", "8"])
    long, whole = (AutoModelForCausalLM.from_pretrained(name) for name in ("long", "whole"))
    assert all(torch.equal(a, b) for a, b in zip(long.parameters(), whole.parameters(), strict=True))
    assert rows(card_of("long"), "Updates") == [["8"]]


def test_learner(acted, capsys):
    pretrain(["--corpus", "poems", *BPTT, *TINY, "--output_dir", "base"])
    acted.rates.clear()
    Path("secret").mkdir()
    stream = b"All work and no play makes Jack a dull boy. " * 9
    log = Path("secret/server.log")
    log.write_bytes(stream)
    command = ["base", "--source", str(log), "--output_dir", "out", "--learning_rate", "2e-4", "--stride", "4"]
    command += ["--held_out", "notes", "--quiet", "--report_every", "100"]
    learn(command)
    steps = len(acted.rates)
    with log.open("ab") as file:
        file.write(b"More work.\n")
    learn([*command, "--resume"])
    card = card_of("out")
    assert rows(card, "Updates")[1] == [f"{len(acted.rates)}"] and len(acted.rates) > steps > 90
    assert set(acted.rates) == {2e-4} and rows(card, "Learning rate")[1] == ["0.0002"]
    assert rows(card, "Bytes read")[1] == [f"{len(log.read_bytes())}"]
    assert "`server.log`" in rows(card, "Data")[1][0] and "secret" not in card
    assert rows(card, "Resumed")[-1] == ["1 time"] and "of `base` (weights" in card
    # Held-out data were measured before the first byte too, with the weights of the run before.
    assert card.count("| phase 1, update 6 |") == 2 and "update 0 |" not in card
    held_out = load_corpus("notes", tokenizer=ByteTokenizer())
    bits = evaluate_bits_per_byte(AutoModelForCausalLM.from_pretrained("out"), held_out, progress=False)
    assert metric("out") == pytest.approx(bits["bits_per_byte"], abs=1e-4)
    last = json.loads(Path("out/records.jsonl").read_text().splitlines()[-1])
    assert metric("out", "prequential_bits_per_byte") == pytest.approx(last["bits_per_byte"], abs=1e-4)
    capsys.readouterr()
    push_to_hub(["out", "me/learner", "--dry_run"])
    assert "real-time recurrent learning (RTRL)" in capsys.readouterr().out


def test_lora(acted, capsys):
    peft = pytest.importorskip("peft")
    pretrain(["--corpus", "poems", *BPTT, *TINY, "--output_dir", "base"])
    acted.rates.clear()
    base = AutoModelForCausalLM.from_pretrained("base")
    fingerprint = weights_fingerprint(base)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear"))
    train, held_out = load_splits("notes", tokenizer=ByteTokenizer())
    options = {"use_cpu": True, "report_to": "none", "block_size": 16, "max_steps": 3, "disable_tqdm": True}
    args = MultiStreamTrainingArguments("adapter", learning_rate=1e-2, per_device_train_batch_size=4, **options)
    trainer = MultiStreamTrainer(model, args, train, held_out, processing_class=ByteTokenizer())
    trainer.train()
    found = trainer.evaluate()["eval_bits_per_byte"]
    trainer.save_model()
    trainer.create_model_card()
    card, data = card_of("adapter"), ModelCard.load("adapter/README.md").data
    assert rows(card, "Learning rate")[1] == [rate_words(acted.rates)] and len(acted.rates) == 3
    count = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert rows(card, "Trained parameters")[1] == [f"{count:,}"] and "LORA: r 2" in card
    assert f"of `base` (weights `{fingerprint[:16]}`)" in card and "LoRA: Low-Rank Adaptation" in card
    assert data.library_name == "peft" and metric("adapter") == pytest.approx(found, abs=1e-4)
    assert base_weights_fingerprint(model) == fingerprint  # training has left the base as it was

    # Loaded again, the adapter is known by its own weights.
    capsys.readouterr()
    push_to_hub(["adapter", "me/adapter", "--dry_run", "--base_model", "me/base", "--license", "mit"])
    shown = capsys.readouterr().out
    assert "base_model: me/base" in shown and "base_model_relation: adapter" in shown and "license: mit" in shown
    assert "changed by something" not in shown and f"**{found:.4f}**" in shown
