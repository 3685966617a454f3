"""Unusual lines on a terminal."""

import io

import numpy as np

from hf_recurrent.watch.line_printer import LinePrinter, cut, printable, underline
from hf_recurrent.watch.log_watcher import LineReport


class Terminal(io.StringIO):
    def isatty(self):
        return True


def report_of(content, begin, end):
    bits = np.zeros(len(content) + 1)
    bits[begin:end] = 9
    return LineReport(bits, {"bytes": 8.0}, 8.0, 8.0, 5.0, True)


def test_a_terminal_line_is_cut_and_marked(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    content = b"a" * 200 + b"SURPRISE" + b"b" * 200
    colored, plain = Terminal(), Terminal()
    LinePrinter("always", False, colored).show("x.log", 7, content, report_of(content, 200, 208))
    assert "\033[1;31mSURPRISE\033[0m" in colored.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    LinePrinter("auto", False, plain).show("x.log", 7, content, report_of(content, 200, 208))
    head, text, marks = plain.getvalue().splitlines()
    assert head.startswith("line 7: unexpected bytes, 1 in 256 lines")
    assert max(map(len, (head, text, marks))) < 80
    assert text[marks.index("^") : marks.rindex("^") + 1] == "SURPRISE"


def test_nothing_of_a_log_moves_the_cursor():
    text, marks = printable("\033[2Jé\u202e\tx".encode() + b"\xff", [(0, 2), (4, 6), (11, 12)])
    assert text == "\\x1b[2Jé\\u202e x\\xff"
    assert [text[begin:end] for begin, end in marks] == ["\\x1b[", "é", "\\xff"]
    assert cut("abcdef", [(1, 3)], 10) == ("abcdef", [(1, 3)])
    assert underline([(1, 3), (5, 6)]) == " ^^  ^"
