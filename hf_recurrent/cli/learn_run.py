"""A run of `hf-recurrent learn`: learning, and the records and checkpoints written on the way."""

import argparse
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError

from hf_recurrent.checkpoints.data_facts import describe_data
from hf_recurrent.checkpoints.files import list_checkpoints, new_staging_directory, publish_files, staging_path
from hf_recurrent.cli.interruption import read_until
from hf_recurrent.cli.learn_arguments import PLOT_FILE
from hf_recurrent.cli.learn_directory import RECORDS_FILE, STATE_FILE
from hf_recurrent.cli.learn_progress import describe, show_progress
from hf_recurrent.cli.learn_source import remember_source
from hf_recurrent.cli.user_code import import_flags
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.decompression import COMPRESSIONS
from hf_recurrent.evaluation.bits_per_byte import evaluate_bits_per_byte
from hf_recurrent.hub.model_card import save_model_card
from hf_recurrent.interruption import StopRequest, stop_on_signals
from hf_recurrent.learning_rules.rules import NonFiniteLossError
from hf_recurrent.online.learner import OnlineLearner, is_saved_learner
from hf_recurrent.online.prequential import PrequentialRecord, RecordFile, plot_records, read_records
from hf_recurrent.online.sources import Source
from hf_recurrent.server.text_state import TextState, read_texts, save_text_state

# A slow stream is saved after this many seconds, however few bytes were read.
_SAVE_SECONDS = 600.0


class _OutputError(Exception):
    """Something cannot be written, for example because the disk is full."""


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        cause = error.__cause__ or error
        reason = str(getattr(cause, "strerror", None) or cause).rstrip(".")
        raise _OutputError(f"{path} cannot be written: {reason}.") from error


