"""What a run shows while it trains: a progress bar in bytes, and samples."""

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import ProgressCallback


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


def with_unit(value: float, unit: str = "") -> str:
    """1234567 → 1.2 M."""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.1f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()


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
        if "eval_bits_per_byte" in logs:
            tqdm.write(
                f"step {state.global_step}: {logs['eval_bits_per_byte']:.3f} bits per byte on the held-out episodes",
                file=sys.stderr,
            )
        elif "eval_accuracy" in logs:
            tqdm.write(
                f"step {state.global_step}: {logs['eval_accuracy']:.1%} of the answers right, "
                f"{logs['eval_exact_match']:.1%} of the examples",
                file=sys.stderr,
            )
        elif "bits_per_byte" in logs:
            text = (
                f"{logs['bits_per_byte']:.3f} bits per byte, {with_unit(logs['bytes_per_second'], 'B/s')}, "
                f"{with_unit(logs['state_resets'])} resets"
            )
            self.training_bar.set_postfix_str(text)
            if not self._terminal:
                rate = (time.perf_counter() - self._begin) / max(state.global_step - self._first_step, 1)
                left = _clock(rate * (state.max_steps - state.global_step))
                print(f"step {state.global_step}/{state.max_steps}: {text}, {left} left", file=sys.stderr, flush=True)


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


def generate_samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    length: int,
    *,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[str]:
    """One continuation of at most `length` bytes for each prompt; random states and mode are left as they were."""
    training = model.training
    python, array = random.getstate(), np.random.get_state()
    model.eval()
    try:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            samples = []
            for prompt in prompts:
                inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
                output = model.generate(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    max_new_tokens=length,
                    do_sample=True,
                    temperature=temperature,
                    eos_token_id=tokenizer.eos_token_id,
                    pad_token_id=tokenizer.pad_token_id,
                )
                new = output[0, inputs["input_ids"].shape[1] :]
                samples.append(tokenizer.decode(new, skip_special_tokens=True, errors="replace"))
            return samples
    finally:
        random.setstate(python)
        np.random.set_state(array)
        model.train(training)
