"""A run of `hf-recurrent watch`: lines of all logs in turn, and everything that is shown, written and saved."""

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent.checkpoints.files import checkpoint_number, list_checkpoints, remove_staging
from hf_recurrent.checkpoints.output_lock import output_lock
from hf_recurrent.data.episode_source import with_unit
from hf_recurrent.interruption import StopRequest, stop_on_signals
from hf_recurrent.learning_rules.rules import NonFiniteLossError
from hf_recurrent.online.learner import OnlineLearner
from hf_recurrent.watch.alerts import AlertCommand
from hf_recurrent.watch.journal import journal_text
from hf_recurrent.watch.line_log import LineLog
from hf_recurrent.watch.line_printer import LinePrinter, finite
from hf_recurrent.watch.log_lines import LogLine
from hf_recurrent.watch.log_sources import LogFile, LogSource, StandardInput
from hf_recurrent.watch.log_watcher import DivergedError, LineReport, LogWatcher, WatchSettings
from hf_recurrent.watch.saved_watch import SavedLog, folder_names, is_watch, read_watch, save_watch

if TYPE_CHECKING:
    from hf_recurrent.watch.metrics import MetricsServer

# Seconds without a line, between two attempts to write, and between two reports of lag or progress.
_IDLE, _RETRY, _BETWEEN_REPORTS = 0.1, 5.0, 60.0
# A log that lags by more seconds than this is reported.
_LAG_SECONDS = 10.0
_COUNTS = ("lines", "unusual", "bytes", "bits", "reverts")


@dataclass(frozen=True)
class WatchOptions:
    """Files and directories of a run.

    Args:
        output_dir: directory of the checkpoints.
        save_every: seconds between two checkpoints.
        restart: remove the checkpoints and start over.
        follow: wait for new lines, instead of reading the files from beginning to end.
        history: where a new log is followed from, in bytes before its end; None for its beginning.
        max_line_bytes: length at which lines are cut.
        format: "text"; "journald" and "auto" also read JSON of journalctl.
        output: file to which every line is appended as JSON.
        metrics: port of the Prometheus metrics.
        alert_command: shell command that is run for every unusual line.
        shows_all: show every line, not only unusual ones.
        color: see [`LinePrinter`].
        quiet: show nothing but unusual lines and problems.
    """

    output_dir: Path
    save_every: float = 300.0
    restart: bool = False
    follow: bool = True
    history: int | None = 64_000
    max_line_bytes: int = 4096
    format: str = "auto"
    output: Path | None = None
    metrics: int | None = None
    alert_command: str | None = None
    shows_all: bool = False
    color: str = "auto"
    quiet: bool = False


@dataclass
class WatchedLog:
    """A log with its watcher; `seconds` and `worked_bytes` measure its speed."""

    source: LogSource
    watcher: LogWatcher
    folder: str
    is_new: bool = True
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))
    last_score: float = 0.0
    last_time: float = 0.0
    seconds: float = 0.0
    worked_bytes: int = 0
    is_lagging: bool = False

    def summary(self) -> str:
        """Numbers of lines, bits per byte and speed."""
        counts = self.counts
        words = f"{self.source.name}: {counts['lines']:,.0f} lines, {counts['unusual']:,.0f} unusual"
        if counts["bytes"]:
            words += f", {counts['bits'] / (counts['bytes'] + counts['lines']):.2f} bits per byte"
        if self.seconds:
            words += f", {with_unit(self.worked_bytes / self.seconds, 'B/s')}"
        return words

    def metrics(self) -> dict[str, float]:
        """Name → value, of [`METRICS`]."""
        counts = self.counts
        return {
            "lines": counts["lines"],
            "unusual_lines": counts["unusual"],
            "bytes": counts["bytes"],
            "bits": counts["bits"],
            "score": self.last_score,
            "threshold": self.watcher.threshold.value,
            "lag_bytes": self.source.lag(),
            "last_line_timestamp_seconds": self.last_time,
            "reverts": counts["reverts"],
        }


