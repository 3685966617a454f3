"""Commands in a terminal of 80 columns: no line is longer, and "Next" names commands that work."""

import re
import shlex

import pytest
from terminals import Terminal, pty, shown_lines

pytestmark = pytest.mark.skipif(pty is None, reason="pseudo-terminals are of Unix")

TRAIN = "pretrain --use_cpu --model hawk-tiny --corpus notes --output_dir run --report_to none --sample_every 0"
SHORT = "--config_overrides hidden_size=16 state_size=16 num_hidden_layers=1 --logging_steps 1 --sample_bytes 8"
SIZES = "--max_steps 12 --block_size 32 --per_device_train_batch_size 4"
# A bar, or the line of `learn`.
PROGRESS = re.compile(r"\d%\|.*left|\d ?[kM]?B/s")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("terminal")
    (folder / "notes").mkdir()
    for number in range(6):
        text = f"Dear reader, this is letter {number}.\n" + "All work and no play makes Jack a dull boy.\n" * 40
        (folder / "notes" / f"{number}.txt").write_text(text)
    (folder / "book.txt").write_text("It was a dark night, and the café was closed.\n" * 60)
    return folder


@pytest.fixture(scope="module")
def run(folder, commands):
    """Runs a command, which must succeed, and returns the lines that it has shown."""

    def run_one(line: str) -> list[str]:
        with Terminal(
            shlex.split(line), commands, environment={"HF_HOME": str(folder / "home")}, cwd=folder
        ) as terminal:
            assert terminal.wait(120) == 0, terminal.output
        lines = shown_lines(terminal.output)
        assert not [line for line in lines if len(line) > 80]
        return lines

    return run_one


@pytest.fixture(scope="module")
def trained(run) -> list[str]:
    return run(f"{TRAIN} {SHORT} {SIZES}")


@pytest.mark.long
def test_pretrain(trained):
    bars = [line for line in trained if PROGRESS.search(line)]
    assert any(re.search(r"step 12/12, [\d.]+ bits per byte, .*B/s, 00:00 left", line) for line in bars), bars
    assert any("5 documents" in line and "1 document, " in line for line in trained)


@pytest.mark.long
def test_next_commands_work_with_a_prompt_of_the_corpus(trained, run):
    following = trained[next(place for place, line in enumerate(trained) if line.endswith("Next:")) + 1 :]
    generate, evaluate, push = (line.strip() for line in following if line.startswith("  hf-recurrent"))
    assert shlex.split(generate)[-2:] == ["--prompt", "Dear reader, this is"]
    assert push.startswith("hf-recurrent push-to-hub run ")
    out = run(generate.removeprefix("hf-recurrent ") + " --max_new_tokens 30 --seed 1")
    assert any(out)
    table = run(evaluate.removeprefix("hf-recurrent "))
    assert any(re.search(r"evaluating.*\d%.*bits per byte", line) for line in table)
    assert any(line.startswith("gzip -9") for line in table)


def test_a_finished_run_says_so(trained, run):
    out = run(f"{TRAIN} {SHORT} {SIZES} --resume_from_checkpoint true")
    assert any("This run is finished: step 12 of 12." in line for line in out)


@pytest.mark.long
def test_learn_and_its_next_command(trained, run):
    words = "learn run --source book.txt --stride 32 --report_every 256 --output_dir learned"
    out = run(words)
    assert any(re.search(r"bits per byte, .* over the last .*B/s, \d\d:\d\d left", line) for line in out)
    (generate,) = (line.strip() for line in out if line.startswith("  hf-recurrent generate"))
    assert any(run(generate.removeprefix("hf-recurrent ") + " --max_new_tokens 9"))
    assert any("this run is finished: end of the source" in line for line in run(f"{words} --resume"))


def test_generate_and_score_show_progress(trained, run):
    out = run("generate run --prompt_file book.txt --max_new_tokens 0 --save_state book.state")
    assert any(re.search(r"reading: +\d+%", line) for line in out)
    out = run("score run book.txt notes --output scores.jsonl")
    assert any(re.search(r"scoring: +\d+%.*bits per byte", line) for line in out)
    assert any(line.startswith("7 documents, ") for line in out)
