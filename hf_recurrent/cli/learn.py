"""`hf-recurrent learn MODEL --source ...`: learn from an endless stream of bytes while it is read."""

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent.cli.loading import add_loading_arguments, load_model_and_tokenizer

if TYPE_CHECKING:
    from hf_recurrent.data.corpus import Corpus
    from hf_recurrent.online.learner import OnlineLearner
    from hf_recurrent.online.prequential import PrequentialRecord

RECORDS_FILE, PLOT_FILE, STATE_FILE = "records.jsonl", "prequential.png", "state.safetensors"
# Bytes between two looks at whether to stop.
_PIECE = 64
# Seconds between two lines of progress where there is no terminal, and after which a slow stream is saved too.
_LINE_SECONDS, _SAVE_SECONDS = 10.0, 600.0


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="hf-recurrent learn",
        description="Read a stream of bytes once: predict every byte, score the prediction, learn from it. MODEL is\n"
        "where the weights come from, or a preset to begin with fresh ones. What it becomes is saved in\n"
        "--output_dir, where all other commands find it.",
        epilog="examples:\n"
        "  hf-recurrent learn runs/hawk --source book.txt\n"
        "  hf-recurrent learn runs/hawk --source server.log --follow --output_dir runs/server\n"
        "  hf-recurrent learn runs/hawk --source server.log --follow --output_dir runs/server --resume\n"
        "  tail -F server.log | hf-recurrent learn runs/hawk --source - --stride 16\n"
        "  hf-recurrent learn memora-tiny --source tcp://127.0.0.1:9000 --held_out notes/ --plot\n\n"
        "Ctrl-C saves and says where. Byte 0 ends an episode: nothing is remembered beyond it but what was learned.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_loading_arguments(parser)
    parser.set_defaults(dtype="float32")  # small updates vanish in bfloat16
    source = parser.add_argument_group("stream")
    source.add_argument(
        "--source",
        required=True,
        help="a file (.gz and .zst are read through), - for standard input, or tcp://127.0.0.1:PORT to read what a "
        "program on this machine sends",
    )
    source.add_argument("--follow", action="store_true", help="wait for what is appended to the file, as tail -f does")
    source.add_argument("--timeout", type=float, help="stop when not one byte came for so many seconds")
    source.add_argument("--binary", action="store_true", help="byte 0 is data and ends no episode")
    learning = parser.add_argument_group("learning")
    learning.add_argument(
        "--rule",
        default="rtrl",
        help="rtrl: credit for all of the past, exact inside each recurrent layer. snap1: that, approximately, for "
        "units that mix their channels. truncated: inside the stride only. spatial: none in time. (default: rtrl)",
    )
    learning.add_argument("--stride", type=int, default=1, help="T, bytes that are learned from at once (default: 1)")
    learning.add_argument("--update_every", type=int, default=1, help="strides between two updates (default: 1)")
    learning.add_argument(
        "--learning_rate",
        type=float,
        help="constant (default: 3e-5; try 1e-3 on fresh weights)",
    )
    learning.add_argument("--optimizer", default="adamw", help="adamw or rmsprop (default: adamw)")
    learning.add_argument("--no_learn", action="store_true", help="predict and score only")
    learning.add_argument("--seed", type=int, default=0, help="of the weights that a preset begins with")
    learning.add_argument(
        "--threads", type=int, default=1, help="of the CPU; a single stream gains nothing from more (default: 1)"
    )
    output = parser.add_argument_group("results")
    output.add_argument("--output_dir", type=Path, help="by default runs/MODEL-SOURCE")
    output.add_argument("--resume", action="store_true", help="go on where --output_dir stopped, if it has begun")
    output.add_argument("--save_every", type=_count, default=100_000, help="bytes between two checkpoints")
    output.add_argument("--report_every", type=_count, default=1000, help="bytes between two records")
    output.add_argument("--window", type=_count, default=10_000, help="bytes of the windowed bits per byte")
    output.add_argument("--held_out", nargs="+", help="files whose bits per byte are measured at every checkpoint")
    output.add_argument("--plot", action="store_true", help=f"draw the records to OUTPUT_DIR/{PLOT_FILE} at the end")
    output.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def _count(text: str) -> int:
    value = float(text)
    if not value >= 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of bytes of at least 1")
    return int(value)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with `argv`, by default the process's arguments. Bad input ends it with one sentence.

    A source that fails and a loss that is not finite end it with status 1, after everything was saved.
    """
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        run = _prepare(arguments)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    with _threads(arguments.threads):
        failure = run.learn()
    if failure:
        parser.exit(1, f"{parser.prog}: error: {failure}\n")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many threads for a while; threads that wait for each other on busy cores take most of a small step."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _prepare(arguments: argparse.Namespace) -> "_Run":
    """Everything that can be wrong is found here."""
    if arguments.output_dir is None:
        name = "stdin" if arguments.source == "-" else arguments.source.removeprefix("tcp://").replace(":", "-")
        arguments.output_dir = Path("runs", f"{Path(arguments.model).name}-{Path(name).name}")
    if arguments.threads < 1:
        raise ValueError(f"--threads is {arguments.threads}; it must be at least 1.")
    directory = arguments.output_dir
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"--output_dir is `{directory}`, which is no directory.")
    if arguments.plot:
        from hf_recurrent.plotting import require_pyplot

        require_pyplot()

    from transformers.utils import logging

    from hf_recurrent.checkpoint_files import find_last_checkpoint, remove_staging
    from hf_recurrent.online.learner import is_saved_learner
    from hf_recurrent.online.sources import open_source

    logging.disable_progress_bar()  # of saving: it would break the line of progress
    checkpoint = find_last_checkpoint(directory, is_saved_learner)
    if directory.is_dir() and any(directory.iterdir()):
        if not arguments.resume:
            raise ValueError(
                f"--output_dir is `{directory}`, which is not empty; add --resume to go on, or choose another."
            )
        if checkpoint is None and not (directory / RECORDS_FILE).is_file():
            raise ValueError(f"--output_dir is `{directory}`, which holds something else than a stream to go on with.")
    learner = _build_learner(arguments, checkpoint)
    start = _place_in_source(learner, arguments)
    source = open_source(arguments.source, follow=arguments.follow, start=start, timeout=arguments.timeout)
    held_out = None
    if arguments.held_out:
        from hf_recurrent.data.loading import load_corpus

        held_out = load_corpus(arguments.held_out, tokenizer=learner.tokenizer, binary=arguments.binary)
    directory.mkdir(parents=True, exist_ok=True)
    remove_staging(directory)
    if not arguments.quiet:
        how = "reading" if arguments.no_learn else f"learning by {learner.settings.rule} from"
        name = "standard input" if arguments.source == "-" else arguments.source
        print(f"{how} {name}{f' from byte {start:,} on' if start else ''}, saving to {directory}", file=sys.stderr)
    return _Run(arguments, learner, source, held_out, checkpoint)


def _build_learner(arguments: argparse.Namespace, checkpoint: str | None) -> "OnlineLearner":
    from hf_recurrent.online.learner import OnlineLearner

    settings = {
        "rule": arguments.rule,
        "stride": arguments.stride,
        "update_every": arguments.update_every,
        "optimizer": arguments.optimizer,
        "window": arguments.window,
        "binary": arguments.binary,
        "learn": not arguments.no_learn,
    }
    if arguments.learning_rate is not None:
        settings["learning_rate"] = arguments.learning_rate
    if checkpoint is not None:
        model, tokenizer = load_model_and_tokenizer(
            argparse.Namespace(**vars(arguments) | {"model": checkpoint, "dtype": "auto"})
        )
        return OnlineLearner.load(checkpoint, model, tokenizer, **settings)
    from hf_recurrent.presets import config_from_preset, preset_names

    if arguments.model not in preset_names():
        return OnlineLearner(*load_model_and_tokenizer(arguments), **settings)
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    from hf_recurrent.modeling.tokenization_byte import ByteTokenizer

    set_seed(arguments.seed)
    model = AutoModelForCausalLM.from_config(config_from_preset(arguments.model))
    dtype = torch.float32 if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return OnlineLearner(model.to(device, dtype), ByteTokenizer(), **settings)


def _is_file(arguments: argparse.Namespace) -> bool:
    return Path(arguments.source).is_file()


def _place_in_source(learner: "OnlineLearner", arguments: argparse.Namespace) -> int:
    """How much of the source was read by the run that goes on; what cannot be read twice begins anew."""
    name = os.path.abspath(arguments.source) if _is_file(arguments) else arguments.source
    if learner.metadata.get("source") != name or not _is_file(arguments):
        learner.metadata |= {"source": name, "bytes_before": learner.bytes_read}
    return learner.bytes_read - learner.metadata["bytes_before"]


class _Run:
    """One run of the command: what is done beside learning, at which byte."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        learner: "OnlineLearner",
        source: Iterator[bytes],
        held_out: "Corpus | None",
        checkpoint: str | None,
    ):
        self.arguments, self.learner, self.source, self.held_out = arguments, learner, source, held_out
        self.directory = arguments.output_dir
        self.resumed = checkpoint is not None
        self.saved, self.saved_at = learner.bytes_read, time.monotonic()
        self.written: PrequentialRecord | None = None

    def learn(self) -> str | None:
        """Read until the source ends or fails, or somebody says stop; save; what went wrong, if anything."""
        from hf_recurrent.learning_rules.rules import NonFiniteLossError
        from hf_recurrent.online.prequential import RecordFile

        learner, failure, diverged = self.learner, None, False
        bar = _Progress(self.arguments, learner)
        # A run that had not come to its first checkpoint begins anew.
        records = RecordFile(self.directory / RECORDS_FILE, learner.bytes_read if self.resumed else -1)
        with records as self.records, bar, _stopping() as stop:
            if not self.resumed:
                self._write(learner.record(), measure=True)
            try:
                for record in learner.learn(_until(stop, self.source), self.arguments.report_every):
                    bar.show(record)
                    due = self._is_due()
                    self._write(record, measure=due)
                    if due:
                        self._save()
                if not stop.signal:
                    learner.flush()
            except NonFiniteLossError as error:
                failure, diverged = str(error), True
            except (OSError, ValueError) as error:
                failure = str(error)
            self._write(learner.record(), measure=not diverged)
            before = self.saved
            self._save(diverged)
        if self.arguments.plot:
            from hf_recurrent.online.prequential import plot_records, read_records

            plot_records(read_records(self.directory / RECORDS_FILE), self.directory / PLOT_FILE)
        if failure is None:
            print(self._summary("stopped" if stop.signal else "the source has ended"))
            return None
        failure += f" What was learned until byte {learner.bytes_read:,} is in {self._checkpoint(learner.bytes_read)}."
        if diverged and self._checkpoint(before).is_dir() and before < learner.bytes_read:
            failure += f" {self._checkpoint(before)} is still there to go back to: remove the newer one"
            failure += " and --resume with a smaller --learning_rate."
        return failure

    def _is_due(self) -> bool:
        """Whether to save now; a slow stream is saved though it has not come far."""
        unsaved = self.learner.bytes_read - self.saved
        return unsaved >= self.arguments.save_every or (
            unsaved > 0 and time.monotonic() - self.saved_at >= _SAVE_SECONDS
        )

    def _write(self, record: "PrequentialRecord", measure: bool) -> None:
        if measure and self.held_out is not None:
            from hf_recurrent.evaluation.bits_per_byte import evaluate_bits_per_byte

            found = evaluate_bits_per_byte(self.learner.model, self.held_out, progress=False)
            record = replace(record, held_out_bits_per_byte=found["bits_per_byte"])
        told = replace(record, bytes_per_second=None)
        if told != self.written:
            self.records.write(record)
            self.written = told

    def _checkpoint(self, byte: int) -> Path:
        return self.directory / f"checkpoint-{byte}"

    def _save(self, diverged: bool = False) -> None:
        """A checkpoint in place of the one before, and the model for everybody; beside it, if something is wrong."""
        from hf_recurrent.online.learner import is_saved_learner

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
        """The model as it is now, and its state, where the other commands look for them."""
        from hf_recurrent.checkpoint_files import STAGING_PREFIX, publish_files
        from hf_recurrent.sessions.text_state import TextState, read_texts, save_text_state

        learner, staging = self.learner, self.directory / f"{STAGING_PREFIX}model"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        learner.model.save_pretrained(staging)
        if learner.tokenizer is not None:
            learner.tokenizer.save_pretrained(staging)
        if learner.has_context:
            context = learner.context()
            ids = context["input_ids"][0].cpu().numpy()
            text = read_texts(learner.model, [ids], TextState(context["state"], [None]))
            save_text_state(learner.model, text, staging / STATE_FILE)
        else:
            (self.directory / STATE_FILE).unlink(missing_ok=True)  # of other weights
        publish_files(staging, self.directory)

    def _summary(self, reason: str) -> str:
        learner, directory = self.learner, self.directory
        record = learner.record()
        lines = [f"{reason} at byte {record.bytes_read:,}; {_describe(record, learner.settings.window)}"]
        lines += [f"Saved in {directory}. Next:"]
        state = f"--state {directory / STATE_FILE}" if learner.has_context else '--prompt "..."'
        lines += [f"  hf-recurrent generate {directory} {state}"]
        lines += [f"  the same command with --output_dir {directory} --resume goes on"]
        return "\n".join(lines)


