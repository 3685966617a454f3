"""`LineJudge`: how unusual each line of a log is, given the lines before it."""

import math
from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from hf_recurrent.watch.saved_state import Saved
from hf_recurrent.watch.session_tracker import SessionTracker
from hf_recurrent.watch.slots import BUCKETS, FREQUENT, NEAR, IndirectShares, counted_share, usual_share
from hf_recurrent.watch.tail_histogram import WINDOW, AdaptiveThreshold, TailHistogram
from hf_recurrent.watch.templates import Layout, Template, TemplateMiner, Variant
from hf_recurrent.watch.timestamps import LogClock
from hf_recurrent.watch.variables import digits_masked

# Lines of a kind before it counts as regular, and how many times its longest gap is silence.
_LEAST_LINES, _TIMES = 12, 3.0
# The longest gap is one of the last 512 to 1,024 gaps of a kind.
_GENERATION = 512
# Lines between two looks, at most.
_BETWEEN_LOOKS = 256


class Regularity(Saved):
    """Gaps between the lines of each kind, in lines: in a quiet night, nothing is silent."""

    __slots__ = ("_gaps", "next_look")

    def __init__(self) -> None:
        # Kind → [lines, last line, longest gap of this and of the last generation, is silent, template].
        self._gaps: dict[int, list[int]] = {}
        self.next_look = 0.0  # the line at which something may become silent

    def add(self, kinds: tuple[int, int], line: int) -> None:
        """Note a line of these kinds, of which the last one is its template."""
        for kind in kinds:
            gaps = self._gaps.get(kind)
            if gaps is None:
                self._gaps[kind] = [1, line, 0, 0, 0, kinds[1]]
                continue
            gap = line - gaps[1]
            gaps[0] += 1
            gaps[1] = line
            if gap > gaps[2]:
                gaps[2] = gap
            gaps[4] = 0
            if not gaps[0] % _GENERATION:
                gaps[2], gaps[3] = 0, gaps[2]

    def silent(self, line: int) -> tuple[int, float, float] | None:
        """The template of a kind that becomes silent at this line, its longest gap, and how many times that it is."""
        earliest, found = math.inf, None
        for gaps in self._gaps.values():
            if gaps[0] < _LEAST_LINES or gaps[4]:
                continue
            longest = max(gaps[2], gaps[3])
            due = gaps[1] + _TIMES * longest + 1
            if line < due:
                earliest = min(earliest, due)
            elif found is None or found[1] == gaps[1]:  # of the same lines: a template and its only variant
                gaps[4] = 1
                found = found or (gaps[5], gaps[1], longest)
            else:
                earliest = line + 1
        self.next_look = min(earliest, line + _BETWEEN_LOOKS)
        return None if found is None else (found[0], found[2], (line - found[1]) / max(found[2], 1))

    def keep(self, templates: Container[int]) -> None:
        """Forget what belongs to other templates."""
        self._gaps = {kind: gaps for kind, gaps in self._gaps.items() if gaps[5] in templates}


# Measures that are ranked among the recent lines, and their weights. Those of a group tell the same, so that the
# highest one counts.
_WEIGHTS = {
    "new_template": 0.2,
    "new_variant": 1.1,
    "new_words": 1.35,
    "shape": 1.0,
    "value": 0.6,
    "after": 0.6,
    "after_template": 0.95,
    "before": 1.3,
    "before_template": 0.7,
    "session_after": 0.8,
    "repeated": 0.7,
    "duplicate": 1.3,
    "frequent": 0.35,
    "severity": 1.1,
    "silence": 0.9,
}
_CORRECTED = ("after", "before", "after_template", "before_template")  # by what came in the same state
# Power of the norm that joins the groups: a single high rarity counts nearly alone.
_NORM = 6
# Weight of the higher one of the ranks of a successor and of a predecessor.
_HIGHER = 0.6
# Bits of shape for each digit beyond one that a number has more than all before it.
_DIGIT_BITS = 4.0
# Pseudo-counts: of all slots for the values of a slot, of all lines for the successors of one.
_SLOT_PRIOR, _ORDER_PRIOR = 8.0, 1.0
# Lines of a slot before its values are compared.
_LEAST_SEEN = 8
# New lines often come together, as at a start: how fast that is forgotten, and what counts as new.
_NOVEL_DECAY, _NOVEL_BITS, _NOVEL_WORDS = 0.8, 2.5, 3.0
# Weight of each rank of severity, and lines of each rank that are taken to have come before.
_SEVERITY_WEIGHTS = (0.0, 0.8, 0.8, 0.8, 1.3, 2.5, 2.5)
_SEVERITY_PRIOR = (50.0, 5.0, 1.5, 0.0, 0.5, 0.25, 0.25)
REASONS = ("new", "value", "order", "repeated", "frequent", "severity", "silence")
NEW, VALUE, ORDER, REPEATED, FREQUENT_HERE, SEVERITY, SILENCE = range(len(REASONS))


