"""A run of `hf-recurrent learn`: its source, learning, progress, and records and checkpoints written on the way."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from safetensors import SafetensorError
from tqdm.auto import tqdm

from hf_recurrent.checkpoints.files import (
    STAGING_PREFIX,
    checkpoint_number,
    list_checkpoints,
    new_staging_directory,
    publish_files,
    remove_staging,
    staging_path,
)
from hf_recurrent.checkpoints.output_lock import LOCK_FILE, output_lock
from hf_recurrent.checkpoints.records import Data
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.decompression import COMPRESSIONS
from hf_recurrent.data.quantities import with_unit
from hf_recurrent.evaluation.bits_per_byte import evaluate_bits_per_byte
from hf_recurrent.generation.text_state import TextState, read_texts, save_text_state
from hf_recurrent.hub.eval_results import write_eval_results
from hf_recurrent.hub.model_card import save_model_card
from hf_recurrent.interruption import StopRequest, stop_on_signals
from hf_recurrent.learning_rules.rules import NonFiniteLossError
from hf_recurrent.online.learner import OnlineLearner
from hf_recurrent.online.prequential import PrequentialRecord, RecordFile, check_records, plot_records, read_records
from hf_recurrent.online.saved_learner import check_files, is_saved_learner
from hf_recurrent.online.sources import STANDARD_INPUT, ChangedSourceError, Source, is_same_file, open_source

RECORDS_FILE, STATE_FILE, PLOT_FILE = "records.jsonl", "state.safetensors", "prequential.png"
# Seconds between two lines without a terminal, and after which a slow stream is saved, however few bytes were read.
_LINE_SECONDS, _SAVE_SECONDS = 10.0, 600.0
# Bytes between two checks for a request to stop.
_PIECE = 64
# Keys of the learner's metadata: the name of the source, the bytes that the learner read before it, and its identity.
_NAME, _BEFORE, _IDENTITY = "source", "bytes_before", "file"


def _continue_source(learner: OnlineLearner, options: "LearnOptions") -> tuple[Source, int]:
    """Open the source, and return it with the bytes of it that the learner has read.

    A file continues where it was read to, also under a new name. Any other source is read from its beginning.
    """
    name, start, saved = options.source, 0, learner.metadata
    open_it = partial(open_source, options.source, follow=options.follow, timeout=options.timeout)
    source = None
    if name != STANDARD_INPUT and Path(name).is_file():
        name = os.path.abspath(name)
        has_its_name = saved.get(_NAME) == name
        if has_its_name or is_same_file(os.stat(name), saved.get(_IDENTITY) or {}):
            start = learner.bytes_read - saved[_BEFORE]
            try:
                source = open_it(start=start, identity=saved.get(_IDENTITY))
            except ChangedSourceError as error:
                if has_its_name:
                    raise ValueError(
                        f"{str(error).rstrip('.')}; to finish a rotated file first, resume with its new name; to "
                        "continue with the same learner at the first byte of this file, use `--source - --resume < "
                        f"{options.source}`; to begin anew, use --restart instead of --resume."
                    ) from error
                start = 0  # another file with the number that the old one had
    source = source or open_it()
    learner.training_record.name_source({STANDARD_INPUT: "standard input"}.get(name, name))
    learner.metadata = {**saved, _NAME: name, _BEFORE: learner.bytes_read - start}
    return source, start


def check_metadata(values: dict[str, Any], bytes_read: int) -> None:
    """Raise a ValueError unless the values describe a source, or none."""
    name, before, identity = (values.get(key) for key in (_NAME, _BEFORE, _IDENTITY))
    is_source = isinstance(name, str) and type(before) is int and 0 <= before <= bytes_read
    kinds = {"device": int, "inode": int, "digest": str}
    is_identity = isinstance(identity, dict) and {key: type(value) for key, value in identity.items()} == kinds
    if not (is_source or name is before is None) or not (is_identity or identity is None):
        found = {"source": name, "bytes_before": before, "file": identity}
        raise ValueError(f"its metadata has {found!r:.100}, which is not a source.")


def describe(record: PrequentialRecord, window: int) -> str:
    """Bits per byte of a record in words."""
    if record.bits_per_byte is None:
        return "no predictions yet"
    windowed = f"{record.windowed_bits_per_byte:.3f} over the last {min(window, record.bytes_read):,}"
    return f"{record.bits_per_byte:.3f} bits per byte, {windowed}"


def show_progress(
    records: Iterable[PrequentialRecord], window: int, quiet: bool, size: int | None = None
) -> Iterator[PrequentialRecord]:
    """The same records, shown in one line of a terminal, or every few seconds in a new line elsewhere.

    With the `size`, which is `bytes_read` at the end of the source, they show the time left.
    """
    terminal, shown = sys.stderr.isatty(), time.monotonic()
    with tqdm(disable=quiet or not terminal, bar_format="{desc}", dynamic_ncols=True, file=sys.stderr) as bar:
        for record in records:
            rate = with_unit(record.bytes_per_second or 0, "B/s")
            text = f"{with_unit(record.bytes_read, 'B')}: {describe(record, window)}, {rate}{_left(record, size)}"
            bar.set_description_str(text)
            if not terminal and not quiet and time.monotonic() - shown >= _LINE_SECONDS:
                shown = time.monotonic()
                print(text, file=sys.stderr, flush=True)
            yield record


def _left(record: PrequentialRecord, size: int | None) -> str:
    if size is None or not record.bytes_per_second:
        return ""
    return f", {tqdm.format_interval(max(size - record.bytes_read, 0) / record.bytes_per_second)} left"


@dataclass(frozen=True)
class LearnOptions:
    """The arguments of the command about reading and writing; its help explains them."""

    source: str
    output_dir: Path
    follow: bool = False
    timeout: float | None = None
    resume: bool = False
    restart: bool = False
    save_every: int = 100_000
    report_every: int = 1000
    plot: bool = False
    quiet: bool = False


def find_checkpoint(directory: Path, resume: bool, restart: bool) -> str | None:
    """The last checkpoint of the run in a directory, damaged or not; None to begin a run."""
    name = f"`--output_dir` is {str(directory)!r}"
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{name}; it must be a directory.")
    names = [path.name for path in directory.iterdir()] if directory.exists() else []
    if all(name == LOCK_FILE or name.startswith(STAGING_PREFIX) for name in names):
        return None
    if not (resume or restart):
        raise ValueError(f"{name}; it must be empty. To continue the run in it, add --resume.")
    checkpoints = list_checkpoints(directory)
    foreign = [path for path in checkpoints if not _is_of_a_learner(path)]
    if len(foreign) == len(checkpoints) and not (directory / RECORDS_FILE).is_file():
        flag = "--resume" if resume else "--restart"
        raise ValueError(f"{name}; with {flag}, it must have a run of this command.")
    if restart:
        if foreign:
            raise ValueError(f"{name}, but {foreign[0]} is not a checkpoint of this command; move it elsewhere first.")
        return None
    if not checkpoints and (directory / "config.json").exists():
        raise ValueError(f"{name}; it has a model, but no checkpoint to resume; to begin anew, use --restart.")
    return checkpoints[-1] if checkpoints else None


def check_checkpoint(directory: Path, checkpoint: str) -> None:
    """Raise a ValueError that names the damaged file of a checkpoint, and a way to continue."""
    try:
        check_files(checkpoint)
    except ValueError as error:
        damaged = [checkpoint]
        way_on = "to begin anew, use --restart instead of --resume"
        for older in reversed(list_checkpoints(directory)[:-1]):
            with suppress(ValueError):
                check_files(older)
                way_on = f"to resume from {older}, remove {' and '.join(damaged)}"
                break
            damaged.append(older)
        raise ValueError(f"{str(error).rstrip('.')}; {way_on}.") from error


def remove_run(directory: Path) -> None:
    """Remove the checkpoints of the run in a directory; its model stays until another is saved."""
    while checkpoints := list_checkpoints(directory):  # again for those with a temporary name too
        for path in checkpoints:
            shutil.rmtree(path)


def _is_of_a_learner(checkpoint: str) -> bool:
    return any(os.path.lexists(os.path.join(checkpoint, f"learner.{kind}")) for kind in ("json", "safetensors"))


@contextmanager
def open_learn_run(
    options: LearnOptions,
    load_learner: Callable[[str | None], OnlineLearner],
    load_held_out: Callable[[Any], Corpus | None],
) -> Iterator["LearnRun"]:
    """Check everything, lock the directory, and open learner and source; only then is anything changed.

    Args:
        load_learner: called with the checkpoint to continue, or None for a new learner.
        load_held_out: called with the tokenizer; the corpus to measure at every checkpoint, or None.
    """
    directory, resume, restart = options.output_dir, options.resume, options.restart
    with ExitStack() as lock:
        find_checkpoint(directory, resume, restart)
        is_new = not directory.exists()
        if not is_new:
            lock.enter_context(output_lock(directory))
        checkpoint = find_checkpoint(directory, resume, restart)
        learner = _load_learner(directory, checkpoint, load_learner)
        source, start = _continue_source(learner, options)
        held_out = load_held_out(learner.tokenizer)
        if is_new:
            lock.enter_context(output_lock(directory))
            if find_checkpoint(directory, resume, restart) is not None:
                raise ValueError(
                    f"`--output_dir` is {str(directory)!r}, where another run has begun; use --resume again."
                )
        remove_staging(directory)
        if restart:
            remove_run(directory)
        if not options.quiet:
            _announce(options, learner, start, checkpoint)
        yield LearnRun(options, learner, source, held_out, resumed=checkpoint is not None)


def _load_learner(
    directory: Path, checkpoint: str | None, load_learner: Callable[[str | None], OnlineLearner]
) -> OnlineLearner:
    """The learner of a checkpoint, compared with the records, or a new one."""
    if checkpoint is not None:
        check_checkpoint(directory, checkpoint)
    learner = load_learner(checkpoint)
    records = directory / RECORDS_FILE
    if records.is_symlink():
        raise ValueError(f"`--output_dir` is {str(directory)!r}, but {records} is a link; remove it.")
    if checkpoint is None:
        return learner
    try:
        check_metadata(learner.metadata, learner.bytes_read)
        if learner.bytes_read != checkpoint_number(checkpoint):
            raise ValueError(f"it is the learner at byte {learner.bytes_read}.")
    except ValueError as error:
        raise ValueError(f"The checkpoint {checkpoint!r} is damaged: {error}") from error
    if records.exists():
        check_records(records, learner.bytes_read)
    return learner


def _announce(options: LearnOptions, learner: OnlineLearner, start: int, checkpoint: str | None) -> None:
    if options.resume and checkpoint is None:
        print(f"{options.output_dir} has no checkpoint to resume; a new run begins", file=sys.stderr)
    how = f"learning by {learner.settings.rule} from" if learner.settings.learn else "reading"
    source = "standard input" if options.source == "-" else options.source
    place = f" from byte {start:,} on" if start else ""
    print(f"{how} {source}{place}, saving to {options.output_dir}", file=sys.stderr)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        cause = error.__cause__ or error
        reason = str(getattr(cause, "strerror", None) or cause).rstrip(".")
        raise OSError(f"{path} cannot be written: {reason}.") from error


class LearnRun:
    """A run that is ready to start; `resumed` is True if the learner comes from a checkpoint in the directory.

    Attributes:
        ending: why reading has ended, once [`learn`] has returned.
        failure: the first error.
    """

    ending, failure = "", ""

    def __init__(
        self, options: LearnOptions, learner: OnlineLearner, source: Source, held_out: Corpus | None, resumed: bool
    ):
        self.options, self.learner, self.source, self.held_out = options, learner, source, held_out
        self.directory, self.resumed = options.output_dir, resumed
        self.first = self.saved = learner.bytes_read
        self.saved_at = time.monotonic()
        self.written: PrequentialRecord | None = None
        # Without a checkpoint, the records start over.
        self.records = RecordFile(self.directory / RECORDS_FILE, learner.bytes_read if resumed else -1)

    def learn(self) -> str | None:
        """Learn until the source ends or fails or a signal arrives, then save; return the error, if there is one."""
        with self.records, stop_on_signals() as stop:
            error, before = self._catch(lambda: self._read(stop)), self.saved
            diverged = isinstance(error, NonFiniteLossError)
            self._catch(lambda: self._write(self.learner.record(), measure=not diverged))
            is_saved = self._catch(lambda: self._save(diverged)) is None
        if self.options.plot:
            self._catch(self._plot)
        self.ending = "stopped" if stop.is_set() else "end of the source"
        if self.resumed and self.learner.bytes_read == self.first:
            self.ending = "this run is finished: end of the source"
        if not self.failure:
            return None
        return f"{self.failure} {self._describe_saved(is_saved, before if diverged else None)}"

    def _catch(self, action: Callable[[], None]) -> Exception | None:
        """Run an action, and return its error."""
        try:
            action()
        except (OSError, ValueError) as error:
            self.failure = self.failure or str(error)
            return error
        return None

    def _read(self, stop: StopRequest) -> None:
        learner, options = self.learner, self.options
        if not self.resumed:
            self._write(learner.record(), measure=True)
        learning = learner.learn(read_until(stop, self.source), options.report_every)
        for record in show_progress(learning, learner.settings.window, options.quiet, self._size()):
            unsaved = learner.bytes_read - self.saved
            is_late = unsaved > 0 and time.monotonic() - self.saved_at >= _SAVE_SECONDS
            due = is_late or unsaved >= options.save_every
            self._write(record, measure=due)
            if due:
                self._save()
        if not stop.is_set():
            learner.flush()

    def _size(self) -> int | None:
        """`bytes_read` of the learner at the end of a plain file; None for other sources."""
        path = Path(self.options.source)
        if self.options.follow or path.suffix.lower() in COMPRESSIONS or not path.is_file():
            return None
        return self.learner.metadata[_BEFORE] + path.stat().st_size

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

    def _write(self, record: PrequentialRecord, measure: bool) -> None:
        if measure and self.held_out is not None:
            found = evaluate_bits_per_byte(self.learner.model, self.held_out, progress=False)
            record = replace(record, held_out_bits_per_byte=found["bits_per_byte"])
            self.learner.record_training()
            metrics = {name: found[name] for name in ("loss", "bits_per_byte", "num_bytes", "num_episodes")}
            self.learner.training_record.add_result(Data.of(self.held_out), metrics, state_carried=True)
        without_rate = replace(record, bytes_per_second=None)
        if without_rate != self.written:
            with _writing(self.directory / RECORDS_FILE):
                self.records.write(record)
            self.written = without_rate

    def _checkpoint(self, byte: int) -> Path:
        return self.directory / f"checkpoint-{byte}"

    def _save(self, diverged: bool = False) -> None:
        """Replace the checkpoint and the published model; if the model has diverged, add a checkpoint instead."""
        new, metadata = self._checkpoint(self.learner.bytes_read), self.learner.metadata
        metadata[_IDENTITY] = self.source.identity(self.learner.bytes_read - metadata[_BEFORE])
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
        provenance = learner.record_training()
        save_model_card(learner.model, staging, provenance)
        if learner.has_context:
            context = learner.context()
            ids = context["input_ids"][0].cpu().numpy()
            text = read_texts(learner.model, [ids], TextState(context["state"], [None]))
            save_text_state(learner.model, text, staging / STATE_FILE)
        else:
            (self.directory / STATE_FILE).unlink(missing_ok=True)  # it belongs to older weights
        publish_files(staging, self.directory)
        write_eval_results(provenance, self.directory)

    def _plot(self) -> None:
        with _writing(self.directory / PLOT_FILE):
            plot_records(read_records(self.directory / RECORDS_FILE), self.directory / PLOT_FILE)

    def summary(self) -> str:
        """How far the source was read, and bits per byte."""
        record = self.learner.record()
        return f"{self.ending} at byte {record.bytes_read:,}\n{describe(record, self.learner.settings.window)}"


def read_until(stop: Event, source: Iterable[bytes]) -> Iterator[bytes]:
    """The source in small pieces until `stop` is set, so that Ctrl-C takes effect quickly."""
    for chunk in source:
        for begin in range(0, max(len(chunk), 1), _PIECE):  # an empty chunk is passed on
            if stop.is_set():
                return
            yield chunk[begin : begin + _PIECE]