@contextmanager
def open_watch(
    options: WatchOptions,
    settings: WatchSettings,
    logs: Sequence[str],
    new_learner: Callable[[], OnlineLearner],
    learning_rate: float | None = None,
) -> Iterator["WatchRun"]:
    """Lock the directory, and open logs and learners, continued at its last checkpoint.

    Args:
        options: of the run.
        settings: of the watchers.
        logs: paths, or "-" for standard input.
        new_learner: builds the learner of a log that no checkpoint has.
        learning_rate: of learners that a checkpoint has; None leaves it.

    Raises:
        OSError, ValueError: the directory is in use, or a log or a checkpoint cannot be read.
        ImportError: prometheus-client is missing.
    """
    directory = options.output_dir
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"`--output_dir` is {str(directory)!r}; it must be a directory.")
    with output_lock(directory):
        checkpoint = _last_checkpoint(directory, options.restart)
        saved, mark = ({}, None) if checkpoint is None else read_watch(checkpoint)
        watched = []
        for log, folder in zip(logs, folder_names(["stdin" if log == "-" else log for log in logs]), strict=True):
            name = "standard input" if log == "-" else log
            before = saved.get(name)
            if before is None:
                learner = new_learner()
            else:
                changes = {} if learning_rate is None else {"learning_rate": learning_rate}
                learner = OnlineLearner.load(Path(checkpoint, before.folder), **changes)
            watched.append(_open_log(options, log, LogWatcher(learner, settings), folder, before))
            if not options.quiet:
                start = "new" if before is None else "continuing"
                print(f"watching {name}: {start}, {watched[-1].source.beginning()}", file=sys.stderr)
        yield WatchRun(options, watched, mark, 0 if checkpoint is None else checkpoint_number(checkpoint))


def _last_checkpoint(directory: Path, restart: bool) -> str | None:
    remove_staging(directory)
    checkpoints = list_checkpoints(directory)
    if foreign := [path for path in checkpoints if not is_watch(path)]:
        raise ValueError(f"`--output_dir` is {str(directory)!r}, where {foreign[0]} is of another command.")
    if restart:
        for path in checkpoints:
            shutil.rmtree(path)
        checkpoints = []
    return checkpoints[-1] if checkpoints else None


def _open_log(
    options: WatchOptions, log: str, watcher: LogWatcher, folder: str, before: SavedLog | None
) -> WatchedLog:
    if before is not None:
        watcher.load(before.watcher)
    if log == "-":
        source: LogSource = StandardInput(options.max_line_bytes)
    else:
        source = LogFile(
            log,
            options.max_line_bytes,
            follow=options.follow,
            history=options.history if options.follow else None,
            position=None if before is None else before.position,
        )
    watched = WatchedLog(source, watcher, folder, before is None)
    if before is not None:
        watched.counts.update(before.counts)
    return watched


