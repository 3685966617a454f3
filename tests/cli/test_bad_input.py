"""Bad input ends every command with one sentence that names the argument, before anything is read or trained."""

import argparse
import itertools

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_recurrent import ByteTokenizer, config_from_preset
from hf_recurrent.cli import evaluate, generate, learn, pretrain, pretrain_arguments, reproduce

# Command → main, the parsers of all of its forms, and arguments that are otherwise good.
COMMANDS = {
    "generate": (generate.main, [generate.build_parser()], ["absent/model", "--prompt", "a"]),
    "evaluate": (evaluate.main, [evaluate.build_parser()], ["absent/model"]),
    "learn": (learn.main, [learn.build_parser()], ["absent/model", "--source", "absent"]),
    "reproduce": (reproduce.main, [reproduce.build_parser()], ["parity"]),
    "pretrain": (
        pretrain.main,
        [pretrain_arguments.build_parser(method) for method in ("bptt", "rtrl", "smt", "dmt")],
        ["--use_cpu", "--corpus", "absent"],
    ),
}


NUMBERS = ("inf", "-inf", "nan", "1e999", "9" * 30, "9" * 400, "many", "")


def numeric_flags():
    """Flags with their numbers: all, or two for a flag that another form of the command has with the same type."""
    seen, turns = set(), itertools.count()
    for command, (_, parsers, _) in COMMANDS.items():
        for parser in parsers:
            chosen = parser.get_default("method") if command == "pretrain" else None
            for action in parser._actions:
                if not action.option_strings or action.type in (None, str) or not is_numeric(action):
                    continue
                key = command, action.dest, action.type
                turn = next(turns) % len(NUMBERS)
                numbers = (NUMBERS[turn], NUMBERS[turn - 3]) if key in seen else NUMBERS
                seen.add(key)
                name = f"{chosen or command}{action.dest}"
                yield pytest.param(command, chosen, action.option_strings[0], numbers, id=name)


def is_numeric(action: argparse.Action) -> bool:
    try:
        return not isinstance(action.type("1"), bool | str) and action.type("1") == 1
    except (TypeError, ValueError):
        return False


def fail(capsys, command: str, *arguments: str) -> str:
    """The one line with which a command refuses its arguments."""
    with pytest.raises(SystemExit) as stop:
        COMMANDS[command][0](list(arguments))
    error = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and "Traceback" not in error and len(error) == 1, "\n".join(error)
    return error[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("command", "method", "flag", "numbers"), numeric_flags())
def test_numbers_are_finite(command, method, flag, numbers, capsys):
    for number in numbers:
        begin = [*COMMANDS[command][2], *(["--method", method] if method else [])]
        error = fail(capsys, command, *begin, f"{flag}={number}")
        assert flag.strip("-") in error, f"{flag} {number}: {error}"


@pytest.mark.parametrize("command", ["generate", "learn", "reproduce", "pretrain"])
@pytest.mark.parametrize("seed", ["-1", "4294967296"])
def test_seeds(command, seed, capsys):
    flag = "--seeds" if command == "reproduce" else "--seed"
    error = fail(capsys, command, *COMMANDS[command][2], f"{flag}={seed}")
    assert f"`{flag}` is {seed}; it must be from 0 to 4294967295." in error


@pytest.mark.parametrize("temperature", ["1e-45", "0", "-1", "1e-7"])
def test_temperatures_that_would_make_probabilities_nan(temperature, capsys):
    error = fail(capsys, "generate", "absent/model", "--prompt", "a", f"--temperature={temperature}")
    assert f"`--temperature` is {float(temperature)}; it must be at least 1e-06. For 0, use --greedy." in error


VALUES = [
    ("!!python/object/apply:os.system [true]", "is not valid YAML"),
    ("!foo", "is not valid YAML"),
    ("!!int ''", "is not valid YAML"),
    ("!!timestamp x", "is not valid YAML"),
    ("2020-13-45", "is not valid YAML"),
    ("[", "is not valid YAML"),
    ("[" * 5000, "is not valid YAML"),
    ("2020-01-01", "it must be an integer of at least 1"),
    ("!!binary aGk=", "it must be an integer of at least 1"),
    ("[[[[[1]]]]]", "it must be an integer of at least 1"),
    (".inf", "it must be a finite number"),
    ("NaN", "it must be a finite number"),
    ("1e999", "it must be a finite number"),
    ("-1", "it must be an integer of at least 1"),
    ("0", "it must be an integer of at least 1"),
    ("1e9", "it must be an integer of at least 1"),
    ("abc", "it must be an integer of at least 1"),
    ("''", "it must be an integer of at least 1"),
    ("null", "it must be an integer of at least 1"),
    ("[8]", "it must be an integer of at least 1"),
    ("true", "it must be an integer of at least 1"),
    ("1000000000000", "it must be"),
    ("500000000", "there is not enough memory"),
]