def _describe(record: "PrequentialRecord", window: int) -> str:
    if record.bits_per_byte is None:
        return "nothing predicted yet"
    return (
        f"{record.bits_per_byte:.3f} bits per byte, {record.windowed_bits_per_byte:.3f} over the last "
        f"{min(window, record.bytes_read):,}"
    )


class _Progress:
    """A line that is renewed in a terminal, a line now and then elsewhere."""

    def __init__(self, arguments: argparse.Namespace, learner: "OnlineLearner"):
        from tqdm.auto import tqdm

        self.window, self.terminal, self.quiet = arguments.window, sys.stderr.isatty(), arguments.quiet
        self.shown = time.monotonic()
        self.bar = tqdm(
            disable=self.quiet or not self.terminal, bar_format="{desc}", dynamic_ncols=True, file=sys.stderr
        )

    def show(self, record: "PrequentialRecord") -> None:
        from hf_recurrent.data.episode_source import with_unit

        rate = with_unit(record.bytes_per_second or 0, "B/s")
        text = f"{record.bytes_read:,} bytes read: {_describe(record, self.window)}, {rate}"
        self.bar.set_description_str(text)
        if not self.terminal and not self.quiet and time.monotonic() - self.shown >= _LINE_SECONDS:
            self.shown = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.close()


class _Stop:
    """Whether somebody said stop."""

    signal: int | None = None


@contextmanager
def _stopping() -> Iterator[_Stop]:
    """While it lasts, Ctrl-C and SIGTERM ask to stop between two steps; a second one stops at once."""
    stop = _Stop()
    before = {}

    def ask(number, frame):
        stop.signal = number
        for each, handler in before.items():
            signal.signal(each, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, ask)
    except ValueError:  # only the main thread hears signals
        pass
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _until(stop: _Stop, source: Iterable[bytes]) -> Iterator[bytes]:
    """The source in pieces so small that a wish to stop is soon heard."""
    for chunk in source:
        if stop.signal:
            return
        if not chunk:
            yield chunk
        for begin in range(0, len(chunk), _PIECE):
            if stop.signal:
                return
            yield chunk[begin : begin + _PIECE]


if __name__ == "__main__":
    main()
