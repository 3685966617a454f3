"""`watch evaluate` and `watch learn`, and the measures and peers that they use."""

import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_recurrent.cli.watch import main
from hf_recurrent.watch.evaluation import auroc, average_precision, precision_at
from hf_recurrent.watch.peers import LINE_PEERS, SESSION_PEERS
from tests.watch.fixtures import block_log, request_log

ODD = b"2024-05-01 00:06:15 FATAL kernel panic: no init found in zone %d"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def labelled_lines():
    lines = request_log(1500)
    for place in (700, 900, 901, 1300):
        lines.insert(place, ODD % place)
    return lines, [line.startswith(b"2024-05-01 00:06:15 FATAL") for line in lines]


def write(path, lines):
    with open(path, "wb") as file:
        file.write(b"".join(line + b"\n" for line in lines))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=30))
def test_measures_are_those_of_scikit_learn(rows):
    metrics = pytest.importorskip("sklearn.metrics")
    scores, labels = zip(*rows, strict=True)
    if len(set(labels)) == 2:
        assert auroc(scores, labels) == pytest.approx(metrics.roc_auc_score(labels, scores))
        assert average_precision(scores, labels) == pytest.approx(metrics.average_precision_score(labels, scores))


def test_precision_among_the_highest():
    assert precision_at([3, 2, 1], [1, 0, 1], 2) == 0.5 and math.isnan(precision_at([3], [0], 0))


@pytest.mark.long
def test_lines_are_evaluated(capsys):
    lines, labels = labelled_lines()
    write("a.log", lines)
    write("labels.txt", [b"FATAL" if label else b"-" for label in labels])
    write("b.log", [(b"FATAL " if label else b"- ") + line for line, label in zip(lines, labels, strict=True)])
    main(["evaluate", "a.log", "labels.txt", "--output", "a.json"])
    shown = capsys.readouterr().out
    assert "1,504 lines, 4 of them labelled\n" in shown
    with open("a.json") as file:
        rows = {row["detector"]: row for row in json.load(file)}
    assert set(rows) == {"watch", *LINE_PEERS}
    assert rows["watch"]["auroc"] > 0.995
    assert all(rows[peer]["auroc"] > 0.9 for peer in LINE_PEERS)
    main(["evaluate", "b.log", "--label_column", "1", "--output", "b.json"])
    with open("b.json") as file:
        assert json.load(file)[0]["auroc"] == rows["watch"]["auroc"]
    capsys.readouterr()
    main(["evaluate", "a.log", "labels.txt", "--json"])
    assert json.loads(capsys.readouterr().out)[0]["auroc"] == rows["watch"]["auroc"]


def test_sessions_are_evaluated(capsys):
    lines, labels = block_log(400)
    write("a.log", lines)
    write("s.csv", [b"session,anomalous", *(f"{name},{int(label)}".encode() for name, label in labels.items())])
    main(["evaluate", "a.log", "s.csv", "--output", "a.json"])
    assert "400 sessions" in capsys.readouterr().out
    with open("a.json") as file:
        rows = {row["detector"]: row for row in json.load(file)}
    assert set(rows) == {"watch", *SESSION_PEERS}
    assert rows["watch"]["sessions_found"] == 1 and rows["watch"]["auroc"] > 0.97


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.log"], "`LABELS` is missing"),
        (["a.log", "few.txt"], "with 1 labels, but there are 3 lines"),
        (["a.log", "same.txt"], "`LABELS` says that everything is normal"),
        (["a.log", "--label_column", "9"], "line 1 of a.log has fewer words"),
        (["none.log", "few.txt"], "none.log"),
    ],
)
def test_bad_labels_end_with_a_sentence(words, message, capsys):
    write("a.log", [b"one two", b"three", b"four"])
    write("few.txt", [b"0"])
    write("same.txt", [b"0", b"-", b"0"])
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", *words])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and re.search(message, said) and "Traceback" not in said


def test_a_page_about_old_logs(capsys, tmp_path):
    lines = [*request_log(1500), b"2024-05-01 00:06:15 <script>alert(1)</script> is new here"]
    write("a.log", lines)
    main(["learn", "a.log"])
    assert "A page about what is usual: runs/watch-a.log/learned.html" in capsys.readouterr().out
    page = (tmp_path / "runs/watch-a.log/learned.html").read_text()
    assert "accepted req-&lt;number&gt; from &lt;address&gt;" in page and "<svg" in page
    assert "<script>" not in page and "&lt;script&gt;alert(1)" in page
    assert "sessions by <code>req-&lt;number&gt;</code>" in page
    main(["a.log", "--no_follow"])  # continues at the end
    assert "continuing, from line 1,502" in capsys.readouterr().err
