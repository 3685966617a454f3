"""Outputs of a watch: the JSON lines, alerts and metrics."""

import os
import urllib.request

import pytest

from hf_recurrent.watch.alerts import AlertCommand
from hf_recurrent.watch.line_log import LineLog
from hf_recurrent.watch.metrics import MetricsServer


def test_a_file_that_was_replaced_is_not_cut(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = LineLog("a.jsonl")
    mark = first.mark()
    first.close()
    os.rename("a.jsonl", "a.jsonl.1")
    (tmp_path / "a.jsonl").write_text("of the user\n")
    LineLog("a.jsonl", mark).close()
    assert (tmp_path / "a.jsonl").read_text() == "of the user\n"


def test_failed_alerts_are_reported():
    alerts = AlertCommand("echo no such host >&2; exit 3")
    alerts.send({"text": "a\0b"})
    alerts.close()
    assert alerts.notices == ["--exec ended with status 3: no such host"] and alerts.failures == 1
    slow = AlertCommand("sleep 60", seconds=0.05)
    slow.send({})
    slow.close()
    assert slow.notices == ["--exec took more than 0.05 seconds and was stopped"]


def test_metrics_are_served():
    samples = [("lines", 'a "b"', 3), ("threshold", "c", float("inf")), ("alert_failures", "", 0)]
    server = MetricsServer(0, lambda: samples)
    with urllib.request.urlopen(server.address) as answer:
        page = answer.read().decode()
    server.close()
    assert 'hf_recurrent_watch_lines_total{log="a \\"b\\""} 3.0\n' in page
    assert 'hf_recurrent_watch_threshold{log="c"} +Inf\n' in page
    assert "\nhf_recurrent_watch_alert_failures_total 0.0\n" in page
    with pytest.raises(OSError):
        urllib.request.urlopen(server.address)