class LearnRun:
    """A run that is ready to start; `resumed` is True if the learner comes from a checkpoint in `--output_dir`."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        learner: OnlineLearner,
        source: Source,
        held_out: Corpus | None,
        resumed: bool,
    ):
        self.arguments, self.learner, self.source, self.held_out = arguments, learner, source, held_out
        self.directory, self.resumed = arguments.output_dir, resumed
        self.first = self.saved = learner.bytes_read
        self.saved_at = time.monotonic()
        self.written: PrequentialRecord | None = None
        # Without a checkpoint, the records start anew.
        self.records = RecordFile(self.directory / RECORDS_FILE, learner.bytes_read if resumed else -1)

    def learn(self) -> str | None:
        """Learn until the source ends or fails or a signal arrives, then save; return the error, if there is one."""
        failures: list[str] = []
        with self.records, stop_on_signals() as stop:
            error = self._catch(failures, lambda: self._read(stop))
            diverged, before = isinstance(error, NonFiniteLossError), self.saved
            self._catch(failures, lambda: self._write(self.learner.record(), measure=not diverged))
            is_saved = self._catch(failures, lambda: self._save(diverged)) is None
        if self.arguments.plot:
            self._catch(failures, self._plot)
        if not failures:
            reason = "stopped" if stop.is_set() else "end of the source"
            if self.resumed and self.learner.bytes_read == self.first:
                reason = "this run is finished: end of the source"
            print(self._summary(reason))
            return None
        return " ".join([*failures, self._describe_saved(is_saved, before if diverged else None)])

    def _catch(self, failures: list[str], action: Callable[[], None]) -> Exception | None:
        """Run and return the error of `action`; of several errors of writing, only the first is reported."""
        try:
            action()
        except (OSError, ValueError, _OutputError) as error:
            if not (failures and isinstance(error, _OutputError)):
                failures.append(str(error))
            return error
        return None

    def _read(self, stop: StopRequest) -> None:
        learner, arguments = self.learner, self.arguments
        if not self.resumed:
            self._write(learner.record(), measure=True)
        learning = learner.learn(read_until(stop, self.source), arguments.report_every)
        for record in show_progress(learning, arguments.window, arguments.quiet, self._size()):
            due = self._is_due()
            self._write(record, measure=due)
            if due:
                self._save()
        if not stop.is_set():
            learner.flush()

    def _size(self) -> int | None:
        """`bytes_read` of the learner at the end of a plain file; None for other sources."""
        path = Path(self.arguments.source)
        if self.arguments.follow or path.suffix.lower() in COMPRESSIONS or not path.is_file():
            return None
        return self.learner.metadata["bytes_before"] + path.stat().st_size

    def _describe_saved(self, is_saved: bool, before: int | None) -> str:
        """The checkpoints that a failed run leaves; `before` is the byte of the last one before the model diverged."""
        if not is_saved:
            checkpoints = list_checkpoints(self.directory)
            return f"The last checkpoint is {checkpoints[-1]}." if checkpoints else "There is no checkpoint."
        read = self.learner.bytes_read
        words = f"The model after byte {read:,} is saved in {self._checkpoint(read)}."
        if before is not None and before < read and self._checkpoint(before).is_dir():
            words += f" To go back to {self._checkpoint(before)}, remove the newer checkpoint"
            words += " and rerun with --resume and a smaller --learning_rate."
        return words

    def _is_due(self) -> bool:
        unsaved = self.learner.bytes_read - self.saved
        slow = unsaved > 0 and time.monotonic() - self.saved_at >= _SAVE_SECONDS
        return unsaved >= self.arguments.save_every or slow

    def _write(self, record: PrequentialRecord, measure: bool) -> None:
        if measure and self.held_out is not None:
            found = evaluate_bits_per_byte(self.learner.model, self.held_out, progress=False)
            record = replace(record, held_out_bits_per_byte=found["bits_per_byte"])
            self._record_held_out(found)
        without_rate = replace(record, bytes_per_second=None)
        if without_rate != self.written:
            with _writing(self.directory / RECORDS_FILE):
                self.records.write(record)
            self.written = without_rate

    def _record_held_out(self, found: dict[str, float]) -> None:
        self.learner.record_training()
        metrics = {name: found[name] for name in ("loss", "bits_per_byte", "num_bytes", "num_episodes")}
        self.learner.training_record.add_result(describe_data(self.held_out), metrics, state_carried=True)

    def _checkpoint(self, byte: int) -> Path:
        return self.directory / f"checkpoint-{byte}"

    def _save(self, diverged: bool = False) -> None:
        """Replace the checkpoint and the published model; if the model has diverged, add a checkpoint instead."""
        new = self._checkpoint(self.learner.bytes_read)
        remember_source(self.learner, self.source)
        with _writing(new):
            self.learner.save(new)
        self.saved, self.saved_at = self.learner.bytes_read, time.monotonic()
        if diverged:
            return
        for old in list_checkpoints(self.directory):
            if Path(old).name != new.name and is_saved_learner(old):
                shutil.rmtree(old, ignore_errors=True)
        with _writing(self.directory):
            try:
                self._publish()
            finally:
                shutil.rmtree(staging_path(self.directory / "model"), ignore_errors=True)

    def _publish(self) -> None:
        """Write model and state to `--output_dir`, where the other commands read them."""
        learner, staging = self.learner, new_staging_directory(self.directory / "model")
        learner.save_model(staging)
        save_model_card(learner.model, staging, learner.record_training())
        if learner.has_context:
            context = learner.context()
            ids = context["input_ids"][0].cpu().numpy()
            text = read_texts(learner.model, [ids], TextState(context["state"], [None]))
            save_text_state(learner.model, text, staging / STATE_FILE)
        else:
            (self.directory / STATE_FILE).unlink(missing_ok=True)  # it belongs to older weights
        publish_files(staging, self.directory)

    def _plot(self) -> None:
        with _writing(self.directory / PLOT_FILE):
            plot_records(read_records(self.directory / RECORDS_FILE), self.directory / PLOT_FILE)

    def _summary(self, reason: str) -> str:
        learner, directory = self.learner, self.directory
        record = learner.record()
        start = f"--state {directory / STATE_FILE}" if learner.has_context else '--prompt "..."'
        if self.arguments.user_code:
            start = f"{shlex.join(import_flags(self.arguments.user_code))} {start}"
        return (
            f"{reason} at byte {record.bytes_read:,}\n{describe(record, learner.settings.window)}\n"
            f"Saved in {directory}. Next:\n"
            f"  hf-recurrent generate {directory} {start}\n"
            f"  to continue, rerun with --output_dir {directory} --resume"
        )
