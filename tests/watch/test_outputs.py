"""Outputs of a watch: JSON lines, alerts, metrics, and events on a terminal."""

import http.server
import io
import json
import os
import threading
import urllib.request
from types import SimpleNamespace

import pytest

from hf_recurrent.watch.alerts import AlertCommand, Webhook
from hf_recurrent.watch.event_printer import EventPrinter, cut, printable, underline
from hf_recurrent.watch.events import Event
from hf_recurrent.watch.metrics import METRICS, MetricsServer
from hf_recurrent.watch.redaction import Redactor
from hf_recurrent.watch.watch_run import RecordFile


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_file_that_was_replaced_is_not_cut(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = RecordFile("a.jsonl")
    mark = first.mark()
    first.close()
    os.rename("a.jsonl", "a.jsonl.1")
    (tmp_path / "a.jsonl").write_text("of the user\n")
    RecordFile("a.jsonl", mark).close()
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


def test_a_webhook_tries_again():
    got, answers = [], [503, 429, 200, 400]

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((json.loads(body)["event"], self.headers["Idempotency-Key"]))
            self.send_response(answers[len(got) - 1])
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hook = Webhook(f"http://127.0.0.1:{server.server_port}/", pause=0.01)
    hook.send({"event": "a", "line_number": 3})
    hook.send({"event": "b", "line_number": 4})
    hook.close()
    server.shutdown()
    server.server_close()
    assert [event for event, _ in got] == ["a", "a", "a", "b"] and len({key for _, key in got[:3]}) == 1
    assert hook.notices == ["--webhook got status 400"] and hook.failures == 1
    with pytest.raises(ValueError, match="must begin with http"):
        Webhook("file:///etc/passwd")


def test_metrics_are_served():
    values = dict.fromkeys(METRICS, 3) | {"threshold": float("inf")}
    logs = [SimpleNamespace(name=name, metrics=lambda: values) for name in ('a "b"', "c")]
    server = MetricsServer(0, logs, [SimpleNamespace(failures=0)])
    with urllib.request.urlopen(server.address) as answer:
        page = answer.read().decode()
    server.close()
    assert 'hf_recurrent_watch_lines_total{log="a \\"b\\""} 3.0\n' in page
    assert 'hf_recurrent_watch_threshold{log="c"} +Inf\n' in page
    assert "\nhf_recurrent_watch_alert_failures_total 0.0\n" in page
    with pytest.raises(OSError):
        urllib.request.urlopen(server.address)


def event_of(content, span):
    return Event("0123abcd", "value", "rare value SURPRISE", 9.0, 7, 7, None, None, content, span)


def test_a_terminal_line_is_cut_and_marked(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    content = b"a" * 200 + b"SURPRISE" + b"b" * 200
    colored, plain = Terminal(), Terminal()
    EventPrinter("always", False, colored).show("x.log", event_of(content, (200, 208)))
    assert "\033[1;31mSURPRISE\033[0m" in colored.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    EventPrinter("auto", False, plain).show("x.log", event_of(content, (200, 208)))
    head, text, marks = plain.getvalue().splitlines()
    assert head == "line 7: rare value SURPRISE [0123abcd]"
    assert max(map(len, (head, text, marks))) < 80
    assert text[marks.index("^") : marks.rindex("^") + 1] == "SURPRISE"


def test_nothing_of_a_log_moves_the_cursor():
    text, marks = printable("\033[2Jé\u202e\tx".encode() + b"\xff", [(0, 2), (4, 6), (11, 12)])
    assert text == "\\x1b[2Jé\\u202e x\\xff"
    assert [text[begin:end] for begin, end in marks] == ["\\x1b[", "é", "\\xff"]
    assert cut("abcdef", [(1, 3)], 10) == ("abcdef", [(1, 3)])
    assert underline([(1, 3), (5, 6)]) == " ^^  ^"


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        (b"login user=ann password=hunter2 ok", b"hunter2"),
        (b'{"api_key": "abc123def", "n": 1}', b"abc123def"),
        (b"Authorization: Bearer abc.def-ghi", b"abc.def-ghi"),
        (b"clone https://bob:pw123@host/x", b"pw123"),
        (b"mail to ann.lee@example.org failed", b"ann.lee@example.org"),
        (b"card 4111 1111 1111 1111 declined", b"4111 1111 1111 1111"),
        (b"aws AKIAABCDEFGHIJKLMNOP used", b"AKIAABCDEFGHIJKLMNOP"),
        (b"order X-77-Y shipped", b"X-77-Y"),
    ],
)
def test_secrets_are_redacted(line, secret):
    redacted = Redactor(["X-\\d+-Y"]).redact(line)
    assert secret not in redacted and b"<redacted>" in redacted
    usual = b"2024-05-01 10:00:00 took 12 ms at 10.0.0.7:8080"
    assert Redactor().redact(usual) == usual
