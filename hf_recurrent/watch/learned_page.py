"""The page that `watch learn` writes: templates with their rates, and what would have been flagged."""

import html
from collections.abc import Sequence
from datetime import UTC, datetime

from hf_recurrent.watch.events import Event
from hf_recurrent.watch.line_judge import LineReport
from hf_recurrent.watch.severity import LEVELS
from hf_recurrent.watch.templates import mask_names
from hf_recurrent.watch.watched_log import WatchedLog

BINS = 48


class RateHistory:
    """Lines of each template in 48 equal parts of the log's time, or of its lines if it has no times.

    The parts double whenever the log exceeds them, so that nothing needs to be known of its length.
    """

    def __init__(self) -> None:
        self.begin: float | None = None
        self.width = 1.0
        self.has_times = False
        self.counts: dict[int, list[int]] = {}
        self.lines = 0

    def add(self, report: LineReport, time: float | None) -> None:
        self.lines += 1
        place = self.lines if time is None else time
        if self.begin is None or (time is not None and not self.has_times):
            self.begin, self.has_times, self.width = place, time is not None, 1.0
            self.counts.clear()
        index = int((place - self.begin) / self.width)
        while index >= BINS:
            self.width *= 2
            index //= 2
            self.counts = {number: _halved(counts) for number, counts in self.counts.items()}
        number = report.layout.template.number
        counts = self.counts.get(number)
        if counts is None:
            counts = self.counts[number] = [0] * BINS
        counts[max(index, 0)] += 1


def _halved(counts: list[int]) -> list[int]:
    return [counts[2 * i] + counts[2 * i + 1] for i in range(BINS // 2)] + [0] * (BINS - BINS // 2)


_MOST_TEMPLATES, _MOST_EVENTS = 500, 500
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; border-bottom: 2px solid #888; }
td, th { padding: .25em .6em; vertical-align: top; } tr:nth-child(even) td { background: #f4f4f4; }
code { font-size: 13px; word-break: break-all; } mark { background: #fbb; }
.n { text-align: right; white-space: nowrap; }
svg { vertical-align: middle; } @media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; }
tr:nth-child(even) td { background: #222; } mark { background: #844; color: #fff; } }
"""


def learned_page(logs: Sequence[tuple[WatchedLog, RateHistory, Sequence[Event]]]) -> str:
    """HTML without scripts and other files; all text of the logs is escaped."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>What is usual in these logs</title><style>{_STYLE}</style><h1>What is usual in these logs</h1>",
    ]
    for log, rates, events in logs:
        parts.append(_log(log, rates, events))
    return "\n".join(parts) + "\n"


def _log(log: WatchedLog, rates: RateHistory, events: Sequence[Event]) -> str:
    templates = sorted(log.judge.miner.templates.values(), key=lambda template: -template.count)
    rows = []
    for template in templates[:_MOST_TEMPLATES]:
        level = LEVELS[template.severity] if template.severity else ""
        bars = _sparkline(rates.counts.get(template.number, [0] * BINS))
        rows.append(
            f"<tr><td class=n>{template.count:,}<td class=n>{_rate(template.count, rates)}<td>{bars}<td>{level}"
            f"<td><code>{_text(template.text())}</code>"
        )
    shown = [_event(event) for event in events[:_MOST_EVENTS]]
    more = len(templates) - len(rows)
    unit = "lines an hour" if rates.has_times else "of 1,000 lines"
    return (
        f"<h2>{_text(log.name)}</h2><p>{_text(log.summary())}.</p>{_sessions(log)}"
        f"<h3>Templates</h3><table><tr><th>lines<th>{unit}<th>over the log<th>level<th>template{''.join(rows)}</table>"
        + (f"<p>And {more:,} rarer ones.</p>" if more > 0 else "")
        + f"<h3>What would have been flagged</h3><table><tr><th>line<th>time<th>why<th>text{''.join(shown)}</table>"
        + (f"<p>And {len(events) - len(shown):,} further events.</p>" if len(events) > len(shown) else "")
    )


def _sessions(log: WatchedLog) -> str:
    if not log.counts["sessions"]:
        return "<p>No identifier makes sessions of these lines.</p>"
    kind = log.settings.session or mask_names(log.judge.tracker.finder.kind or b"")
    count, unusual = log.counts["sessions"], log.counts["unusual_sessions"]
    return f"<p>{count:,} sessions by <code>{_text(kind)}</code>, {unusual:,} of them unusual.</p>"


def _event(event: Event) -> str:
    lines = f"{event.first_line:,}" + (f" to {event.last_line:,} ({event.count:,})" if event.count > 1 else "")
    time = "" if event.first_time is None else _time(event.first_time)
    text = event.text.decode("utf-8", "replace")
    if event.span is not None:
        begin, end = (len(event.text[:place].decode("utf-8", "replace")) for place in event.span)
        shown = f"{_text(text[:begin])}<mark>{_text(text[begin:end])}</mark>{_text(text[end:])}"
    else:
        shown = _text(text)
    return f"<tr><td class=n>{lines}<td>{time}<td>{_text(event.summary)} [{event.id}]<td><code>{shown}</code>"


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return ""


def _rate(count: int, rates: RateHistory) -> str:
    if not rates.has_times:
        return f"{1000 * count / max(rates.lines, 1):.3g}"
    used = max((i + 1 for counts in rates.counts.values() for i, number in enumerate(counts) if number), default=1)
    return f"{count / (used * rates.width) * 3600:,.3g}"


def _sparkline(counts: Sequence[int]) -> str:
    highest = max(counts) or 1
    bars = "".join(
        f"<rect x={3 * i} y={20 - max(round(20 * n / highest), 1)} width=2 height={max(round(20 * n / highest), 1)} />"
        for i, n in enumerate(counts)
        if n
    )
    return f"<svg width={3 * BINS} height=20 fill=currentColor>{bars}</svg>"


def _text(text: str) -> str:
    return html.escape("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text))
