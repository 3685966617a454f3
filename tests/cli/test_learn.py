"""`hf-recurrent learn`: all kinds of sources, stopping and resuming, and messages on bad input."""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, set_seed

from hf_recurrent import ByteTokenizer, OnlineLearner, config_from_preset
from hf_recurrent.cli.generate import main as generate
from hf_recurrent.cli.learn import main
from hf_recurrent.online import learn_run

STREAM = b"".join(b"line %d of the log\n" % (number * 37 % 101) for number in range(9))
SHORT = STREAM[:60]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    set_seed(7)
    sizes = {"hidden_size": 16, "state_size": 24, "num_hidden_layers": 1}
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config_from_preset("memora-tiny", **sizes)).save_pretrained(path)
    ByteTokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.txt").write_bytes(STREAM)


def learn(model, *arguments, source="log.txt", output="out"):
    main([model, "--source", source, "--output_dir", output, "--learning_rate", "1e-2", *arguments])


def write(data):
    with open("log.txt", "wb") as file:
        file.write(data)


def expected(model, data=STREAM, **settings):
    learner = OnlineLearner.load(_begin(model, **settings))
    learner.read(data)
    learner.flush()
    return dict(learner.model.state_dict())


def _begin(model, **settings):
    learner = OnlineLearner(AutoModelForCausalLM.from_pretrained(model), **{"learning_rate": 1e-2} | settings)
    learner.save("begin")
    return "begin"


def learned(output="out"):
    return AutoModelForCausalLM.from_pretrained(output).state_dict()


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def records(output="out"):
    with open(os.path.join(output, "records.jsonl")) as file:
        return [json.loads(line) for line in file]


def test_a_file_is_read_to_its_end(model, capsys):
    pytest.importorskip("matplotlib")
    learn(model, "--stride", "4", "--report_every", "100", "--save_every", "100", "--held_out", "log.txt", "--plot")
    assert same(learned(), expected(model, stride=4))
    assert f"end of the source at byte {len(STREAM)}" in capsys.readouterr().out
    assert {f"checkpoint-{len(STREAM)}", "prequential.png", "state.safetensors"} <= set(os.listdir("out"))
    found = records()
    assert [record["bytes_read"] for record in found][:3] == [0, 100, len(STREAM)]
    assert "bits_per_byte" not in found[0]
    assert found[-1]["held_out_bits_per_byte"] < found[0]["held_out_bits_per_byte"]
    assert found[-1]["updates"] == -(-(len(STREAM) - 1) // 4)
    assert sum(name.startswith("checkpoint-") for name in os.listdir("out")) == 1
    generate(["out", "--state", "out/state.safetensors", "--max_new_tokens", "3", "--seed", "0"])


def test_the_summary_as_json(model, capsys):
    learn(model, "--json", "--quiet")
    summary = json.loads(capsys.readouterr().out)
    assert (summary["bytes_read"], summary["ending"], summary["output_dir"]) == (
        len(STREAM),
        "end of the source",
        "out",
    )
    assert summary["bits_per_byte"] == records()[-1]["bits_per_byte"]
    assert summary["bytes_per_second"] > 0


def test_standard_input_and_a_preset(monkeypatch):
    reading, writing = os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(reading))
    with os.fdopen(writing, "wb") as file:
        file.write(STREAM[:20])
    main(["memora-tiny", "--source", "-", "--stride", "8", "--window", "5", "--quiet"])
    assert records("runs/memora-tiny-stdin")[-1]["updates"] == 3