@pytest.mark.parametrize(("value", "words"), VALUES)
@pytest.mark.parametrize("flag", ["--config_overrides", "--teacher_overrides"])
def test_values_of_overrides(value, words, flag, capsys):
    begin = ["--use_cpu", "--corpus", "absent"]
    if flag == "--teacher_overrides":
        begin += ["--method", "smt", "--corpus", "task:retrieval", "--config_overrides", "hidden_size=16"]
    error = fail(capsys, "pretrain", *begin, flag, f"hidden_size={value}")
    assert words in error and "hidden_size" in error


@pytest.mark.parametrize(
    ("model", "override", "words"),
    [
        ("memora-tiny", "num_hidden_layers=1000000000", "`num_hidden_layers` is 1000000000"),
        ("memora-tiny", "norm_eps=-1", "`norm_eps` is -1"),
        ("memora-tiny", "norm_eps=abc", "`norm_eps` is 'abc'"),
        ("memora-tiny", "tie_word_embeddings=maybe", "`tie_word_embeddings` is 'maybe'"),
        ("memora-tiny", "use_cache=2", "`use_cache` is 2"),
        ("memora-tiny", "recurrent_unit=[glru]", "`recurrent_unit` is ['glru']"),
        ("memora-tiny", "recurrent_unit=no", "recurrent_unit"),
        ("memora-tiny", "pad_token_id=256", "`pad_token_id` is 256"),
        ("memora-tiny", "eos_token_id=-1", "`eos_token_id` is -1"),
        ("memora-tiny", "allow_negative_eigenvalues=1.5", "`allow_negative_eigenvalues` is 1.5"),
        ("memora-tiny", "to_dict=1", "has no field 'to_dict'"),
        ("memora-tiny", "auto_map={AutoModelForCausalLM: x.Y}", "has no field 'auto_map'"),
        ("memora-tiny", "dtype=nothing", "dtype"),
        ("memora-tiny", "id2label=5", "id2label"),
        ("hawk-tiny", "conv_kernel=3000000000", "`conv_kernel` is 3000000000"),
        ("mgrade-tiny", "hidden_act=abc", "hidden_act"),
        ("mgrade-tiny", "conv_kernel=1000000000", "`conv_kernel` is 1000000000"),
        ("mgrade-tiny", "interpolation_width=wide", "`interpolation_width` is 'wide'"),
        ("lru-tiny", "r_min=abc", "`r_min` is 'abc'"),
        ("lru-tiny", "dropout=[0.1]", "`dropout` is [0.1]"),
        ("llama-s0", "hidden_size=-1", "hidden_size=-1"),
        ("llama-s0", "hidden_size=abc", "hidden_size"),
        ("llama-s0", "num_attention_heads=0", "num_attention_heads=0"),
        ("llama-s0", "num_attention_heads=3", "multiple of the number of attention heads"),
    ],
)
def test_overrides_that_a_configuration_or_a_model_rejects(model, override, words, capsys):
    begin = ["--use_cpu", "--corpus", "absent", "--model", model]
    assert words in fail(capsys, "pretrain", *begin, "--config_overrides", override)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning_rate: !!python/object/apply:os.system [echo]", "is not valid YAML"),
        ("learning_rate: !foo 1", "is not valid YAML"),
        ("a: [", "is not valid YAML"),
        ("[" * 5000, "is not valid YAML"),
        ("- 1", "is a list; it must map arguments to values"),
        ("1: 2", "it must map arguments to values"),
        ("? [a]\n: b", "is not valid YAML"),
        ("text_column: 2020-01-01", "`text_column` in the recipe"),
        ("block_size: [1, 2]", "`block_size` in the recipe 'mine.yaml' is a list; it must be a single value."),
        ("block_size: {a: 1}", "`block_size` in the recipe 'mine.yaml' is a dict; it must be a single value."),
        ("block_size: null", "`block_size` in the recipe 'mine.yaml' is null; it must be a single value."),
        ("block_size: 1.5", "invalid int value: '1.5'"),
        ("block_size: text", "invalid int value: 'text'"),
        ("learning_rate: .inf", "`--learning_rate` is inf"),
        ("learning_rate: .nan", "`--learning_rate` is nan"),
        ("learning_rate: true", "invalid float value: 'True'"),
        ("regime: backwards", "invalid choice: 'backwards'"),
        ("log_level: loud", "invalid choice: 'loud'"),
        ("bf16: perhaps", "got perhaps"),
        ("model: [a, b]", "`model` in the recipe 'mine.yaml' is a list"),
        ("model: 5", "`--model` is '5'"),
        ("method: [1]", "`--method` is [1]"),
        ("accelerator_config: {no_such_key: 1}", "no_such_key"),
        ("corpus: absent", "absent"),
        (b"\xff\xfe\x00", "is not valid YAML"),
        ("\x00", "is not valid YAML"),
    ],
)
def test_recipes(text, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert words in fail(capsys, "pretrain", "--use_cpu", "--recipe", "mine.yaml")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "state_size": 16, "num_hidden_layers": 1}
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config_from_preset("hawk-tiny", **sizes)).save_pretrained(path)
    ByteTokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def state(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("states") / "good.safetensors"
    generate.main([model, "--prompt", "abc", "--max_new_tokens", "0", "--save_state", str(path)])
    return path


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_state_with_nan_is_damaged(model, state, value, tmp_path, capsys):
    tensors = load_file(state)
    with safe_open(state, framework="pt") as file:
        metadata = file.metadata()
    for name in tensors:
        damaged = {key: tensor.clone() for key, tensor in tensors.items()}
        damaged[name].view(-1)[-1] = value
        path = str(tmp_path / "damaged.safetensors")
        save_file(damaged, path, metadata=metadata)
        error = fail(capsys, "generate", model, "--state", path)
        assert f"`{path}` is damaged: `state[{name!r}]` has NaN or infinite values." in error
    assert len(tensors) > 1


def test_a_state_of_integers_is_damaged(model, state, tmp_path, capsys):
    with safe_open(state, framework="pt") as file:
        metadata = file.metadata()
    path = str(tmp_path / "damaged.safetensors")
    save_file({name: tensor.long() for name, tensor in load_file(state).items()}, path, metadata=metadata)
    assert "is damaged: `state[" in fail(capsys, "generate", model, "--state", path)


def test_tokens_outside_the_vocabulary(tmp_path, capsys):
    for preset, sizes in (("hawk-tiny", {}), ("llama-s0", {"num_attention_heads": 2})):
        config = config_from_preset(preset, vocab_size=6, hidden_size=16, num_hidden_layers=1, **sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / preset)
        ByteTokenizer(eos_token=None).save_pretrained(tmp_path / preset)
        for text in ("a", "\x01a", "a\x01"):
            assert "has the token 97" in fail(capsys, "generate", str(tmp_path / preset), "--prompt", text)


@pytest.mark.parametrize("every", ["0", "1"])
@pytest.mark.parametrize("prompt", ["", "\ud800"])
def test_prompts_of_samples_are_checked_before_training(prompt, every, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hf_recurrent.cli.pretrain.load_training_sources", None)  # comes after
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f'sample_prompts: ["fine", "{prompt.encode("unicode_escape").decode()}"]\n')
    arguments = ["--use_cpu", "--recipe", "mine.yaml", "--max_steps", "1", "--sample_every", every]
    error = fail(capsys, "pretrain", *arguments)
    assert f"`sample_prompts` has {prompt!r}" in error


@pytest.mark.parametrize("flag", ["--lr_scheduler_kwargs", "--gradient_checkpointing_kwargs"])
def test_arguments_that_are_mappings(flag, capsys):
    for value in ("text", "[1]"):
        assert f"`{flag}` is {value!r}; it must be a mapping." in fail(
            capsys, "pretrain", *COMMANDS["pretrain"][2], flag, value
        )


@pytest.mark.parametrize(("command", "flag"), [("generate", "--save_state"), ("pretrain", "--output_dir")])
def test_two_dashes_are_not_a_value(command, flag, capsys):
    error = fail(capsys, command, *COMMANDS[command][2], f"{flag}=--")
    assert f"argument {flag}: expected a value, not '--'" in error


@pytest.mark.parametrize(
    ("command", "flag"),
    [("learn", "--threads"), ("reproduce", "--processes"), ("pretrain", "--dataloader_num_workers")],
)
def test_more_workers_than_a_machine_can_start(command, flag, capsys):
    error = fail(capsys, command, *COMMANDS[command][2], flag, "4097")
    assert f"`{flag}` is 4097; it must be at most 4096." in error


def test_long_arguments_do_not_fill_the_screen(capsys):
    error = fail(capsys, "generate", "absent/model", "--prompt", "a", "--top_k", "x" * 100_000)
    assert "--top_k" in error and len(error) < 2000
