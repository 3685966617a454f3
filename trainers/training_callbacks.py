"""Output of a run while it trains: a progress bar in bytes, and samples."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState
from transformers.trainer_callback import ProgressCallback

from hf_recurrent.data.episode_source import with_unit
from hf_recurrent.evaluation.samples import generate_samples


class Throughput:
    """Seconds spent training since it was last asked, evaluation, saving and samples left out."""

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
        """Since the last call, or since [`start`]."""
        seconds = max(time.perf_counter() - self._since - self._paused, 1e-9)
        rate = (step - self._step) / seconds
        self.start(step)
        return rate


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class BytesProgressCallback(ProgressCallback):
    """A bar with bits per byte, bytes per second, state resets and time left; plain lines where there is no terminal.

    It stands in for the Trainer's own bar. Only the first process shows anything.
    """

    def __init__(self):
        super().__init__()
        self._first_step = 0
        self._begin = 0.0
        self._terminal = sys.stderr.isatty()

    def on_train_begin(self, args, state, control, **kwargs):
        self.current_step = self._first_step = state.global_step
        self._begin = time.perf_counter()
        if state.is_world_process_zero:
            self.training_bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                dynamic_ncols=True,
                disable=not self._terminal,
                bar_format="{percentage:3.0f}%|{bar:20}| step {n_fmt}/{total_fmt}{postfix}, {remaining} left",
            )

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or self.training_bar is None:
            return
        if "bits_per_byte" in logs:
            text = (
                f"{logs['bits_per_byte']:.3f} bits per byte, {with_unit(logs['bytes_per_second'], 'B/s')}, "
                f"{with_unit(logs['state_resets'])} resets"
            )
            self.training_bar.set_postfix_str(text)
            if not self._terminal:
                rate = (time.perf_counter() - self._begin) / max(state.global_step - self._first_step, 1)
                left = _clock(rate * (state.max_steps - state.global_step))
                print(f"step {state.global_step}/{state.max_steps}: {text}, {left} left", file=sys.stderr, flush=True)

    def show_evaluation(self, state: TrainerState, words: str) -> None:
        """Print the result of an evaluation above the bar."""
        if state.is_world_process_zero and self.training_bar is not None:
            tqdm.write(f"step {state.global_step}: {words}", file=sys.stderr)


class SampleCallback(TrainerCallback):
    """Prints what the model writes after a few prompts, every `every` steps, from the first process.

    Random states and the mode of the model are put back: training is the same, bit for bit, with and without it.

    Args:
        tokenizer: encodes the prompts and decodes what follows.
        prompts: what the samples begin with.
        every: steps between samples.
        length: bytes of a sample.
        throughput: told that sampling is not training.
        trained_model: gives the model to sample from, where the one that is trained holds more than that.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: list[str],
        every: int,
        length: int,
        throughput: Throughput | None = None,
        trained_model: Callable[[], PreTrainedModel] | None = None,
    ):
        self.tokenizer, self.prompts, self.every, self.length = tokenizer, prompts, every, length
        self.throughput = throughput or Throughput()
        self.trained_model = trained_model

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every or not state.is_world_process_zero:
            return
        model = self.trained_model() if self.trained_model else model
        with self.throughput.paused():
            for prompt, text in zip(
                self.prompts, generate_samples(model, self.tokenizer, self.prompts, self.length), strict=True
            ):
                tqdm.write(f"--- step {state.global_step}: sample after {prompt!r}\n{prompt}{text}\n---")