def test_a_socket(model):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                for begin in range(0, 90, 30):
                    connection.sendall(STREAM[begin : begin + 30])
                    time.sleep(0.05)

        thread = threading.Thread(target=serve)
        thread.start()
        learn(model, source=f"tcp://127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert same(learned(), expected(model, STREAM[:90]))


@pytest.fixture
def foreground():
    """Ctrl-C as in the foreground; background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("foreground")
def test_stopped_at_any_byte_and_resumed_while_the_file_grows(model, monkeypatch, capsys):
    monkeypatch.setattr(learn_run, "_PIECE", 1)
    monkeypatch.setattr("hf_recurrent.online.sources._MOMENT", 0.01)
    with open("log.txt", "wb") as file:
        file.write(STREAM[:90])
    arguments = ["--stride", "4", "--report_every", "20", "--follow"]
    seen = []
    read = OnlineLearner.read

    def stop_at(self, data):
        record = read(self, data)
        if seen and record.bytes_read == seen[0]:
            seen.pop(0)
            os.kill(os.getpid(), signal.SIGINT if len(seen) else signal.SIGTERM)
        if record.bytes_read == 85:  # from now on it follows
            with open("log.txt", "ab") as file:
                file.write(STREAM[90:])
        return record

    monkeypatch.setattr(OnlineLearner, "read", stop_at)
    for place in (37, 70, len(STREAM)):
        seen[:] = [place]
        learn(model, *arguments, *(["--resume"] if place > 37 else []))
        assert f"stopped at byte {place}" in capsys.readouterr().out
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # Nothing was flushed on the way.
    learner = OnlineLearner(AutoModelForCausalLM.from_pretrained(model), learning_rate=1e-2, stride=4)
    read(learner, STREAM)
    assert same(learned(), dict(learner.model.state_dict()))
    places = [record["bytes_read"] for record in records() if record["bytes_read"] % 20 == 0]
    assert places == list(range(0, len(STREAM) + 1, 20))


def test_a_source_that_fails_loses_nothing(model, monkeypatch, capsys):
    monkeypatch.setattr("hf_recurrent.online.sources._MOMENT", 0.01)
    write(SHORT)
    with pytest.raises(SystemExit) as stop:
        learn(model, "--follow", "--timeout", "0.05")
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert "'log.txt' has stalled: no byte arrived for 0.05 seconds" in error
    assert f"The model after byte {len(SHORT)} is saved in out/checkpoint-{len(SHORT)}." in error
    assert same(learned(), expected(model, SHORT))
    write(b"new")
    with pytest.raises(SystemExit):
        learn(model, "--resume")
    assert "has 3 bytes, fewer than the" in capsys.readouterr().err


def test_a_nan_loss_keeps_both_checkpoints(model, monkeypatch, capsys):
    learner = OnlineLearner.load
    calls = []

    def poisoned(*arguments, **options):
        loaded = learner(*arguments, **options)
        loaded.model.register_forward_hook(spoil)
        return loaded

    def spoil(module, inputs, output):
        calls.append(1)
        if len(calls) == 20:
            output.loss = output.loss * float("nan")
        return output

    write(SHORT)
    learn(model, "--save_every", "50", "--resume")
    write(SHORT + SHORT)
    monkeypatch.setattr(OnlineLearner, "load", poisoned)
    with pytest.raises(SystemExit) as stop:
        learn(model, "--resume")
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert "The loss is nan: nothing was learned from this block." in error
    before = f"checkpoint-{len(SHORT)}"
    after = max(Path("out").glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2])).name
    assert len(SHORT) < int(after.partition("-")[2]) <= len(SHORT) + 20  # the compiler reads blocks too
    assert f"out/{after}. To go back to out/{before}, remove the newer checkpoint" in error
    assert {before, after} <= set(os.listdir("out"))
    monkeypatch.setattr(OnlineLearner, "load", learner)
    learn(model, "--resume")
    # With the hook, bytes were read by plain torch.
    torch.testing.assert_close(dict(learned()), dict(expected(model, SHORT + SHORT)), rtol=0, atol=1e-4)


def test_bad_input_is_named_before_anything_is_written(model, capsys):
    os.mkdir("full")
    with open("full/letter", "w"):
        pass
    for arguments, message in (
        ({"source": "nowhere.txt"}, "`--source` is 'nowhere.txt'; file not found."),
        ({"source": "tcp://127.0.0.1"}, "it must be a file, `-` for standard input, or tcp"),
        ({"source": "tcp://example.org:80"}, "is on another machine"),
        ({"source": "tcp://127.0.0.1:1"}, "cannot be reached"),
        ({"output": "full"}, "`--output_dir` is 'full'; it must be empty. To continue the run in it, add --resume."),
        (["--output_dir", "full", "--resume"], "`--output_dir` is 'full'; with --resume, it must have a run"),
        ({"output": "log.txt"}, "`--output_dir` is 'log.txt'; it must be a directory."),
        (["--rule", "bptt"], "argument --rule: invalid choice: 'bptt'"),
        (["--stride", "0"], "`--stride` is 0"),
        (["--timeout", "0"], "`--timeout` is 0"),
        (["--threads", "0"], "`--threads` is 0; it must be at least 1."),
        (["--held_out", "nowhere"], "nowhere"),
        (["--source", "-", "--follow"], "`--follow` is True, but the source is '-'; it must be a file."),
    ):
        extra, named = (arguments, {}) if isinstance(arguments, list) else ([], arguments)
        with pytest.raises(SystemExit) as stop:
            learn(model, *extra, **named)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["nowhere/at/all", "--source", "log.txt"])
    assert sorted(os.listdir()) == ["full", "log.txt"]


def test_settings_of_a_resumed_run(model, capsys):
    learn(model, "--no_learn", "--stride", "16")
    weights = load_file(f"out/checkpoint-{len(STREAM)}/model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in load_file(f"{model}/model.safetensors").items())
    with pytest.raises(SystemExit):
        learn(model, "--resume")
    assert "`stride` is 1, but the learner was saved with 16" in capsys.readouterr().err
    learn(model, "--stride", "16", "--resume")  # learning is on now, but the source has ended
    assert "end of the source at byte" in capsys.readouterr().out
