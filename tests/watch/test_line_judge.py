"""What is unusual in a line: each reason, drift, and saving."""

import json
import math
import random
import re
from collections import Counter, OrderedDict, deque

import pytest

from hf_recurrent.watch.events import EventGrouper
from hf_recurrent.watch.line_judge import REASONS, LineJudge
from hf_recurrent.watch.saved_state import Saved
from hf_recurrent.watch.session_tracker import SessionTracker
from hf_recurrent.watch.slots import BUCKETS, IndirectShares, rare_share
from hf_recurrent.watch.tail_histogram import AdaptiveThreshold
from tests.watch.fixtures import request_log


def judged(judge, lines):
    reports = []
    for line in lines:
        report = judge.judge(line)
        report.layout.template.example = line
        reports.append(report)
    return reports


def last(lines):
    """The report of the last line, and the rank of its score among all."""
    judge = LineJudge()
    reports = judged(judge, lines)
    score = reports[-1].score
    return judge, reports[-1], sum(report.score >= score for report in reports[100:]) / (len(reports) - 100)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"2024-05-01 00:08:20 INFO kernel: out of memory in zone 3", "new"),
        (b"2024-05-01 00:08:20 INFO req-100600 query users took 48151623 ms", "value"),
        (b"2024-05-01 00:08:20 FATAL req-100600 query users took 48 ms", "severity"),
    ],
)
def test_an_unusual_line_has_the_highest_score_and_its_reason(line, reason):
    _, report, share = last([*request_log(2000), line])
    assert share < 0.005 and report.is_unusual
    assert REASONS[report.reason] == reason or reason == "severity"
    if reason == "value":
        assert line[slice(*report.span)] == b"48151623"


def test_a_rare_value_of_few():
    lines = [b"state of door is %s" % (b"open", b"closed")[n % 2] for n in range(500)]
    _, report, share = last([*lines, b"state of door is jammed"])
    assert share < 0.01 and b"state of door is jammed"[slice(*report.span)] == b"jammed"


@pytest.mark.parametrize(
    ("usual", "unusual"),
    [
        (b"connection from 10.%d.7.%d closed", b"connection from 10.4.70312.9 closed"),
        (b"session 0x14ed9%04x%04x expired", b"session 0x14ed93111f20068aa1 expired"),
        (b"node %d ambient=%d", b"node 17 ambient=49860"),
    ],
)
def test_too_many_digits_are_unusual_also_when_they_come_again(usual, unusual):
    judge, numbers = LineJudge(), random.Random(0)
    lines = [usual % (numbers.randrange(10, 100), numbers.randrange(10, 100)) for _ in range(1500)]
    for index in range(300, 1500, 200):
        lines[index] = unusual
    reports = judged(judge, lines)
    rest = sorted(report.score for report, line in zip(reports, lines, strict=True) if line != unusual)
    for index in range(300, 1500, 200):
        assert reports[index].score > rest[-15] and REASONS[reports[index].reason] in ("value", "new")


def test_what_came_at_places_in_the_same_state_corrects_a_share():
    shares, places = IndirectShares(), [[0] * BUCKETS for _ in range(50)]
    alone = rare_share([1] + [0] * (BUCKETS - 1), 30, 0.1, 0, 1.0)
    for low in places:  # of each, one thing only, which comes 64 times
        for total in range(64):
            shares.share(low, total, 0.1, min(total.bit_length(), BUCKETS - 1), 1.0)
            low[0] = 1
        shares.add_frequent(low, 64)
    assert shares.share(places[0], 30, 0.1, 0, 1.0) < alone / 50
    many = [9] + [0] * (BUCKETS - 1)
    assert shares.share(many, 30, 0.1, 0, 1.0) == pytest.approx(rare_share(many, 30, 0.1, 0, 1.0))


def test_a_broken_order_names_what_was_expected():
    cycle = [b"step one begins", b"part two of it runs", b"now three", b"finally four of them end"]
    judge, lines = LineJudge(), [cycle[n % 4] for n in range(600)]
    judged(judge, lines)
    report = judge.judge(cycle[2])
    assert REASONS[report.reason] == "order" and report.is_unusual
    event = EventGrouper(judge).add(cycle[2], 601, report, ())
    assert event.summary == "after `finally four of them end` expected `step one begins` (99%), got `now three`"


