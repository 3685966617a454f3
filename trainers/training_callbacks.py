"""Callbacks of a trainer: a progress bar in bytes, samples, the beginning and the end of the loop."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ProgressCallback

from hf_recurrent.data.quantities import with_unit
from hf_recurrent.evaluation.samples import generate_samples

if TYPE_CHECKING:
    from hf_recurrent.trainers.stream_trainer import StreamTrainer


class Throughput:
    """Measures steps per second of training alone: evaluation, saving and sampling are `paused()`."""

    def __init__(self):
        self.start(0)

    def start(self, step: int) -> None:
        self._since, self._step, self._paused = time.perf_counter(), step, 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - begin

    def steps_per_second(self, step: int) -> float:
        """Rate since the last call, or since [`start`]."""
        seconds = max(time.perf_counter() - self._since - self._paused, 1e-9)
        rate = (step - self._step) / seconds
        self.start(step)
        return rate


class LoopCallback(TrainerCallback):
    """Calls `begin_steps` right before the first step, and saves and ends training when a stop is due."""

    def __init__(self, trainer: "StreamTrainer"):
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.trainer.begin_steps()

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer.signals.stop_is_due:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False


class BytesProgressCallback(ProgressCallback):
    """Progress bar in 80 columns: bits per byte, bytes per second and time left; plain lines without a terminal.

    Replaces the bar of `Trainer`. Only the first process prints.
    """

    def __init__(self, unit: str = "byte"):
        super().__init__()
        self._unit = unit
        self._first_step = 0
        self._begin = 0.0
        self._terminal = sys.stderr.isatty()

    def on_train_begin(self, args, state, control, **kwargs):
        self.current_step = self._first_step = state.global_step
        self._begin = time.perf_counter()
        if self.training_bar is not None:  # of a run that has diverged
            self.training_bar.close()
        if state.is_world_process_zero:
            self.training_bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                dynamic_ncols=True,
                disable=not self._terminal,
                bar_format="{percentage:3.0f}%|{bar:6}| step {n_fmt}/{total_fmt}{postfix}, {remaining} left",
            )

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or self.training_bar is None:
            return
        if "bits_per_byte" in logs:
            rate = with_unit(logs["bytes_per_second"], "B/s" if self._unit == "byte" else "/s").replace(" /s", "/s")
            text = f"{logs['bits_per_byte']:.3f} bits per {self._unit}, {rate}"
            if "mixed_bits_per_byte" in logs:
                text = f"{logs['mixed_bits_per_byte']:.3f} with counts, network {text}"
            self.training_bar.set_postfix_str(text)
            if not self._terminal:
                rate = (time.perf_counter() - self._begin) / max(state.global_step - self._first_step, 1)
                left = tqdm.format_interval(rate * (state.max_steps - state.global_step))
                print(f"step {state.global_step}/{state.max_steps}: {text}, {left} left", file=sys.stderr, flush=True)

    def show_evaluation(self, state: TrainerState, words: str) -> None:
        """Print the result of an evaluation above the bar."""
        if state.is_world_process_zero and self.training_bar is not None:
            tqdm.write(f"step {state.global_step}: {words}", file=sys.stderr)


def replace_progress_bar(trainer: "StreamTrainer") -> BytesProgressCallback | None:
    """Give a trainer our progress bar in place of its own; None if it has none."""
    if trainer.pop_callback(ProgressCallback) is None:
        return None
    bar = BytesProgressCallback(getattr(trainer.train_dataset, "unit", "byte"))
    trainer.add_callback(bar)
    return bar


class SampleCallback(TrainerCallback):
    """Prints samples of the model every `args.sample_every` steps, in the first process.

    Random states and the model's mode are restored: training is bit for bit the same with and without samples.
    """

    def __init__(self, trainer: "StreamTrainer"):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % args.sample_every:
            return
        prompts, tokenizer = args.sample_prompts, self.trainer.processing_class
        with self.trainer.throughput.paused(), self.trainer.model_for_first() as model:
            if not state.is_world_process_zero:
                return
            texts = generate_samples(model, tokenizer, prompts, args.sample_bytes)
            for prompt, text in zip(prompts, texts, strict=True):
                tqdm.write(f"--- step {state.global_step}: sample after {prompt!r}\n{prompt}{text}\n---")
