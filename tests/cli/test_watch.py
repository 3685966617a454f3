"""`hf-recurrent watch`: what is shown and written, resuming, and everything that goes wrong."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from hf_recurrent.cli.watch import main
from hf_recurrent.watch import log_sources, watch_run
from tests.watch.fixtures import block_log, request_log

ODD = b"2024-05-01 00:06:15 kernel panic: no init found"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(log_sources, "_BETWEEN_LOOKS", 0.0)
    write("a.log", [*request_log(1500), ODD, *request_log(1505)[1500:]])


def write(path, lines):
    with open(path, "wb") as file:
        file.write(b"".join(line + b"\n" for line in lines))


def watch(*words, log="a.log"):
    main([log, "--no_follow", "--output", "lines.jsonl", *words])


def records(path="lines.jsonl"):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_the_unusual_line_is_shown_and_written(capsys):
    watch("--output_events", "events.jsonl", "--explain")
    shown = capsys.readouterr()
    found = records()
    assert [record["line_number"] for record in found] == [*range(1, 1507)]
    odd = found[1500]
    assert odd["unusual"] and odd["text"] == ODD.decode() and odd["reason"] == "new"
    with open("a.log", "rb") as file:
        assert odd["offset"] == file.read().index(b"kernel") - len("2024-05-01 00:06:15 ")
    assert odd["score"] > odd["threshold"] > 0 and odd["score"] == max(record["score"] for record in found[50:])
    event = next(record for record in records("events.jsonl") if record["line_number"] == 1501)
    assert event["summary"] == "new template" and event["nearest"]
    assert f"line 1,501: new template [{event['event']}]: {ODD.decode()}\n  before: 2024" in shown.out
    assert "\033" not in shown.out
    assert "a.log: 1,506 lines, " in shown.err and "Saved in runs/watch-a.log" in shown.err


def test_events_as_json(capsys):
    watch("--output_events", "events.jsonl", "--json")
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found == records("events.jsonl") and 1501 in [record["line_number"] for record in found]


def test_sessions_are_written(capsys):
    lines, labels = block_log(400)
    write("a.log", lines)
    watch("--output_sessions", "sessions.jsonl")
    found = records("sessions.jsonl")
    assert {record["session"] for record in found} == set(labels) and len(found) == len(labels)
    worst = sorted(found, key=lambda record: -record["score"])[: sum(labels.values())]
    assert sum(labels[record["session"]] for record in worst) > 0.7 * len(worst)
    assert re.search(r"session blk_-?\d+, \d+ lines: ", capsys.readouterr().out)


def test_a_stopped_watch_continues_exactly(monkeypatch):
    monkeypatch.setattr(watch_run, "_BATCH", 100)
    outputs = ("--output_sessions", "sessions.jsonl", "--output_events", "events.jsonl")
    paths = ("lines.jsonl", "sessions.jsonl", "events.jsonl")
    watch("--output_dir", "whole", *outputs)
    expected = [records(path) for path in paths]
    for path in paths:
        os.remove(path)
    give, count = watch_run.WatchRun._give, [0]

    def give_and_stop(run, log, findings):
        give(run, log, findings)
        count[0] += 1
        if count[0] % 3 == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(watch_run.WatchRun, "_give", give_and_stop)
    watch("--output_dir", "parts", *outputs)
    assert len(records()) == 300
    with open("lines.jsonl", "a") as file:  # of a process that was killed after its checkpoint
        file.write('{"line_number": 301}\n{"line')
    watch("--output_dir", "parts", *outputs)
    while len(records()) < 1506 or len(records("sessions.jsonl")) < len(expected[1]):
        watch("--output_dir", "parts", *outputs)
    assert [records(path) for path in paths] == expected


@pytest.mark.long
def test_kills_at_any_moment_lose_and_double_nothing(tmp_path):
    lines, _ = block_log(900)
    write("a.log", lines)
    outputs = ["--output", "lines.jsonl", "--output_sessions", "sessions.jsonl", "--output_events", "events.jsonl"]
    command = [sys.executable, "-m", "hf_recurrent.cli.main", "watch", "a.log", "--no_follow", "--quiet"]
    command += ["--save_every", "0.01", *outputs]
    subprocess.run([*command, "--output_dir", "whole"], check=True, stdout=subprocess.DEVNULL)
    paths = ("lines.jsonl", "sessions.jsonl", "events.jsonl")
    expected = [(tmp_path / path).read_bytes() for path in paths]
    for path in paths:
        os.remove(path)
    kills = 0
    for delay in (0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7):
        process = subprocess.Popen([*command, "--output_dir", "parts"], stdout=subprocess.DEVNULL)
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
    subprocess.run([*command, "--output_dir", "parts"], check=True, stdout=subprocess.DEVNULL)
    assert [(tmp_path / path).read_bytes() for path in paths] == expected and kills


def test_a_full_disk_loses_nothing(monkeypatch, capsys):
    monkeypatch.setattr(watch_run, "_BATCH", 50)
    write_, calls = os.write, [0]

    def write_unless_full(descriptor, data):
        calls[0] += 1
        if 10 <= calls[0] < 15:
            raise OSError(28, "No space left on device")
        return write_(descriptor, data)

    monkeypatch.setattr(os, "write", write_unless_full)
    watch()
    assert [record["line_number"] for record in records()] == [*range(1, 1507)]
    said = capsys.readouterr().err
    assert "lines.jsonl cannot be written: no space left on device; its lines wait in memory" in said
    assert "can be written again; nothing is missing" in said


def test_lines_that_are_not_saved_are_an_error(monkeypatch, capsys):
    write_ = os.write

    def write_unless_full(descriptor, data):
        if b"line_number" in bytes(data):
            raise OSError(28, "No space left on device")
        return write_(descriptor, data)

    monkeypatch.setattr(os, "write", write_unless_full)
    with pytest.raises(SystemExit) as ended:
        watch()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "Saved in" not in said
    assert said.endswith("watch: error: The last lines are not saved; the next run reads them again.\n")
    monkeypatch.undo()


def test_rubbish_and_long_lines():
    rubbish = bytes(range(256)).replace(b"\n", b"") + b"\n" + b"x" * 100_000 + b"\n\n\xff"
    with open("a.log", "wb") as file:
        file.write(rubbish)
    watch("--max_line_bytes", "300")
    found = records()
    assert [record["line_number"] for record in found] == [1, 2, 3, 4]
    assert found[1]["length"] == 100_000 and len(found[1]["text"]) == 300


def test_the_journal_and_alerts():
    entry = {"__REALTIME_TIMESTAMP": "1", "SYSLOG_IDENTIFIER": "sshd"}
    lines = [json.dumps(entry | {"MESSAGE": line.decode()}).encode() for line in [*request_log(300), ODD]]
    write("a.log", lines)
    watch("--exec", 'cat >> alerts.jsonl; echo "$WATCH_LINE_NUMBER $WATCH_TEXT" >> alerts.txt')
    assert records()[-1]["text"] == f"sshd: {ODD.decode()}"
    assert 301 in [record["line_number"] for record in records("alerts.jsonl")]
    with open("alerts.txt") as file:
        assert f"301 sshd: {ODD.decode()}\n" in file.read()


def test_secrets_reach_no_file(tmp_path):
    lines = [*request_log(200), b"2024-05-01 login by ann password=hunter2", *request_log(300)[200:]]
    write("a.log", lines)
    watch("--redact", "--output_events", "events.jsonl")
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "a.log":
            assert b"hunter2" not in path.read_bytes()
    assert records()[200]["text"].endswith("password=<redacted>")


def test_ignored_events_are_not_shown_again(capsys):
    watch("--output_events", "events.jsonl")
    event = next(record["event"] for record in records("events.jsonl") if record["line_number"] == 1501)
    main(["ignore", event])
    assert "not shown again by the watch in runs/watch-a.log" in capsys.readouterr().out
    with open("a.log", "ab") as file:
        file.write(b"".join(line + b"\n" for line in [*request_log(3000)[1505:], ODD]))
    watch("--output_events", "events.jsonl")
    assert not any(record["line_number"] == 3002 and record["event"] == event for record in records("events.jsonl"))
    assert not records()[-1]["unusual"]


def test_a_compressed_log_and_a_pattern():
    with open("b.log.gz", "wb") as file:
        file.write(gzip.compress(b"one\ntwo\n"))
    watch(log="*.lo*")
    assert [record["log"] for record in records() if record["text"] == "two"] == ["b.log.gz"]


def test_alarms_per_day_set_the_threshold():
    write("a.log", request_log(40_000))
    watch("--alarms_per_day", "30")
    flagged = sum(record["unusual"] for record in records()[5000:])
    assert flagged <= 15  # of the 2.4 hours after them


def test_a_watch_needs_no_torch():
    code = "import sys; from hf_recurrent.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "watch", "a.log", "--no_follow", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


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
        (["*.none"], r"`LOG` is '\*\.none', which no file matches"),
        (["a.log", "--false_alarms", "0"], "`--false_alarms` is 0.0; it must be more than 0"),
        (["a.log", "--alarms_per_day", "0"], "`--alarms_per_day` is 0.0; it must be more than 0"),
        (["a.log", "--session", "("], "`--session` is '\\(', which is not a regular expression"),
        (["a.log", "--redact_pattern", "("], "`--redact_pattern` is '\\(', not a regular expression"),
        (["a.log", "--webhook", "ftp://x"], "`--webhook` is 'ftp://x'; it must begin with http"),
        (["a.log", "--history", "much"], "'much' is not a number of bytes"),
        (["a.log", "--output", "none/x"], "`--output` is 'none/x'; directory 'none' not found"),
        (["a.log", "--metrics", "70000"], "`--metrics` is 70000; it must be a port"),
        (["c.log.gz"], r"The log 'c\.log\.gz' cannot be read: No such file"),
        (["ignore", "xyz", "--output_dir", "."], "has no state of a watch"),
    ],
)
def test_bad_input_ends_with_a_sentence(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert re.search(message, said) and "Traceback" not in said


def test_a_damaged_state_is_refused(capsys):
    watch("--output_dir", "state")
    with open("state/watch.json", "r+b") as file:
        file.seek(200)
        file.write(b"x")
    with pytest.raises(SystemExit):
        watch("--output_dir", "state")
    assert "is damaged; use --restart" in capsys.readouterr().err