def test_a_burst_is_one_event():
    judge = LineJudge(tracker=SessionTracker(pattern=re.compile(rb"(?!)")))  # a log without sessions
    judged(judge, request_log(1500))
    grouper, found, line = EventGrouper(judge), [], b"2024-05-01 00:06:15 INFO req-100500 query users took 33 ms"
    for number in range(1501, 1531):
        report = judge.judge(line)
        if not report.is_unusual:
            grouper.join(number, report)
        elif event := grouper.add(line, number, report, ()):
            found.append(event)
    assert len(found) == 1 and found[0].reason == "repeated"
    ended = grouper.ended(1600, everything=True)
    assert [event.id for event in ended] == [found[0].id] and ended[0].count > 15 and ended[0].last_line == 1530


def test_a_template_that_stops_is_silent():
    judge = LineJudge()
    work = [b"work item %d was done by worker %d" % (n, n % 7) for n in range(1100)]
    judged(judge, [b"heartbeat of node %d" % n if n % 10 == 0 else work[n] for n in range(1000)])
    quiet = judged(judge, work[1000:])
    silent = [index for index, report in enumerate(quiet) if REASONS[report.reason] == "silence"]
    assert len(silent) == 1 and 20 <= silent[0] <= 35


def test_a_drift_is_learned():
    def lines(word, begin):
        return [b"%s request %d was %s in %d ms" % (b"web", n, word, n % 90) for n in range(begin, begin + 600)]

    judge = LineJudge()
    judged(judge, lines(b"served", 0))
    after = judged(judge, lines(b"answered", 600))
    assert after[0].is_unusual and sum(report.is_unusual for report in after[20:]) <= 6


def test_rates_of_flagged_lines_are_kept():
    for rate in (0.01, 0.03):
        judge = LineJudge(rate)
        flagged = sum(report.is_unusual for report in judged(judge, request_log(12000)))
        assert flagged / 12000 < 1.5 * rate


class _Part(Saved):
    __slots__ = ("values", "whole")

    def __init__(self, *values):
        self.values = values


def test_saved_values_are_of_the_same_types_and_objects_stay_one():
    shared = _Part(b"\x00\xff", "s", 1, 1.5, None, True)
    whole = _Part(
        [shared, {1: shared}], {b"a", b"b"}, OrderedDict(x=(1, b"2")), Counter(a=2), deque([1, "2"], maxlen=3)
    )
    shared.whole, whole.whole = whole, math.inf
    found = _Part([], 0)
    found.load(json.loads(json.dumps(whole.state())))
    (first, by_number), *others = found.values
    assert others == [*whole.values[1:]] and [*map(type, others)] == [set, OrderedDict, Counter, deque]
    assert first is by_number[1] and first.values == shared.values and first.whole is found and others[3].maxlen == 3
    assert found.whole == math.inf


def test_a_rate_that_was_changed_stays():
    before = AdaptiveThreshold(0.01)
    for score in range(100):
        before.add(score % 7)
    same, other = AdaptiveThreshold(0.01), AdaptiveThreshold(0.02)
    same.load(before.state())
    other.load(before.state())
    assert vars(same)["_share"] == vars(before)["_share"] and same.rate == 0.01
    assert other.rate == 0.02 and vars(other)["_share"] == pytest.approx(2 * vars(before)["_share"])


def test_saving_changes_nothing():
    lines = request_log(3000, seed=3)
    lines[1390:1390] = [lines[1389]] * 20
    whole = LineJudge(tracker=SessionTracker(60.0))
    expected = [report.score for report in judged(whole, lines)]
    judge, scores = LineJudge(tracker=SessionTracker(60.0)), []
    for begin in range(0, len(lines), 700):
        scores += [report.score for report in judged(judge, lines[begin : begin + 700])]
        state = json.loads(json.dumps(judge.state()))
        judge = LineJudge(tracker=SessionTracker(60.0))
        judge.load(state)
    assert scores == expected
    assert judge.tracker.judge.sessions == whole.tracker.judge.sessions
    whole.tracker.keep(whole.miner.templates)
    judge.tracker.keep(judge.miner.templates)  # as after very many lines
    assert json.dumps(judge.tracker.judge.state()) == json.dumps(whole.tracker.judge.state())


def test_any_line_is_judged():
    judge = LineJudge(tracker=SessionTracker())
    for line in (b"", b" ", bytes(range(256)), b"\x01\x02", b"9" * 4096, b"0x", b"1.2.3.4.5.6" * 300, b"\xff" * 50):
        for _ in range(3):
            assert judge.judge(line).score >= 0
