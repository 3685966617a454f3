"""`hf-recurrent watch`: what is shown and written, resuming, and everything that goes wrong."""

import json
import os
import re
import signal
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, set_seed

from hf_recurrent import ByteTokenizer, config_from_preset
from hf_recurrent.cli.watch import main
from hf_recurrent.watch import log_sources, watch_run

LINES = [b"12:%02d request %d served\n" % (n // 60, n % 60) for n in range(75)]
ODD = b"kernel panic: no init found\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    set_seed(7)
    sizes = {"hidden_size": 16, "state_size": 24, "num_hidden_layers": 1}
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config_from_preset("hawk-tiny", **sizes)).save_pretrained(path)
    ByteTokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(log_sources, "_BETWEEN_LOOKS", 0.0)
    (tmp_path / "a.log").write_bytes(b"".join([*LINES, ODD, *LINES[:5]]))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def watch(model, *words):
    main(["a.log", "--no_follow", "--model", model, "--learning_rate", "1e-2", "--output", "lines.jsonl", *words])


def records(path="lines.jsonl"):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_the_unusual_line_is_shown_and_written(model, capsys):
    watch(model)
    shown = capsys.readouterr()
    found = records()
    assert [record["line_number"] for record in found] == [*range(1, 82)]
    odd = found[75]
    assert odd["unusual"] and odd["text"] == ODD.decode().rstrip() and odd["offset"] == len(b"".join(LINES))
    assert odd["score"] > odd["threshold"] > 0 and odd["bits_per_byte"] == pytest.approx(odd["bits"] / len(ODD), 1e-2)
    assert "line 76: " in shown.out and "kernel panic" in shown.out and "\033" not in shown.out
    assert "a.log: 81 lines, " in shown.err and "Saved in runs/watch-a.log" in shown.err


def test_a_stopped_watch_continues_exactly(model, monkeypatch):
    watch(model, "--output_dir", "whole")
    expected = records()
    os.remove("lines.jsonl")
    read, count = watch_run.WatchRun._read, [0]

    def read_and_stop(run, log, line):
        read(run, log, line)
        count[0] += 1
        if count[0] == 30:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(watch_run.WatchRun, "_read", read_and_stop)
    watch(model, "--output_dir", "parts")
    assert len(records()) == 30
    with open("lines.jsonl", "a") as file:  # of a process that was killed after its checkpoint
        file.write('{"line_number": 31}\n{"line')
    watch(model, "--output_dir", "parts")
    assert records() == expected


def test_a_full_disk_loses_nothing(model, monkeypatch, capsys):
    write, calls = os.write, [0]

    def write_unless_full(descriptor, data):
        calls[0] += 1
        if 20 <= calls[0] < 25:
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_unless_full)
    watch(model)
    assert [record["line_number"] for record in records()] == [*range(1, 82)]
    said = capsys.readouterr().err
    assert "lines.jsonl cannot be written: no space left on device; its lines wait in memory" in said
    assert "can be written again; nothing is missing" in said


def test_a_diverged_model_goes_back(model, monkeypatch, capsys):
    read, count = watch_run.WatchRun._read, [0]

    def damage(run, log, line):
        count[0] += 1
        if count[0] == 40:
            with torch.no_grad():
                next(iter(log.watcher.learner.model.parameters())).fill_(float("nan"))
        read(run, log, line)

    monkeypatch.setattr(watch_run.WatchRun, "_read", damage)
    watch(model)
    assert len(records()) == 81
    said = capsys.readouterr().err
    assert "a.log, line 40: the model diverged" in said and "learning rate 0.005" in said


def test_rubbish_and_long_lines(model):
    rubbish = bytes(range(256)).replace(b"\n", b"") + b"\n" + b"x" * 100_000 + b"\n\n\xff"
    with open("a.log", "wb") as file:
        file.write(rubbish)
    watch(model, "--max_line_bytes", "300")
    found = records()
    assert [record["line_number"] for record in found] == [1, 2, 3, 4]
    assert found[1]["length"] == 100_000 and len(found[1]["text"]) == 300


def test_the_journal_and_alerts(model):
    entry = {"__REALTIME_TIMESTAMP": "1", "SYSLOG_IDENTIFIER": "sshd"}
    lines = [json.dumps(entry | {"MESSAGE": line.decode().rstrip()}) for line in [*LINES, ODD]]
    with open("a.log", "w") as file:
        file.write("\n".join(lines))
    watch(model, "--exec", 'cat >> alerts.jsonl; echo "$WATCH_LINE_NUMBER $WATCH_TEXT" >> alerts.txt')
    assert records()[-1]["text"] == "sshd: kernel panic: no init found"
    assert records("alerts.jsonl")[-1] == records()[-1]
    with open("alerts.txt") as file:
        assert file.read().endswith("76 sshd: kernel panic: no init found\n")


def test_metrics_without_the_package(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "hf_recurrent.watch.metrics", raising=False)
    (tmp_path / "a.log").write_text("one\n")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "a.log"), "--metrics", "0", "--output_dir", str(tmp_path / "run"), "--no_follow"])
    assert "pip install 'hf-recurrent[watch]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["b.log", "--no_follow"], r"The log 'b\.log' cannot be read: No such file or directory"),
        (["a.log", "a.log"], "`LOG` has 'a.log' twice"),
        (["."], "`LOG` is '.', a directory"),
        (["a.log", "--false_alarms", "0"], "`--false_alarms` is 0.0; it must be more than 0"),
        (["a.log", "--history", "much"], "'much' is not a number of bytes"),
        (["a.log", "--output", "none/x"], "`--output` is 'none/x'; directory 'none' not found"),
        (["a.log", "--metrics", "70000"], "`--metrics` is 70000; it must be a port"),
        (["a.log", "--model", "no-such-model"], "`--model` is 'no-such-model'"),
        (["a.log.gz"], "is compressed; use `zcat"),
    ],
)
def test_bad_input_ends_with_a_sentence(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert re.search(message, said) and "Traceback" not in said