class WatchRun:
    """A run that is ready to start.

    Args:
        options: of the run.
        logs: the logs to watch.
        mark: `LineLog.mark` of the checkpoint that is continued.
        number: of that checkpoint, or 0.
    """

    def __init__(
        self, options: WatchOptions, logs: list[WatchedLog], mark: dict[str, Any] | None = None, number: int = 0
    ) -> None:
        self.options, self.logs, self.number = options, logs, number
        self.printer = LinePrinter(options.color, len(logs) > 1)
        self.line_log = None if options.output is None else LineLog(options.output, mark)
        self.metrics = None if options.metrics is None else self._metrics_server(options.metrics)
        self.alerts = None if options.alert_command is None else AlertCommand(options.alert_command)
        self._problems: dict[str, str] = {}
        self._saved_at = self._tried_at = self._reported_at = time.monotonic()
        self._unsaved = False
        if any(log.is_new for log in logs):
            self._save()  # a state to go back to, and a full disk is noticed now

    # ---- Reading ----

    def watch(self) -> str | None:
        """Read until the logs end or a signal arrives, then save; return the error that ended it, if there is one."""
        failure = None
        with stop_on_signals() as stop:
            while not stop.is_set() and not all(log.source.is_finished for log in self.logs):
                try:
                    if not self._read_one_of_each(stop):
                        stop.wait(_IDLE)
                except DivergedError:
                    failure = "the model diverges again after it went back; rerun with --restart, or another --model"
                    break
                self._do_housekeeping()
        self._finish()
        return failure

    def _read_one_of_each(self, stop: StopRequest) -> bool:
        """A line of every log that has one; False if none has."""
        if self.line_log is not None and self.line_log.is_full:
            return False
        has_read = False
        for log in self.logs:
            if stop.is_set():
                break
            line = log.source.next_line()
            self._say_all(log.source)
            if line is not None:
                self._read(log, line)
                has_read = True
        return has_read

    def _read(self, log: WatchedLog, line: LogLine) -> None:
        begin = time.monotonic()
        content = line.content.removesuffix(b"\r")
        if self.options.format != "text":
            text = journal_text(content)
            content = content if text is None else text
        report = self._judge_and_learn(log, line, content)
        self._unsaved = True
        log.last_score, log.last_time = report.score, time.time()
        log.counts["lines"] += 1
        log.counts["unusual"] += report.is_unusual
        log.counts["bytes"] += line.length
        log.counts["bits"] += float(report.bits.sum())
        self._tell(log, line, content, report)
        log.seconds += time.monotonic() - begin
        log.worked_bytes += len(content) + 1

    def _judge_and_learn(self, log: WatchedLog, line: LogLine, content: bytes) -> LineReport:
        """Read a line; if the model diverges, revert to the last checkpoint."""
        try:
            report = log.watcher.judge(content)
        except DivergedError as error:
            self._revert(log, line, str(error))
            report = log.watcher.judge(content)
        try:
            log.watcher.learn(content, report)
        except NonFiniteLossError as error:
            self._revert(log, line, str(error))
        return report

    def _tell(self, log: WatchedLog, line: LogLine, content: bytes, report: LineReport) -> None:
        if report.is_unusual or self.options.shows_all:
            self.printer.show(log.source.name, line.number, content, report)
        if self.line_log is None and not (report.is_unusual and self.alerts):
            return
        record = _record(log.source.name, line, content, report)
        if self.line_log is not None:
            self._write(lambda: self.line_log.add(record))
        if report.is_unusual and self.alerts is not None:
            self.alerts.send(record)

    def _revert(self, log: WatchedLog, line: LogLine, reason: str) -> None:
        """Go back to the weights of the last checkpoint, at half the learning rate."""
        rate = log.watcher.learner.settings.learning_rate / 2
        checkpoint = self.options.output_dir / f"checkpoint-{self.number}"
        learner = OnlineLearner.load(checkpoint / log.folder, learning_rate=rate)
        log.watcher.replace_learner(learner)
        log.counts["reverts"] += 1
        self._say(
            f"{log.source.name}, line {line.number:,}: the model diverged: {reason.rstrip('.')}; back to {checkpoint} "
            f"with learning rate {rate:g}. No line is lost"
        )

    # ---- Between lines ----

    def _do_housekeeping(self) -> None:
        now = time.monotonic()
        if self.alerts is not None:
            for notice in self.alerts.take_notices():
                self._say(notice)
        if self.line_log is not None and not self.line_log.is_complete and now - self._tried_at >= _RETRY:
            self._tried_at = now
            self._write(self.line_log.flush)
        if self._unsaved and now - self._saved_at >= self.options.save_every:
            self._save()
        if now - self._reported_at >= _BETWEEN_REPORTS:
            self._reported_at = now
            self._report()

    def _report(self) -> None:
        for log in self.logs:
            speed = log.worked_bytes / log.seconds if log.seconds else 0.0
            lag = log.source.lag()
            is_lagging = bool(speed) and lag > _LAG_SECONDS * speed
            if is_lagging:
                left = f"{lag / speed:,.0f} s at {with_unit(speed, 'B/s')}"
                self._say(f"{log.source.name}: {with_unit(lag, 'B')} still to read, {left}")
            elif log.is_lagging:
                self._say(f"{log.source.name} is read up to its end again")
            elif not self.options.quiet and sys.stderr.isatty():
                self._say(log.summary())
            log.is_lagging = is_lagging
            log.seconds, log.worked_bytes = log.seconds / 2, log.worked_bytes // 2  # older speeds count less

    def _write(self, action: Any) -> None:
        try:
            action()
            if self._problems.pop("output", None):
                self._say(f"{self.options.output} can be written again; nothing is missing in it")
        except OSError as error:
            reason = f"{self.options.output} cannot be written: {(error.strerror or str(error)).lower()}"
            self._say_once("output", f"{reason}; its lines wait in memory")

    def _save(self) -> None:
        """Write a checkpoint, unless lines wait to be written: what it says was read has to be in the output."""
        self._saved_at = time.monotonic()
        if self.line_log is not None and not self.line_log.is_complete:
            return
        directory = self.options.output_dir
        saved = [
            SavedLog(log.source.name, log.folder, log.watcher.state(), log.source.position(), log.counts)
            for log in self.logs
        ]
        learners = {log.folder: log.watcher.learner for log in self.logs}
        try:
            save_watch(directory, self.number + 1, learners, saved, self.line_log.mark() if self.line_log else None)
        except OSError as error:
            if self.number == 0:
                raise
            self._say_once("save", f"{str(error).rstrip('.')}; trying again in {self.options.save_every:g} seconds")
            return
        self.number += 1
        self._unsaved = False
        if self._problems.pop("save", None):
            self._say("checkpoints can be written again")

    def _finish(self) -> None:
        if self.alerts is not None:
            self.alerts.close()
            for notice in self.alerts.take_notices():
                self._say(notice)
        if self.line_log is not None:
            self._write(self.line_log.flush)
        if self._unsaved:
            self._save()
        if self.metrics is not None:
            self.metrics.close()
        if self._unsaved:
            checkpoint = self.options.output_dir / f"checkpoint-{self.number}"
            self._say(f"the last lines are not saved; the next run continues at {checkpoint} and reads them again")
        if not self.options.quiet:
            for log in self.logs:
                print(log.summary(), file=sys.stderr)
            print(f"Saved in {self.options.output_dir}; the same command continues here.", file=sys.stderr)

    # ---- Messages and metrics ----

    def _say_all(self, source: LogSource) -> None:
        for notice in source.notices:
            self._say(notice)
        source.notices.clear()

    def _say_once(self, key: str, text: str) -> None:
        if self._problems.get(key) != text:
            self._problems[key] = text
            self._say(text)

    def _say(self, text: str) -> None:
        print(f"hf-recurrent watch: {text}", file=sys.stderr, flush=True)

    def _metrics_server(self, port: int) -> "MetricsServer":
        try:
            from hf_recurrent.watch.metrics import MetricsServer
        except ImportError as error:
            raise ImportError("`--metrics` needs prometheus-client: pip install 'hf-recurrent[watch]'.") from error
        return MetricsServer(port, self._samples)

    def _samples(self) -> Iterable[tuple[str, str, float]]:
        for log in self.logs:
            yield from ((name, log.source.name, value) for name, value in log.metrics().items())
        if self.alerts is not None:
            yield "alert_failures", "", self.alerts.failures


def _record(name: str, line: LogLine, content: bytes, report: LineReport) -> dict[str, Any]:
    """A line as JSON."""
    record = {
        "log": name,
        "line_number": line.number,
        "offset": line.offset,
        "bits": finite(float(report.bits.sum())),
        "bits_per_byte": finite(float(report.bits.mean())),
        "score": finite(report.score),
        "threshold": finite(report.threshold),
        "unusual": report.is_unusual,
        "rarity": finite(report.rarity),
        "reason": report.reason,
        "surprising": report.surprising(),
        "text": content.decode("utf-8", "replace"),
    }
    if line.length > len(line.content):
        record["length"] = line.length
    return record
