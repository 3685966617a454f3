"""How often each template came over a log, for the page about it."""

from hf_recurrent.watch.line_judge import LineReport

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
        """Count a line."""
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
