"""A run of `hf-recurrent watch`: lines of all logs in turn, and everything that is shown, written and saved."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent.checkpoints.files import checkpoint_number
from hf_recurrent.checkpoints.output_lock import output_lock
from hf_recurrent.interruption import StopRequest, stop_on_signals
from hf_recurrent.online.learner import OnlineLearner
from hf_recurrent.watch.alerts import AlertCommand
from hf_recurrent.watch.line_log import LineLog, line_record
from hf_recurrent.watch.line_printer import LinePrinter
from hf_recurrent.watch.log_lines import LogLine
from hf_recurrent.watch.log_sources import LogFile, LogSource, StandardInput
from hf_recurrent.watch.log_watcher import DivergedError, LogWatcher, WatchSettings
from hf_recurrent.watch.saved_watch import folder_names, last_checkpoint, read_watch, save_watch
from hf_recurrent.watch.watched_log import WatchedLog

if TYPE_CHECKING:
    from hf_recurrent.watch.metrics import MetricsServer

# Seconds without a line, between two attempts to write, and between two reports of lag or progress.
_IDLE, _RETRY, _BETWEEN_REPORTS = 0.1, 5.0, 60.0


@dataclass(frozen=True)
class WatchOptions:
    """The arguments of the command about reading, writing and saving; its help explains them."""

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

    def open_source(self, log: str, position: dict[str, Any] | None) -> LogSource:
        """The lines of a file, or of standard input ("-"), continued at a saved position."""
        if log == "-":
            return StandardInput(self.max_line_bytes)
        history = self.history if self.follow else None
        return LogFile(log, self.max_line_bytes, follow=self.follow, history=history, position=position)


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
    changes = {} if learning_rate is None else {"learning_rate": learning_rate}
    with output_lock(directory):
        checkpoint = last_checkpoint(directory, options.restart)
        saved, mark = ({}, None) if checkpoint is None else read_watch(checkpoint)
        watched, has_changed = [], False
        for log, folder in zip(logs, folder_names(["stdin" if log == "-" else log for log in logs]), strict=True):
            before = saved.get("standard input" if log == "-" else log)
            if before is None:
                learner = new_learner()
            else:
                learner = OnlineLearner.load(Path(checkpoint, before["folder"]), **changes)
            watcher = LogWatcher(learner, settings)
            if before is not None:
                watcher.load(before["watcher"])
            source = options.open_source(log, None if before is None else before["position"])
            watched.append(WatchedLog(source, watcher, folder, parses_journal=options.format != "text"))
            if before is not None:
                watched[-1].counts.update(before["counts"])
            has_changed |= before is None or before["folder"] != folder
            if not options.quiet:
                start = "new" if before is None else "continuing"
                print(f"watching {source.name}: {start}, {source.beginning()}", file=sys.stderr)
        run = WatchRun(options, watched, mark, 0 if checkpoint is None else checkpoint_number(checkpoint))
        if has_changed:
            run.save()  # a state to go back to, and a full disk is noticed now
        yield run


class WatchRun:
    """A run that is ready to start.

    It continues the checkpoint of a number (0 without one), which has a mark of the line log.
    """

    def __init__(self, options: WatchOptions, logs: list[WatchedLog], mark: dict[str, Any] | None, number: int):
        self.options, self.logs, self.number = options, logs, number
        self.printer = LinePrinter(options.color, len(logs) > 1)
        self.line_log = None if options.output is None else LineLog(options.output, mark)
        self.alerts = None if options.alert_command is None else AlertCommand(options.alert_command)
        self.metrics = None if options.metrics is None else self._metrics_server(options.metrics)
        self._problems: dict[str, str] = {}
        self._saved_at = self._tried_at = self._reported_at = time.monotonic()
        self._unsaved = False

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint."""
        return self.options.output_dir / f"checkpoint-{self.number}"

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
            self._say_all(log.source.notices)
            if line is not None:
                self._read(log, line)
                has_read = True
        return has_read

    def _read(self, log: WatchedLog, line: LogLine) -> None:
        try:
            content, report = log.read(line, self.checkpoint)
        finally:
            self._say_all(log.source.notices)
        self._unsaved = True
        if report.is_unusual or self.options.shows_all:
            self.printer.show(log.name, line.number, content, report)
        if self.line_log is None and self.alerts is None:
            return
        record = line_record(log.name, line, content, report)
        if self.line_log is not None:
            self._write(lambda: self.line_log.add(record))
        if report.is_unusual and self.alerts is not None:
            self.alerts.send(record)

    # ---- Between lines ----

    def _do_housekeeping(self) -> None:
        now = time.monotonic()
        if self.alerts is not None:
            self._say_all(self.alerts.notices)
        if self.line_log is not None and not self.line_log.is_complete and now - self._tried_at >= _RETRY:
            self._tried_at = now
            self._write(self.line_log.flush)
        if self._unsaved and now - self._saved_at >= self.options.save_every:
            self.save()
        if now - self._reported_at >= _BETWEEN_REPORTS:
            self._reported_at = now
            for log in self.logs:
                if lag := log.check_lag():
                    self._say(lag)
                elif not self.options.quiet and sys.stderr.isatty():
                    self._say(log.summary())

    def _write(self, action: Callable[[], None]) -> None:
        output = self.options.output
        try:
            action()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            self._report_problem("output", f"{output} cannot be written: {reason}; its lines wait in memory")
        else:
            self._report_end("output", f"{output} can be written again; nothing is missing in it")

    def save(self) -> None:
        """Write a checkpoint, unless lines wait to be written: what it says was read has to be in the output."""
        self._saved_at = time.monotonic()
        if self.line_log is not None and not self.line_log.is_complete:
            return
        self.number += 1
        try:
            save_watch(self.checkpoint, self.logs, self.line_log.mark() if self.line_log else None)
        except OSError as error:
            self.number -= 1
            if self.number == 0:
                raise
            reason = str(error).rstrip(".")
            self._report_problem("save", f"{reason}; trying again in {self.options.save_every:g} seconds")
        else:
            self._unsaved = False
            self._report_end("save", "checkpoints can be written again")

    def _finish(self) -> None:
        if self.alerts is not None:
            self.alerts.close()
            self._say_all(self.alerts.notices)
        if self.line_log is not None:
            self._write(self.line_log.flush)
        if self._unsaved:
            self.save()
        if self.metrics is not None:
            self.metrics.close()
        if self._unsaved:
            self._say(
                f"the last lines are not saved; the next run continues at {self.checkpoint} and reads them again"
            )
        if not self.options.quiet:
            for log in self.logs:
                print(log.summary(), file=sys.stderr)
            print(f"Saved in {self.options.output_dir}; the same command continues here.", file=sys.stderr)

    # ---- Messages and metrics ----

    def _say(self, text: str) -> None:
        print(f"hf-recurrent watch: {text}", file=sys.stderr, flush=True)

    def _say_all(self, notices: list[str]) -> None:
        """Show messages once each, and remove them from the list."""
        while notices:
            self._say(notices.pop(0))

    def _report_problem(self, key: str, text: str) -> None:
        if self._problems.get(key) != text:
            self._problems[key] = text
            self._say(text)

    def _report_end(self, key: str, text: str) -> None:
        if self._problems.pop(key, None):
            self._say(text)

    def _metrics_server(self, port: int) -> "MetricsServer":
        try:
            from hf_recurrent.watch.metrics import MetricsServer
        except ImportError as error:
            raise ImportError("`--metrics` needs prometheus-client: pip install 'hf-recurrent[watch]'.") from error
        return MetricsServer(port, self._samples)

    def _samples(self) -> Iterable[tuple[str, str, float]]:
        for log in self.logs:
            yield from ((name, log.name, value) for name, value in log.metrics().items())
        if self.alerts is not None:
            yield "alert_failures", "", self.alerts.failures
