"""Sessions: the identifier that makes them, and which of them are unusual."""

import re

import numpy as np

from hf_recurrent.watch.evaluation import auroc
from hf_recurrent.watch.line_judge import LineJudge
from hf_recurrent.watch.session_tracker import SessionTracker
from tests.watch.fixtures import block_log, request_log


def sessions_of(lines, **options):
    tracker = SessionTracker(**options)
    judge = LineJudge(tracker=tracker)
    for line in lines:
        judge.judge(line)
    tracker.finish()
    return tracker, {ended.name.decode(): ended for ended in tracker.ended}


def test_the_identifier_is_found_and_unusual_sessions_have_high_scores():
    lines, labels = block_log(800)
    tracker, found = sessions_of(lines)
    assert tracker.finder.kind == b"blk_\x05" and set(found) == set(labels)
    scores = [found[name].score for name in labels]
    assert auroc(scores, [*labels.values()]) > 0.98
    one = next(name for name, is_anomalous in labels.items() if is_anomalous)
    lines_of_one = [number for number, line in enumerate(lines, 1) if one.encode() in line]
    session = found[one].session
    assert (session.first_line, session.last_line) == (lines_of_one[0], lines_of_one[-1])
    assert sum(session.counts.values()) == len(lines_of_one)


def test_numbers_that_mean_nothing_make_no_sessions():
    rng = np.random.default_rng(0)
    done = (b"this", b"that thing", b"more of it")
    lines = [b"worker %d did %s" % (rng.integers(1000, 1100), done[rng.integers(3)]) for _ in range(3000)]
    tracker, found = sessions_of(lines)
    assert tracker.finder.kind is None and not found


def test_a_pattern_names_sessions():
    lines = request_log(400)
    _, found = sessions_of(lines, pattern=re.compile(rb"req-(\d+)"))
    names = {match.group(1) for line in lines for match in re.finditer(r"req-(\d+)", line.decode())}
    assert set(found) == names


def test_quiet_sessions_end():
    lines, labels = block_log(300)
    tracker, _ = sessions_of(lines, idle=60.0)
    ends = [ended.end for ended in tracker.ended]
    assert ends.count("idle") > 200 and len(ends) == len(labels)
    begins = [ended.session.time for ended in tracker.ended if ended.end == "idle"]
    assert begins == sorted(begins)
