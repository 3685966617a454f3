"""No command and no loader executes anything of a checkpoint: hostile files in every place leave no trace."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from hf_recurrent import ByteTokenizer, OnlineLearner, config_from_preset
from hf_recurrent.cli.evaluate import main as evaluate
from hf_recurrent.cli.generate import main as generate
from hf_recurrent.cli.learn import main as learn
from hf_recurrent.cli.pretrain import main as pretrain
from hf_recurrent.cli.push_to_hub import main as push_to_hub
from hf_recurrent.hub.loading import load_model, load_tokenizer

SIZES = {"hidden_size": 16, "state_size": 16, "num_hidden_layers": 1}
LLAMA = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TRAIN = ["--use_cpu", "--max_steps", "1", "--disable_tqdm", "true", "--block_size", "8", "--sample_bytes", "2"]
TRAIN += ["--per_device_train_batch_size", "2", "--corpus", "notes", "--report_to", "none", "--output_dir", "out"]
SMT = ["--use_cpu", "--max_steps", "1", "--disable_tqdm", "true", "--corpus", "notes", "--output_dir", "out"]
SMT += ["--context_length", "4", "--per_device_train_batch_size", "2", "--eval_windows", "0", "--sample_bytes", "2"]
WORDS = "only safetensors are read, because other files can run code"


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (Path(self.marker),)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    for number in range(4):
        (tmp_path / "notes" / f"{number}.txt").write_text("to be or not to be, that is the question. " * 9)
    answers = []
    monkeypatch.setattr("builtins.input", lambda *prompt: answers.append(prompt) or "y")
    yield
    assert not answers, "asked whether to run code"
    assert not marker().exists(), "executed"


def marker() -> Path:
    return Path("executed").absolute()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A Memora, a Llama, and an RNN with its teacher."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("saved")
    memory = {"hidden_size": 16, "num_memory_tokens": 2, "num_attention_heads": 2}
    AutoModelForCausalLM.from_config(config_from_preset("memora-tiny", **SIZES)).save_pretrained(root / "memora")
    AutoModelForCausalLM.from_config(config_from_preset("llama-s0", **LLAMA)).save_pretrained(root / "llama")
    AutoModelForCausalLM.from_config(config_from_preset("smt-rnn-tiny", **memory)).save_pretrained(root / "rnn")
    AutoModel.from_config(config_from_preset("smt-teacher-tiny", **memory)).save_pretrained(root / "rnn" / "teacher")
    for name in ("memora", "llama", "rnn"):
        ByteTokenizer().save_pretrained(root / name)
    return root


@pytest.fixture(params=["memora", "llama"])
def checkpoint(request, saved):
    shutil.copytree(saved / request.param, "model")
    return Path("model")


COMMANDS = {
    "generate": lambda name: generate([name, "--prompt", "a", "--max_new_tokens", "2", "--device", "cpu"]),
    "evaluate": lambda name: evaluate([name, "--corpus", "notes", "--quiet", "--no_compressors", "--block_size", "8"]),
    "learn": lambda name: learn([name, "--source", "notes/0.txt", "--quiet", "--no_learn", "--stride", "64"]),
    "push_to_hub": lambda name: push_to_hub([name, "me/model", "--dry_run"]),
    "pretrain": lambda name: pretrain([*TRAIN, "--model", name]),
}


def run(command: str, name: str, capsys) -> str | None:
    """The error of a command, or None."""
    capsys.readouterr()
    try:
        COMMANDS[command](name)
    except SystemExit as stop:
        assert stop.code == 2
        error = capsys.readouterr().err.strip()
        assert "Traceback" not in error
        return error.splitlines()[-1]
    return None


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def change_json(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def pickle_of(directory: Path, name: str, kind: str) -> None:
    """A pickle that acts, one within the format of torch, or one with the weights and nothing else."""
    content = {"benign": weights(directory), "archive": {"a": Hostile(marker())}, "raw": Hostile(marker())}[kind]
    if kind == "raw":
        (directory / name).write_bytes(pickle.dumps(content))
    else:
        torch.save(content, directory / name)


def only_a_pickle(directory, kind):
    pickle_of(directory, "pytorch_model.bin", kind)
    (directory / "model.safetensors").unlink()


def a_sharded_pickle(directory, kind):
    shard = "pytorch_model-00001-of-00001.bin"
    pickle_of(directory, shard, kind)
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights(directory), shard)}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()


def a_pickle_in_the_index_of_safetensors(directory, kind):
    a_sharded_pickle(directory, kind)
    (directory / "pytorch_model.bin.index.json").rename(directory / "model.safetensors.index.json")


def a_pickle_that_the_configuration_names(directory, kind):
    pickle_of(directory, "adapter_model.bin", kind)
    change_json(directory / "config.json", transformers_weights="adapter_model.bin")


def an_adapter_that_is_a_pickle(directory, kind):
    pickle_of(directory, "adapter_model.bin", kind)
    adapter = {"peft_type": "LORA", "r": 2, "target_modules": "all-linear", "base_model_name_or_path": str(directory)}
    (directory / "adapter_config.json").write_text(json.dumps(adapter))


def only_weights_of_other_libraries(directory, kind):
    pickle_of(directory, "tf_model.h5", kind)
    pickle_of(directory, "flax_model.msgpack", kind)
    (directory / "model.safetensors").unlink()


REFUSED = [
    only_a_pickle,
    a_sharded_pickle,
    a_pickle_in_the_index_of_safetensors,
    a_pickle_that_the_configuration_names,
    an_adapter_that_is_a_pickle,
    only_weights_of_other_libraries,
]


@pytest.mark.parametrize("kind", ["benign", "archive", "raw"])
@pytest.mark.parametrize("place", REFUSED)
def test_a_pickle_is_refused_by_every_command(checkpoint, place, kind, capsys):
    place(checkpoint, kind)
    for command in COMMANDS:
        error = run(command, "model", capsys)
        assert error and WORDS in error, f"{command}: {error}"
    with pytest.raises(ValueError, match=WORDS):
        load_model(AutoModelForCausalLM, "model", argument="name")


def pickles_beside_the_weights(directory):
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "a.pkl"):
        pickle_of(directory, name, "raw")


def code(text: str = "") -> str:
    return f"import pathlib\npathlib.Path({str(marker())!r}).touch()\n{text}"


def a_custom_generate(directory):
    folder = directory / "custom_generate"
    folder.mkdir()
    (folder / "generate.py").write_text(code("def generate(model, **arguments):\n    raise AssertionError\n"))
    (folder / "requirements.txt").write_text("torch\n")
    change_json(directory / "generation_config.json", custom_generate=str(directory))


def classes_of_its_own(directory):
    for name in ("configuration_memora", "modeling_memora", "tokenization_byte", "hostile"):
        (directory / f"{name}.py").write_text(code("class A: pass\n"))
    auto_map = {"AutoConfig": "hostile.A", "AutoModel": "hostile.A", "AutoModelForCausalLM": "hostile.A"}
    change_json(directory / "config.json", auto_map=auto_map)
    change_json(directory / "tokenizer_config.json", auto_map={"AutoTokenizer": ["hostile.A", None]})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", [pickles_beside_the_weights, a_custom_generate, classes_of_its_own])
def test_what_is_not_needed_is_not_executed(checkpoint, place, capsys):
    place(checkpoint)
    for command in COMMANDS:
        error = run(command, "model", capsys)
        if command == "learn" and error:
            assert "LlamaForCausalLM, which carries no state" in error
        elif place is classes_of_its_own and command == "push_to_hub":
            if "memora" in (checkpoint / "config.json").read_text():  # our classes take its place
                assert error is None
            else:  # the repository would ask for it
                assert "The checkpoint lacks `hostile.py`" in error
        else:
            assert error is None, f"{command}: {error}"


@pytest.mark.parametrize("place", ["config", "tokenizer"])
def test_code_that_would_be_needed_is_refused_without_a_question(checkpoint, place, capsys):
    classes_of_its_own(checkpoint)
    if place == "config":
        change_json(checkpoint / "config.json", model_type="unheard_of")
    else:
        change_json(checkpoint / "tokenizer_config.json", tokenizer_class="UnheardOf")
    for command in COMMANDS:
        error = run(command, "model", capsys)
        if place == "config":
            assert "it needs the code in its repository, which is run only with `trust_remote_code`" in error


@pytest.mark.parametrize("kind", ["benign", "archive", "raw"])
def test_a_teacher_and_an_adapter_without_a_model(saved, kind, capsys):
    shutil.copytree(saved / "rnn", "rnn")
    only_a_pickle(Path("rnn/teacher"), kind)
    for arguments in (
        ["--method", "dmt", "--model", "rnn"],
        ["--method", "dmt", "--model", "rnn", "--teacher", "rnn"],
    ):
        with pytest.raises(SystemExit):
            pretrain([*SMT, "--rollout_length", "4", *arguments])
        error = capsys.readouterr().err
        assert "`--teacher` is 'rnn/teacher'" in error and WORDS in error
    Path("adapter").mkdir()
    adapter = {"peft_type": "LORA", "r": 2, "target_modules": "all-linear", "base_model_name_or_path": "rnn/teacher"}
    Path("adapter/adapter_config.json").write_text(json.dumps(adapter))
    shutil.copy("rnn/teacher/pytorch_model.bin", "adapter/adapter_model.bin")
    assert WORDS in run("pretrain", "adapter", capsys)
    Path("adapter/adapter_model.bin").rename("adapter/adapter_model.safetensors")
    assert WORDS in run("pretrain", "adapter", capsys)  # now the base model
    change_json(Path("adapter/adapter_config.json"), base_model_name_or_path="rnn/teacher/pytorch_model.bin")
    assert "its base model is 'rnn/teacher/pytorch_model.bin'; it must be a directory" in run(
        "pretrain", "adapter", capsys
    )


def test_an_adapter_that_is_safe_loads_and_its_base_model_runs_no_code(saved, capsys):
    peft = pytest.importorskip("peft")
    shutil.copytree(saved / "memora", "base")
    model = peft.get_peft_model(
        load_model(AutoModelForCausalLM, "base", argument="name"), peft.LoraConfig(r=2, target_modules="all-linear")
    )
    model.save_pretrained("adapter")
    model = load_model(AutoModelForCausalLM, "adapter", argument="name")
    assert any("lora" in name for name, _ in model.named_parameters())
    classes_of_its_own(Path("base"))
    change_json(Path("base/config.json"), model_type="unheard_of")
    with pytest.raises(ValueError, match="it needs the code in its repository"):
        load_model(AutoModelForCausalLM, "adapter", argument="name", trust_remote_code=True)


def test_a_file_in_the_place_of_a_directory(saved, capsys):
    shutil.copytree(saved / "memora", "model")
    pickle_of(Path("model"), "config.bin", "raw")
    assert "it must be a directory, or owner/name on the Hub" in run("pretrain", "model/config.bin", capsys)
    with pytest.raises(ValueError, match="it must be a directory"):
        load_model(AutoModelForCausalLM, "model/config.bin", argument="name")


def test_a_tokenizer_of_its_own(saved, capsys):
    shutil.copytree(saved / "llama", "words")
    change_json(Path("words/tokenizer_config.json"), tokenizer_class="UnheardOf", auto_map={})
    with pytest.raises(SystemExit):
        pretrain([*TRAIN, "--tokenizer", "words"])
    assert "`--tokenizer` is 'words', which has a TokenizersBackend; it must have a byte" in capsys.readouterr().err
    classes_of_its_own(Path("words"))
    change_json(Path("words/config.json"), model_type="unheard_of")
    with pytest.raises(SystemExit):
        pretrain([*TRAIN, "--tokenizer", "words"])
    error = capsys.readouterr().err
    assert "`--tokenizer` is 'words'; its tokenizer cannot be loaded: it needs the code in its repository" in error
    with pytest.raises(ValueError, match="`name` is 'words'; its tokenizer cannot be loaded: it needs the code"):
        load_tokenizer("words", argument="name")


def test_a_learner(saved, capsys):
    learner = OnlineLearner(load_model(AutoModelForCausalLM, saved / "memora", argument="name"), ByteTokenizer())
    learner.save("learner")
    pickles_beside_the_weights(Path("learner"))
    OnlineLearner.load("learner")
    only_a_pickle(Path("learner"), "raw")
    with pytest.raises(ValueError, match=r"`model.safetensors` is missing"):
        OnlineLearner.load("learner")


def test_a_checkpoint_of_training(capsys):
    small = ["--config_overrides", *(f"{name}={value}" for name, value in SIZES.items())]
    pretrain([*TRAIN, *small, "--lr_scheduler_type", "constant"])
    for directory in (Path("out"), Path("out/checkpoint-1")):
        pickles_beside_the_weights(directory)
    longer = ["--lr_scheduler_type", "constant", "--max_steps", "2"]
    pretrain([*TRAIN, *small, *longer, "--resume_from_checkpoint", "true"])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("missing", "the weight `model.layers.0"),
        ("nan", "has NaN or infinite values"),
        ("shape", "cannot be loaded"),
        ("truncated", "cannot be loaded"),
    ],
)
def test_damaged_weights_are_refused(saved, damage, words, capsys):
    from safetensors.torch import save_file

    shutil.copytree(saved / "memora", "model")
    tensors = weights(Path("model"))
    name = next(name for name in tensors if name.startswith("model.layers.0") and tensors[name].ndim == 2)
    if damage == "missing":
        del tensors[name]
    elif damage == "nan":
        tensors[name][0, 0] = float("nan")
    elif damage == "shape":
        tensors[name] = tensors[name][:, :1].contiguous()
    save_file(tensors, "model/model.safetensors", metadata={"format": "pt"})
    if damage == "truncated":
        Path("model/model.safetensors").write_bytes(Path("model/model.safetensors").read_bytes()[:-9])
    for command in COMMANDS:
        error = run(command, "model", capsys)
        assert error and words in error, f"{command}: {error}"