@dataclass(slots=True)
class LineReport:
    """How unusual a line is.

    Args:
        score: norm of order 6 of the rarities, in bits; 0 for a line like many others.
        reason: index in `REASONS` of the highest rarity.
        span: begin and end of the rare value in the line, or None.
        is_unusual: the score exceeds the threshold.
    """

    score: float
    reason: int
    span: tuple[int, int] | None
    layout: Layout
    is_unusual: bool


class LineJudge(Saved):
    """Judges the lines of one log and learns from them; nothing needs to be known of the log.

    Each measure of a line is a probability that was counted in this log: of a template, a value, or a successor that
    has come so rarely. Its rarity is its rank among the measures of the recent lines, so that a log in which rare
    things are usual has no alarm at each. Memory is bounded; the time of a line does not grow with the log.

    Args:
        rate: share of the lines to flag while nothing is wrong.
        tracker: of the log's sessions, whose order of lines is judged too; None for one with the default settings.

    Attributes:
        time: of the judged line or the last one that has a time, in seconds since 1970, or None.
        previous: the variant of the line before the judged one, or None.
        session_is_rarer: the line is less expected in its session than in the log.
        silence: template that is silent at the judged line, its longest gap in lines and how many times that, or None.
    """

    def __init__(self, rate: float = 0.01, tracker: SessionTracker | None = None):
        self.miner, self.tracker = TemplateMiner(), tracker or SessionTracker()
        self.regularity, self.clock = Regularity(), LogClock()
        self.time: float | None = None
        self.session_is_rarer = False
        self.number = 0
        self.previous: Variant | None = None
        self.silence: tuple[int, float, float] | None = None
        self.threshold = AdaptiveThreshold(rate)
        self.lines = 0.0  # halved together with all counts of measures
        self._ranks = {name: TailHistogram(weight=weight) for name, weight in _WEIGHTS.items()}
        self._low = {
            name: [0.0] * BUCKETS for name in ("template", "variant", "value", "shape", "after", "after_template")
        }
        self._shares = {name: IndirectShares() for name in _CORRECTED}
        self._values = 0.0
        self._severities = [*_SEVERITY_PRIOR]
        self._last: Variant | None = None
        self._texts: deque[bytes] = deque(maxlen=NEAR)
        self._lines_near: deque[bytes] = deque(maxlen=NEAR)
        self._numbers: deque[int] = deque(maxlen=NEAR)
        self._novel = 0.0

    def judge(self, line: bytes, time: float | None = None) -> LineReport:
        """Score a line, without its end, and learn from it; its time, in seconds since 1970, may be in the line."""
        key = digits_masked(line)
        layout = self.miner.layouts.get(key)
        words = 0
        if layout is None:
            layout, words = self.miner.new_layout(line, key)
        variant, template = layout.variant, layout.template
        self.number += 1
        if time is None and layout.clock is not None:
            time = self.clock.time(line[layout.clock[0] : layout.clock[1]])
        if time is not None:
            self.time = time
        self._novel *= _NOVEL_DECAY
        rarities: list[tuple[float, int, tuple[int, int] | None]] = []
        if words or variant.count < FREQUENT:
            rarities.append((self._novelty(variant, template, words), NEW, None))
        if layout.checks or layout.shapes:
            value, span = self._value(line, layout)
            rarities.append((value, VALUE, span))
        order = self._order(self._last, variant) if self._last is not None else 0.0
        self.session_is_rarer = False
        bits = self.tracker.read(line, layout, self.number, self.number if self.time is None else self.time)
        if bits:
            rank = self._rank("session_after", bits)
            self.session_is_rarer = rank > order
            order = max(order, rank)
        if order:
            rarities.append((order, ORDER, None))
        self._repetition(line, layout, template, rarities)
        if template.severity:
            rarities.append((self._severity(template.severity), SEVERITY, None))
        self._severities[template.severity] += 1
        self._silence(variant, rarities)
        template.count += 1
        variant.count += 1
        self.previous, self._last = self._last, variant
        self.lines += 1
        if self.lines >= WINDOW:
            self._halve()
        if not rarities:
            return LineReport(0.0, 0, None, layout, self.threshold.add(0.0))
        total, highest, reason, span = 0.0, -1.0, 0, None
        for rarity, kind, where in rarities:
            total += rarity**_NORM
            if rarity > highest:
                highest, reason, span = rarity, kind, where
        if reason == NEW:
            span = next((where for _, kind, where in rarities if kind == VALUE), None)
        score = total ** (1 / _NORM)
        return LineReport(score, reason, span, layout, self.threshold.add(score))

    # ---- Measures ----

    def _rank(self, name: str, value: float) -> float:
        return self._ranks[name].rarity(value, self.lines)

    def _novelty(self, variant: Variant, template: Template, words: int) -> float:
        """New templates, words and combinations of words; less so if new lines have just come."""
        highest = 0.0
        is_novel = False
        for name, count in (("template", template.count), ("variant", variant.count)):
            if count < FREQUENT:
                low, bucket = self._low[name], count.bit_length()
                value = math.log2((self.lines + 1) / (sum(low[: bucket + 1]) + 0.5))
                low[bucket] += 1
                rank = self._rank(f"new_{name}", value) if value > 0 else 0.0
                is_novel |= name == "template" and rank > _NOVEL_BITS * _WEIGHTS["new_template"]
                highest = max(highest, rank)
        if words:
            rank = self._rank("new_words", words)
            is_novel |= rank > _NOVEL_WORDS * _WEIGHTS["new_words"]
            highest = max(highest, rank)
        highest -= math.log2(1 + self._novel)
        self._novel += is_novel
        return max(highest, 0.0)

    def _value(self, line: bytes, layout: Layout) -> tuple[float, tuple[int, int] | None]:
        """Values that came rarely at their place, or have a rare shape or more digits than usual; and where."""
        highest, span = 0.0, None
        if layout.shapes:
            highest, span = self._shape(layout)
        lowest, where, has_identifiers = 1.0, None, False
        everywhere, lines = self._low["value"], layout.template.count
        for begin, end, slot in layout.checks:
            values = slot.values
            if values is None:
                has_identifiers = True
                continue
            value = line[begin:end]
            count = values.get(value, 0)
            if count < FREQUENT:
                seen = lines - slot.born
                share = counted_share(slot.low, seen, everywhere, self._values, count, _SLOT_PRIOR)
                if seen >= _LEAST_SEEN and share < lowest:
                    lowest, where = share, (begin, end)
                slot.add(value, count, seen)
            else:
                values[value] = count + 1
            self._values += 1
        if has_identifiers:
            layout.checks = [check for check in layout.checks if check[2].values is not None]
        if lowest < 1 and (rank := self._rank("value", -math.log2(lowest))) > highest:
            highest, span = rank, where
        return highest, span

    def _shape(self, layout: Layout) -> tuple[float, tuple[int, int] | None]:
        """The rarest shape of a value, and where."""
        highest, span, has_frequent = 0.0, None, False
        everywhere, lines = self._low["shape"], layout.template.count
        for begin, end, slot, shape, longest in layout.shapes:
            if shape.count >= FREQUENT:
                has_frequent = True
                continue
            seen = lines - slot.born
            share = counted_share(slot.shapes_low, seen, everywhere, self._values, shape.count, _SLOT_PRIOR)
            bits = -math.log2(min(share, 1.0))
            if seen >= 4:
                bits += _DIGIT_BITS * max(slot.excess(shape, longest, seen) - 1, 0)
            if bits > highest and seen:
                highest, span = bits, (begin, end)
            slot.add_shape(shape, longest)
        if has_frequent:
            layout.shapes = [entry for entry in layout.shapes if entry[3].count < FREQUENT]
        return (self._rank("shape", highest) if highest else 0.0), span

    def _order(self, last: Variant, variant: Variant) -> float:
        """Successors and predecessors that came rarely, of equal lines and of templates."""
        after, before = self._pair(last, variant, "after", "before")
        of_template = self._pair(last.template, variant.template, "after_template", "before_template")
        ranks = max(after, of_template[0]), max(before, of_template[1])
        return _HIGHER * max(ranks) + (1 - _HIGHER) * min(ranks)

    def _pair(
        self, last: Variant | Template, this: Variant | Template, after: str, before: str
    ) -> tuple[float, float]:
        order = last.order
        count = order.after.get(this.number, 0)
        shares_after, shares_before = self._shares[after], self._shares[before]
        if count >= FREQUENT:
            order.after[this.number] = count + 1
            shares_after.add_frequent(order.after_low, last.count)
            shares_before.add_frequent(this.order.before_low, this.count)
            return 0.0, 0.0
        bucket, everywhere = count.bit_length(), self._low[after]
        ranks = 0.0, 0.0
        if last.count and this.count:
            usual = usual_share(everywhere, self.lines, bucket)
            forward = shares_after.share(order.after_low, last.count, usual, bucket, _ORDER_PRIOR)
            backward = shares_before.share(this.order.before_low, this.count, usual, bucket, _ORDER_PRIOR)
            ranks = (
                self._ranks[after].rarity(-math.log2(forward), self.lines) if forward < 1 else 0.0,
                self._ranks[before].rarity(-math.log2(backward), self.lines) if backward < 1 else 0.0,
            )
        order.after_low[bucket] += 1
        this.order.before_low[bucket] += 1
        everywhere[bucket] += 1
        order.add(this.number, count)
        return ranks

    def _repetition(self, line: bytes, layout: Layout, template: Template, rarities: list[Any]) -> None:
        """Equal lines among the last 16, and lines of the template if their number is rare."""
        text = line[: layout.prefix] + line[layout.suffix :] if layout.clock else line
        repeated = self._texts.count(text)
        if repeated:
            rarity = self._rank("repeated", repeated)
            if layout.clock and (equal := self._lines_near.count(line)):
                rarity = max(rarity, self._rank("duplicate", equal))
            rarities.append((rarity, REPEATED, None))
        near = self._numbers.count(template.number)
        if near > 1:
            share = (sum(template.near[near:]) + 0.5) / (template.count + 1)
            if share < 1:
                rarities.append((self._rank("frequent", -math.log2(share)), FREQUENT_HERE, None))
        template.near[near] += 1
        self._numbers.append(template.number)
        self._texts.append(text)
        self._lines_near.append(line)

    def _silence(self, variant: Variant, rarities: list[Any]) -> None:
        """Lines that came regularly and have not come for too long."""
        self.silence = None
        if self.number >= self.regularity.next_look:
            self.silence = self.regularity.silent(self.number)
        if self.silence is not None:
            rarities.append((self._rank("silence", math.log2(self.silence[2])), SILENCE, None))
        self.regularity.add((variant.number, variant.template.number), self.number)

    def _severity(self, severity: int) -> float:
        counts = self._severities
        value = math.log2(sum(counts) / (sum(counts[severity:]) + 1e-9))
        return self._rank("severity", value) * _SEVERITY_WEIGHTS[severity] if value > 0 else 0.0

    def _halve(self) -> None:
        """Halve all counts, so that old lines count less, and forget what belongs to forgotten templates."""
        self.regularity.keep(self.miner.templates)
        self.tracker.keep(self.miner.templates)
        self.lines /= 2
        self._values /= 2
        for ranks in self._ranks.values():
            ranks.halve()
        for shares in self._shares.values():
            shares.halve()
        for name, low in self._low.items():
            self._low[name] = [count / 2 for count in low]
        self._severities = [count / 2 for count in self._severities]
