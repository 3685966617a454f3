"""A run of `hf-recurrent watch`: lines of all logs in turn, and everything that is shown, written and saved."""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_recurrent.argument_checks import import_optional
from hf_recurrent.checkpoints.output_lock import output_lock
from hf_recurrent.interruption import StopRequest, stop_on_signals
from hf_recurrent.online.line_file import LineFile
from hf_recurrent.watch.alerts import AlertCommand, AlertSender, Webhook
from hf_recurrent.watch.compressed_log import ENDINGS, CompressedLog, RotatedLog
from hf_recurrent.watch.event_printer import EventPrinter
from hf_recurrent.watch.events import Event, IgnoredEvents
from hf_recurrent.watch.log_sources import LogFile, LogSource, StandardInput
from hf_recurrent.watch.redaction import Redactor
from hf_recurrent.watch.saved_state import FILE, read_watch, save_watch
from hf_recurrent.watch.watched_log import Findings, WatchedLog, WatchSettings

# Seconds without a line, between two attempts to write, and between two reports of lag or progress.
_IDLE, _RETRY, _BETWEEN_REPORTS = 0.1, 5.0, 60.0
# Bytes that wait to be written at which reading pauses.
_MOST_WAITING = 8 << 20
# Lines of a log that are read before the next log has its turn; and the files that are written.
_BATCH = 1024
OUTPUTS = ("output", "output_sessions", "output_events")


class RecordFile(LineFile):
    """JSON lines that are appended to a file; records that cannot be written wait.

    If the `mark` of the saved state is of this file, later lines are removed, because they are written again.
    """

    def __init__(self, path: str | os.PathLike, mark: Mapping[str, Any] | None = None):
        super().__init__(path)
        self.path = path
        own = self.mark()
        if mark is not None and self.is_regular and mark["file"] == own["file"] and mark["size"] < own["size"]:
            self.truncate(mark["size"])
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0

    def mark(self) -> dict[str, Any]:
        """JSON with the identity of the file and its size."""
        status = self.status()
        return {"file": [status.st_dev, status.st_ino], "size": status.st_size}

    @property
    def is_complete(self) -> bool:
        """True if no record waits."""
        return not self._waiting

    @property
    def is_full(self) -> bool:
        """True if too many records wait to read further lines."""
        return self._waiting_bytes >= _MOST_WAITING

    def add(self, records: bytes) -> None:
        """Write the records that wait, and these whole JSON lines.

        After an OSError, the rest of the records waits, and the file ends with a whole one.
        """
        if records:
            self._waiting.append(records)
            self._waiting_bytes += len(records)
        while self._waiting:
            self.append(self._waiting[0])
            self._waiting_bytes -= len(self._waiting.popleft())


@dataclass(frozen=True)
class WatchOptions:
    """The arguments of the command about reading, results and saving; its help explains them."""

    output_dir: Path
    follow: bool = True
    history: int | None = 64_000
    rotated: bool = False
    max_line_bytes: int = 4096
    redact: bool = False
    redact_pattern: tuple[str, ...] = ()
    save_every: float = 300.0
    restart: bool = False
    output: Path | None = None
    output_sessions: Path | None = None
    output_events: Path | None = None
    metrics: int | None = None
    alert_command: str | None = None
    webhook: str | None = None
    explain: bool = False
    json: bool = False
    color: str = "auto"
    quiet: bool = False

    def open_source(self, log: str, position: dict[str, Any] | None) -> LogSource:
        """The lines of a file, or of standard input ("-"), continued at a saved position."""
        if log == "-":
            return StandardInput(self.max_line_bytes)
        if log.endswith(ENDINGS):
            return CompressedLog(log, self.max_line_bytes, position)
        if self.rotated:
            return RotatedLog(log, self.max_line_bytes, follow=self.follow, position=position)
        history = self.history if self.follow else None
        return LogFile(log, self.max_line_bytes, follow=self.follow, history=history, position=position)

    def redactor(self) -> Redactor | None:
        return Redactor(self.redact_pattern) if self.redact or self.redact_pattern else None


