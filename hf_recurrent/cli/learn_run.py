"""A run of `hf-recurrent learn`: learning, and the records and checkpoints written on the way."""

import argparse
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hf_recurrent.checkpoint_files import new_staging_directory, publish_files
from hf_recurrent.cli.interruption import read_until, stop_on_signals
from hf_recurrent.cli.learn_arguments import PLOT_FILE
from hf_recurrent.cli.learn_progress import describe, show_progress
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.evaluation.bits_per_byte import evaluate_bits_per_byte
from hf_recurrent.learning_rules.rules import NonFiniteLossError
from hf_recurrent.online.learner import OnlineLearner, is_saved_learner
from hf_recurrent.online.prequential import PrequentialRecord, RecordFile, plot_records, read_records
from hf_recurrent.sessions.text_state import TextState, read_texts, save_text_state

RECORDS_FILE, STATE_FILE = "records.jsonl", "state.safetensors"
# A slow stream is saved after this many seconds, however few bytes were read.
_SAVE_SECONDS = 600.0


class LearnRun:
    """A run that is ready to start; `resumed` is True if the learner comes from a checkpoint in `--output_dir`."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        learner: OnlineLearner,
        source: Iterator[bytes],
        held_out: Corpus | None,
        resumed: bool,
    ):
        self.arguments, self.learner, self.source, self.held_out = arguments, learner, source, held_out
        self.directory, self.resumed = arguments.output_dir, resumed
        self.saved, self.saved_at = learner.bytes_read, time.monotonic()
        self.written: PrequentialRecord | None = None

    def learn(self) -> str | None:
        """Learn until the source ends or fails or a signal arrives, then save; return the error, if there is one."""
        learner, arguments, failure, diverged = self.learner, self.arguments, None, False
        # Without a checkpoint, the records start anew.
        records = RecordFile(self.directory / RECORDS_FILE, learner.bytes_read if self.resumed else -1)
        with records as self.records, stop_on_signals() as stop:
            if not self.resumed:
                self._write(learner.record(), measure=True)
            try:
                learning = learner.learn(read_until(stop, self.source), arguments.report_every)
                for record in show_progress(learning, arguments.window, arguments.quiet):
                    due = self._is_due()
                    self._write(record, measure=due)
                    if due:
                        self._save()
                if not stop.is_set():
                    learner.flush()
            except (OSError, ValueError) as error:
                failure, diverged = str(error), isinstance(error, NonFiniteLossError)
            self._write(learner.record(), measure=not diverged)
            before = self.saved
            self._save(diverged)
        if arguments.plot:
            plot_records(read_records(self.directory / RECORDS_FILE), self.directory / PLOT_FILE)
        if failure is None:
            print(self._summary("stopped" if stop.is_set() else "end of the source"))
            return None
        failure += f" The model after byte {learner.bytes_read:,} is saved in {self._checkpoint(learner.bytes_read)}."
        if diverged and self._checkpoint(before).is_dir() and before < learner.bytes_read:
            failure += f" To go back to {self._checkpoint(before)}, remove the newer checkpoint"
            failure += " and rerun with --resume and a smaller --learning_rate."
        return failure

    def _is_due(self) -> bool:
        unsaved = self.learner.bytes_read - self.saved
        slow = unsaved > 0 and time.monotonic() - self.saved_at >= _SAVE_SECONDS
        return unsaved >= self.arguments.save_every or slow

    def _write(self, record: PrequentialRecord, measure: bool) -> None:
        if measure and self.held_out is not None:
            found = evaluate_bits_per_byte(self.learner.model, self.held_out, progress=False)
            record = replace(record, held_out_bits_per_byte=found["bits_per_byte"])
        without_rate = replace(record, bytes_per_second=None)
        if without_rate != self.written:
            self.records.write(record)
            self.written = without_rate

    def _checkpoint(self, byte: int) -> Path:
        return self.directory / f"checkpoint-{byte}"

    def _save(self, diverged: bool = False) -> None:
        """Replace the checkpoint and the published model; if the model has diverged, add a checkpoint instead."""
        new = self._checkpoint(self.learner.bytes_read)
        self.learner.save(new)
        self.saved, self.saved_at = self.learner.bytes_read, time.monotonic()
        if diverged:
            return
        for old in self.directory.glob("checkpoint-*"):
            if old.name != new.name and is_saved_learner(old):
                shutil.rmtree(old, ignore_errors=True)
        self._publish()

    def _publish(self) -> None:
        """Write model and state to `--output_dir`, where the other commands read them."""
        learner, staging = self.learner, new_staging_directory(self.directory / "model")
        learner.save_model(staging)
        if learner.has_context:
            context = learner.context()
            ids = context["input_ids"][0].cpu().numpy()
            text = read_texts(learner.model, [ids], TextState(context["state"], [None]))
            save_text_state(learner.model, text, staging / STATE_FILE)
        else:
            (self.directory / STATE_FILE).unlink(missing_ok=True)  # it belongs to older weights
        publish_files(staging, self.directory)

    def _summary(self, reason: str) -> str:
        learner, directory = self.learner, self.directory
        record = learner.record()
        start = f"--state {directory / STATE_FILE}" if learner.has_context else '--prompt "..."'
        return (
            f"{reason} at byte {record.bytes_read:,}; {describe(record, learner.settings.window)}\n"
            f"Saved in {directory}. Next:\n"
            f"  hf-recurrent generate {directory} {start}\n"
            f"  to continue, rerun with --output_dir {directory} --resume"
        )
