"""One name for one argument in every command: hyphens, other names, and errors that name the flag that was typed."""

import contextlib

import pytest

import hf_recurrent
from hf_recurrent.cli import evaluate, generate, learn, pretrain_arguments
from hf_recurrent.cli.main import COMMANDS, main
from hf_recurrent.learning_rules.rules import RULES
from hf_recurrent.online.settings import LearnerSettings


def fail(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("flags", [("--max-new-tokens", "--top-k"), ("--max_new_tokens", "--top_k")])
def test_hyphens_and_underscores(flags):
    words = ["m", "--prompt", "--a word", "--max-new tokens", f"{flags[0]}=3", flags[1], "2"]
    found = generate.build_parser().parse_args(words)
    assert (found.max_new_tokens, found.top_k) == (3, 2)
    assert found.prompt == ["--a word", "--max-new tokens"]


@pytest.mark.parametrize(
    ("parser", "other", "name", "value"),
    [
        (learn.build_parser(), "--rule", "method", "spatial"),
        (learn.build_parser(), "--optimizer", "optim", "rmsprop"),
        (pretrain_arguments.build_parser("rtrl"), "--rule", "method", "spatial"),
        (pretrain_arguments.build_parser(), "--optimizer", "optim", "rmsprop"),
        (pretrain_arguments.build_parser(), "--max-bytes", "max_eval_bytes", 5),
        (evaluate.build_parser(), "--max_bytes", "max_eval_bytes", 5),
        (evaluate.build_parser(), "--eval-block-size", "block_size", 5),
    ],
)
def test_other_names(parser, other, name, value):
    needed = {"hf-recurrent learn": ["m", "--source", "s"], "hf-recurrent evaluate": ["m"]}.get(parser.prog, [])
    for flag in (other, f"--{name}", f"--{name.replace('_', '-')}"):
        assert getattr(parser.parse_known_args([*needed, flag, str(value)])[0], name) == value


def test_the_choices_of_learn_are_those_of_the_learner():
    assert sorted(learn.METHODS) == sorted(RULES)
    for name in learn.OPTIMIZERS:
        LearnerSettings(optimizer=name)


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("", (1, 1)),
        ("--stride 4", (4, 1)),
        ("--block_size 8", (8, 1)),
        ("--block-size 8 --stride 2", (2, 4)),
        ("--block_size 8 --stride 4", (4, 2)),
    ],
)
def test_block_size_of_learn(words, steps):
    arguments = learn.build_parser().parse_args(["m", "--source", "s", *words.split()])
    assert learn.update_steps(arguments) == steps


@pytest.mark.parametrize(
    "words",
    ["--block_size 8 --stride 3", "--block_size 0"],
)
def test_block_sizes_that_learn_refuses(words, capsys):
    assert f"`{words.split()[0]}` is" in fail(capsys, "learn", "absent/model", "--source", "s", *words.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("generate m --prompt a --top-k many", "argument --top-k: invalid int value: 'many'"),
        ("generate m --prompt a --top-k -3", "`--top-k` is -3"),
        (
            "generate m --prompt a --max_new_token 3 --tempratur 3",
            "arguments: --tempratur; did you mean --temperature?",
        ),
        ("learn m --sorce s", "unrecognized arguments: --sorce; did you mean --source?"),
        ("evaluate m --max-bytes 0", "`--max-bytes` is 0.0; it must be a whole number"),
        ("pretrain --use_cpu --learning-rate fast", "argument --learning-rate: invalid float value: 'fast'"),
        ("pretrain --use_cpu --learning_rate fast", "argument --learning_rate: invalid float value: 'fast'"),
        ("pretrain --use_cpu --optimizer best", "--optimizer"),
        ("pretrain --use_cpu --block-size 0", "`--block-size` is 0; it must be 1 or more"),
        ("pretrain --use_cpu --max-step 3 --blok-size 0", "arguments: --blok-size; did you mean --block_size?"),
        ("push-to-hub --dry-ran", "unrecognized arguments: --dry-ran; did you mean --dry_run?"),
        ("generat m", "unknown command 'generat' (choose from pretrain, plan, "),
        ("push_to_hup m", "env); did you mean push-to-hub?"),
        ("--versoin", "unknown command '--versoin'"),
    ],
)
def test_errors_name_the_flag_that_was_typed(words, message, capsys):
    assert message in fail(capsys, *words.split())


def test_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"hf-recurrent {hf_recurrent.__version__}\n"


_WATCH = ("watch learn", "watch ignore", "watch evaluate")


@pytest.mark.parametrize("name", ["", *sorted(COMMANDS.keys() - {"transformers", "lm-eval", "reproduce"}), *_WATCH])
def test_help_fits_80_columns(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        main([*name.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    # argparse does not break the line of a flag with two spellings.
    assert len(lines) > 3 and not [line for line in lines if len(line) > 80 and not line.startswith("  --")]


@pytest.mark.parametrize("name", ["push-to-hub", "push_to_hub"])
def test_commands_have_hyphens(name, capsys):
    assert "push-to-hub" in COMMANDS and not any("_" in command for command in COMMANDS)
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0 and "hf-recurrent push-to-hub" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", ["generate {} --prompt a", "evaluate {}", "learn {} --source s", "pretrain --model {}"]
)
def test_a_mistyped_path_is_not_looked_up_on_the_hub(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "hawk").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", None)
    error = fail(capsys, *command.format("runs/hwak").split())
    assert "is 'runs/hwak'; directory not found; did you mean runs/hawk?" in error


def test_a_hub_that_does_not_answer_is_asked_once(capsys, monkeypatch):
    asked = []

    def refuse(*arguments, **options):
        asked.append(arguments)
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", refuse)
    assert "cannot be reached: no network" in fail(capsys, "generate", "someone/absent", "--prompt", "a")
    assert len(asked) == 1