@contextmanager
def open_watch(options: WatchOptions, settings: WatchSettings, logs: Sequence[str]) -> Iterator["WatchRun"]:
    """Lock the directory, and open the logs (paths, or "-" for standard input), continued at the saved state."""
    directory = options.output_dir
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"`--output_dir` is {str(directory)!r}; it must be a directory.")
    with output_lock(directory):
        if foreign := next((path for path in directory.glob("checkpoint-*") if path.is_dir()), None):
            raise ValueError(f"`--output_dir` is {str(directory)!r}, where {foreign} is of another command.")
        if options.restart:
            (directory / FILE).unlink(missing_ok=True)
        state = read_watch(directory) or {"logs": [], "outputs": {}}
        try:
            saved = {log["name"]: log for log in state["logs"]}
            marks = dict(state["outputs"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"The state {str(directory / FILE)!r} is damaged; use --restart.") from error
        outputs = {"lines": options.output, "sessions": options.output_sessions}
        makes = [name for name, path in outputs.items() if path is not None]
        watched = []
        for log in logs:
            before = saved.pop("standard input" if log == "-" else log, None)
            source = options.open_source(log, None if before is None else before["position"])
            watched.append(WatchedLog(source, settings, options.redactor(), makes=makes))
            if before is not None:
                watched[-1].load(before)
            if not options.quiet:
                start = "new" if before is None else "continuing"
                print(f"watching {watched[-1].name}: {start}, {watched[-1].source.beginning()}", file=sys.stderr)
        run = WatchRun(options, watched, marks, [*saved.values()])
        run.save()  # a full disk is noticed now
        yield run


class WatchRun:
    """A run that is ready to start.

    Args:
        marks: name of an output → `RecordFile.mark` of the state that is continued.
        others: saved states of logs that this run does not read; they are kept.
    """

    def __init__(
        self, options: WatchOptions, logs: list[WatchedLog], marks: dict[str, Any], others: list[dict[str, Any]]
    ):
        self.options, self.logs = options, logs
        self.printer = EventPrinter(options.color, len(logs) > 1)
        paths = {name: getattr(options, name) for name in OUTPUTS}
        self.outputs = {name: RecordFile(path, marks.get(name)) for name, path in paths.items() if path is not None}
        self.senders: list[AlertSender] = []
        if options.alert_command is not None:
            self.senders.append(AlertCommand(options.alert_command))
        if options.webhook is not None:
            self.senders.append(Webhook(options.webhook))
        self.ignored = IgnoredEvents(options.output_dir)
        self.metrics = None
        if options.metrics is not None:
            problem = "`--metrics` needs prometheus-client: pip install 'hf-recurrent[watch]'."
            module = import_optional("hf_recurrent.watch.metrics", problem)
            self.metrics = module.MetricsServer(options.metrics, logs, self.senders)
        self.on_event: Callable[[WatchedLog, Event], None] | None = None
        self._others = others
        self._problems: dict[str, str] = {}
        self._saved_at = self._tried_at = self._reported_at = time.monotonic()
        self._unsaved = False

    # ---- Reading ----

    def watch(self) -> None:
        """Read until the logs end or a signal arrives, then save; an OSError if the last lines cannot be saved."""
        with stop_on_signals() as stop:
            while not stop.is_set() and not all(log.source.is_finished for log in self.logs):
                if not self._read_one_of_each(stop):
                    stop.wait(_IDLE)
                self._do_housekeeping()
        self._finish(has_ended=not stop.is_set())

    def _read_one_of_each(self, stop: StopRequest) -> bool:
        """A batch of every log that has one; False if none has."""
        if any(output.is_full for output in self.outputs.values()):
            return False
        has_read = False
        for log in self.logs:
            if stop.is_set():
                break
            batch = log.source.read_lines(_BATCH)
            self._say_all(log.source.notices)
            if batch is not None:
                self._unsaved = has_read = True
                self._give(log, log.read(batch, self.ignored))
        return has_read

    def _give(self, log: WatchedLog, findings: Findings) -> None:
        """Show, write and send what was found."""
        records = [event.record(log.name, has_ended=has_ended) for event, has_ended in findings.events]
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        for (event, has_ended), line in zip(findings.events, lines, strict=True):
            if self.on_event is not None and not has_ended:
                self.on_event(log, event)
            if self.options.json:
                print(line, end="", flush=True)
            elif has_ended:
                self.printer.show_ended(log.name, event)
            else:
                self.printer.show(log.name, event, explains=self.options.explain)
        for sender in self.senders:
            for record in records:
                sender.send(record)
        texts = {"output": findings.lines, "output_sessions": findings.sessions, "output_events": lines}
        for name, output in self.outputs.items():
            if texts[name]:
                self._write(name, output, "".join(texts[name]).encode("utf-8", "backslashreplace"))

    # ---- Between batches ----

    def _do_housekeeping(self) -> None:
        now = time.monotonic()
        self.ignored.look()
        for sender in self.senders:
            self._say_all(sender.notices)
        if now - self._tried_at >= _RETRY:
            self._tried_at = now
            for name, output in self.outputs.items():
                if not output.is_complete:
                    self._write(name, output)
        if self._unsaved and now - self._saved_at >= self.options.save_every:
            self.save()
        if now - self._reported_at >= _BETWEEN_REPORTS:
            self._reported_at = now
            for log in self.logs:
                if lag := log.check_lag():
                    self._say(lag)
                elif not self.options.quiet and sys.stderr.isatty():
                    self._say(log.summary())

    def _write(self, name: str, output: RecordFile, records: bytes = b"") -> None:
        try:
            output.add(records)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            self._report_problem(name, f"{output.path} cannot be written: {reason}; its lines wait in memory")
        else:
            self._report_end(name, f"{output.path} can be written again; nothing is missing in it")

    def save(self) -> None:
        """Write the state, unless records wait to be written: the outputs must have all that was read."""
        self._saved_at = time.monotonic()
        if not all(output.is_complete for output in self.outputs.values()):
            return
        marks = {name: output.mark() for name, output in self.outputs.items()}
        try:
            logs = [*self._others, *(log.state() for log in self.logs)]
            save_watch(self.options.output_dir, {"logs": logs, "outputs": marks})
        except OSError as error:
            if not (self.options.output_dir / FILE).exists():
                raise
            reason = str(error).rstrip(".")
            self._report_problem("save", f"{reason}; trying again in {self.options.save_every:g} seconds")
        else:
            self._unsaved = False
            self._report_end("save", "the state can be written again")

    def _finish(self, *, has_ended: bool) -> None:
        if has_ended:
            for log in self.logs:
                self._give(log, log.finish())
                self._unsaved = True
        for sender in self.senders:
            sender.close()
            self._say_all(sender.notices)
        for name, output in self.outputs.items():
            self._write(name, output)
        if self._unsaved:
            self.save()
        if self.metrics is not None:
            self.metrics.close()
        if not self.options.quiet:
            for log in self.logs:
                print(log.summary(), file=sys.stderr)
        if self._unsaved:
            raise OSError("The last lines are not saved; the next run reads them again.")
        if not self.options.quiet:
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
