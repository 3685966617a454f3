"""Templates, layouts and slots of lines."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_recurrent.watch import templates as templates_module
from hf_recurrent.watch.line_judge import LineJudge
from hf_recurrent.watch.severity import severity_of
from hf_recurrent.watch.templates import TemplateMiner
from hf_recurrent.watch.variables import MOST_LINE_WORDS, Masked, digits_masked


def template_of(miner, line):
    key = digits_masked(line)
    layout = miner.layouts.get(key) or miner.new_layout(line, key)[0]
    layout.template.count += 1
    return layout.template


def test_variables_are_masked():
    line = b"2024-05-01 10:00:01,5 node 10.0.0.7:80 id 0x7f3a req 3f9a01bcde took -12.5 ms at /var/log1"
    words = b"\x01 node \x04 id \x03 req \x03 took \x05 ms at /var/log\x05"
    assert Masked(line).tokens == words.split(b" ")
    assert Masked(b"Jun 14 15:16:01 combo sshd[19939]: ok").tokens == [b"\x01", b"combo", b"sshd[\x05]:", b"ok"]
    uuid = b"id 123e4567-e89b-12d3-a456-426614174000 done"
    assert Masked(uuid).tokens == [b"id", b"\x02", b"done"]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_masked_at_their_places(line):
    masked = Masked(line)
    assert len(masked.filled) == len(line) and len(masked.tokens) == len(masked.spans)
    for byte, filled in zip(line, masked.filled, strict=True):
        assert 1 <= filled <= 5 or filled == (ord("?") if 1 <= byte <= 5 else byte)
    assert all(masked.filled[a:b].split() == [masked.filled[a:b]] for a, b in masked.spans)


def test_lines_that_differ_in_variables_share_a_template():
    miner = TemplateMiner()
    names = [b"ann", b"bob", b"cy"] * 9
    lines = [b"%d: user %s logged in from 10.0.0.%d port %d" % (n, name, n, 1000 + n) for n, name in enumerate(names)]
    found = {template_of(miner, line).number for line in lines}
    assert len(found) == 1 and len(miner.templates) == 1
    assert next(iter(miner.templates.values())).text() == "<number>: user <*> logged in from <address> port <number>"
    assert template_of(miner, b"disk full").number not in found


def test_a_hostile_log_needs_bounded_memory(monkeypatch):
    for name, size in (("MOST_LAYOUTS", 64), ("MOST_VARIANTS", 64), ("MOST_TEMPLATES", 32), ("MOST_WORDS", 100)):
        monkeypatch.setattr(templates_module, name, size)
    rng, judge = random.Random(0), LineJudge()
    for _ in range(2000):
        words = [bytes(rng.choices(b"abcdefghij", k=8)) for _ in range(rng.randrange(1, 9))]
        judge.judge(b" ".join(words))
    miner = judge.miner
    assert len(miner.layouts) <= 64 and len(miner.variants) <= 64 and len(miner.templates) <= 64
    assert len(miner.words) <= 100 and sum(map(len, miner._groups.values())) == len(miner.templates)


def test_words_and_bytes_of_long_lines_are_bounded(monkeypatch):
    for name, size in (("MOST_TEMPLATE_WORDS", 4000), ("MOST_VARIANT_WORDS", 6000), ("MOST_LAYOUT_BYTES", 20_000)):
        monkeypatch.setattr(templates_module, name, size)
    rng, judge = random.Random(0), LineJudge()
    for _ in range(60):
        judge.judge(b" ".join(bytes(rng.choices(b"abcdefghij", k=4)) for _ in range(rng.randrange(1, 3000))))
        judge.judge(b"a usual line")
        miner = judge.miner
        words = [len(template.tokens) for template in miner.templates.values()]
        assert max(words) <= MOST_LINE_WORDS and sum(words) == miner._template_words < 4000 + MOST_LINE_WORDS
        assert sum(map(len, miner.variants)) == miner._variant_words < 6000 + MOST_LINE_WORDS
        assert sum(map(len, miner.layouts)) == miner._layout_bytes < 20_000 + 15_000
    assert max(template.count for template in miner.templates.values()) == 60  # the common one is kept


def test_severity():
    lines = (b"INFO started", b"WARN slow", b"INFO write failed", b"ERROR x", b"FATAL y")
    assert [severity_of(line) for line in lines] == [0, 1, 2, 4, 5]
    assert severity_of(b"RAS KERNEL FATAL data TLB error interrupt") == 6
    assert severity_of(b"[Sun Dec 04 04:47:44 2005] [error] mod_jk") == 4
    assert severity_of(b'{"level": "fatal"} stop') == 5
