"""Records in JSON and in syslog's protocol, and times."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_recurrent.watch.log_records import FORMATS, decode_records
from hf_recurrent.watch.timestamps import LogClock, parse_time

SCOPES = [{"scopeLogs": [{"logRecords": [{"body": {"stringValue": "a"}}, {"body": {"intValue": 3}}]}]}]


@pytest.mark.parametrize(
    ("line", "records"),
    [
        (b'{"MESSAGE":"a","__CURSOR":"1","_COMM":"sh"}', [(b"sh: a", None)]),
        (b'{"MESSAGE":"a","__REALTIME_TIMESTAMP":"1700000000500000"}', [(b"a", 1700000000.5)]),
        (b'{"MESSAGE":[104,105,255],"__CURSOR":"1"}', [(b"hi\xff", None)]),
        (b'{"MESSAGE":null,"__CURSOR":"1","_COMM":"sh"}', [(b"sh", None)]),
        (b'{"MESSAGE":["a","b"],"__CURSOR":"1"}', [(b"a", None)]),
        (b'{"log":"up\\n","stream":"stderr","time":"2024-05-01T10:00:00.5Z"}', [(b"up", 1714557600.5)]),
        (b'{"timeUnixNano":"1700000000000000000","severityText":"ERROR","body":"x"}', [(b"ERROR x", 1.7e9)]),
        (json.dumps({"resourceLogs": SCOPES}).encode(), [(b"a", None), (b'{"intValue": 3}', None)]),
        (
            b'{"level":"warn","msg":"slow","ts":1700000000.5,"ms":12,"in":{"a":1}}',
            [(b"WARN slow ms=12", 1700000000.5)],
        ),
        (b"<34>Oct 11 22:14:15 host su: failed", [(b"[crit] Oct 11 22:14:15 host su: failed", None)]),
        (b'<165>1 2003-10-11T22:14:15Z host app 12 ID [x a="b\\]"] hello', [(b"host app hello", 1065910455.0)]),
        (b'{"other": "fields"}', None),
        (b'{"MESSAGE": "cut', None),
        (b"plain text", None),
        (b"<html>", None),
        (b"<999>1 x", None),
        (b'{"a":' * 100_000, None),
    ],
)
def test_records_are_recognized(line, records):
    assert decode_records(line) == records
    assert decode_records(line, "text") is None


NAMES = "MESSAGE __X log stream time resourceLogs scopeLogs logRecords body msg ts timeUnixNano level stringValue"
_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES.split()), inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(_JSON, st.sampled_from(FORMATS))
def test_no_record_raises(value, format):
    for text, time in decode_records(json.dumps(value).encode(), format) or []:
        assert isinstance(text, bytes) and (time is None or isinstance(time, float))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (b"2015-07-29 17:41:44,747", 1438191704.747),
        (b"2005-06-03-15.42.50.675872", 1117813370.675872),
        (b"2024-05-01T10:00:00.123Z", 1714557600.123),
        (b"2024-05-01T10:00:00+02:00", 1714550400.0),
        (b"2005.06.03", 1117756800.0),
        (b"Jun 14 15:16:01", 14224561.0),
        (b"Sun Dec 04 04:47:44 2005", 1133671664.0),
        (b"10/Oct/2000:13:55:36 -0700", 971211336.0),
        (b"17/06/09 20:10:40", 1497039040.0),
        (b"081109 203518", 1226262918.0),
        (b"1700000000", 1700000000.0),
        (b"1700000000123", 1700000000.123),
        (b"12:34:56", 45296.0),
        (b"2024-13-01", None),
        (b"2024-05-01T10:00:00+99:99", None),
        (b"99:99:99", None),
        (b"soon", None),
    ],
)
def test_times(text, seconds):
    assert parse_time(text) == pytest.approx(seconds) if seconds is not None else parse_time(text) is None


@settings(max_examples=300, deadline=None)
@given(st.from_regex(rb"[0-9A-Za-z:., +/-]{0,30}", fullmatch=True))
def test_no_time_raises(text):
    assert parse_time(text) is None or parse_time(text) >= -1e12


def test_times_without_a_year_or_a_date_go_forwards():
    clock = LogClock()
    december, january = clock.time(b"Dec 31 23:59:59"), clock.time(b"Jan  1 00:00:01")
    assert january - december == 2.0
    clock = LogClock()
    evening, morning = clock.time(b"23:59:50"), clock.time(b"00:00:10")
    assert morning - evening == 20.0
    assert clock.time(b"00:00:05") == morning - 5.0  # a little late is not a day later
    assert clock.time(b"23:59:59") == morning - 11.0
