"""Learning during use: predict every byte of an endless stream, score the prediction and learn from it."""

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_recurrent.checkpoints.provenance_files import write_provenance
from hf_recurrent.checkpoints.records import Provenance
from hf_recurrent.checkpoints.weights import check_weights
from hf_recurrent.learning_rules.rowwise_adagrad import use_sparse_gradients
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, supports_recurrent_state
from hf_recurrent.online.block_step import BlockStep, LearnerStream, aligned
from hf_recurrent.online.learner_record import LearnerRecord
from hf_recurrent.online.prequential import PrequentialMeter, PrequentialRecord
from hf_recurrent.online.saved_learner import load_saved_model, read_saved_learner, restore_learner, save_learner
from hf_recurrent.online.settings import LearnerSettings

# Bytes that are encoded at a time.
_PIECE = 1 << 16
# Settings that may change when a learner is loaded; the others determine the shapes of carried tensors.
_CHANGEABLE = ("learning_rate", "table_learning_rate", "max_grad_norm", "learn")


class OnlineLearner:
    """Reads one stream of bytes, possibly endless: every byte is predicted, scored and learned from.

    The learner holds state, sensitivities and optimizer, and needs constant memory. Cutting the stream into chunks,
    saving and loading change nothing, bit for bit. The model is trained in place, in evaluation mode, and can be
    evaluated, saved and pushed like any other.

    Example:
        ```python
        learner = OnlineLearner(model, rule="rtrl", learning_rate=1e-4)
        learner.read(b"any bytes, as they come")
        for record in learner.learn(open("log.txt", "rb")):  # anything that iterates over bytes
            print(record.windowed_bits_per_byte)
        learner.save("checkpoint")
        learner = OnlineLearner.load("checkpoint")
        learner.model.generate(**learner.context(), max_new_tokens=100)  # a continuation of the stream
        ```

    Args:
        model: a recurrent language model; for `rtrl`, with units that do not mix channels.
        tokenizer: a byte tokenizer; None to use the bytes as token ids.
        settings: fields of [`LearnerSettings`].

    Attributes:
        bytes_read: bytes taken from the stream.
        end: the token that ends an episode; None if there is none.
        stream: the stream that is read, with its state; assign another one ([`new_stream`]) to continue that.
        meter: prequential scores of all streams.
        metadata: JSON values of the caller, saved with the learner.
        training_record: provenance of the weights; `training_record.name_source` names the stream.

    Raises:
        ValueError: the model carries no state or does not support the rule, the tokenizer does not encode single
            bytes, or a setting is not allowed.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, **settings: Any):
        if not supports_recurrent_state(model):
            raise ValueError(
                f"`model` is a {type(model).__name__}, which carries no state; it must be a recurrent model."
            )
        if tokenizer is not None and not hasattr(tokenizer, "encode_bytes"):
            raise ValueError(f"`tokenizer` is a {type(tokenizer).__name__}; it must have `encode_bytes`.")
        self.settings = LearnerSettings(**settings)
        self.model, self.tokenizer = model.eval(), tokenizer
        use_sparse_gradients(model)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = aligned(tensor.data)
        self.end = None if self.settings.binary else 0 if tokenizer is None else tokenizer.eos_token_id
        self.bytes_read, self.metadata = 0, {}
        self.step = BlockStep(model, self.settings)
        self.stream = self.new_stream()
        self.meter = PrequentialMeter(self.settings.window)
        self.training_record = LearnerRecord(model, self.settings, self.step.optimizer)

    # ---- Reading ----

    def read(self, data: bytes | bytearray | memoryview) -> PrequentialRecord:
        """Read some bytes; an incomplete block waits for more.

        Raises:
            ValueError: `data` is not bytes, or is outside the model's vocabulary; none of it was read.
            NonFiniteLossError: a NaN or infinite loss or gradient. The weights are unchanged since the block before,
                and `bytes_read` is the position in the stream.
        """
        _check_bytes(data)
        for begin in range(0, len(data), _PIECE):
            piece, before = data[begin : begin + _PIECE], self.bytes_read
            tokens = self._encode(piece)
            self._look_at_model()
            try:
                self._read_tokens(tokens)
            finally:
                self.training_record.add(piece[: self.bytes_read - before])
        return self.record()

    def _read_tokens(self, tokens: list[int]) -> None:
        """Read bytes, some blocks at a time; after an exception, those after the block that failed were not read."""
        stream, stride, rest = self.stream, self.settings.stride, iter(tokens)
        most = stride * self.step.blocks_at_once
        while True:
            before = [*stream.waiting], stream.last
            if not (taken := stream.take(rest, self.end, most)):
                return
            waiting = len(stream.waiting)
            self.bytes_read += len(taken)
            try:
                while len(stream.waiting) >= stride:
                    self._read_blocks(len(stream.waiting) // stride)
            except BaseException:
                learned = waiting - len(stream.waiting)
                stream.waiting, stream.last = before
                self.bytes_read += len(stream.take(taken, self.end, learned + stride)) - len(taken)
                del stream.waiting[:learned]
                raise

    def _read_blocks(self, count: int) -> None:
        """Predict, learn and score; after an exception, the block that failed and those after it still wait."""
        stream, stride, learned = self.stream, self.settings.stride, None
        if count > 1:
            blocks = stream.blocks(count, stride, self._device)
            learned = self.step.learn_blocks(stream.carried, stream.state, blocks)
        if learned is None:
            for _ in range(count):
                self._read_block(stride)
            return
        if learned.count:
            self.training_record.read_rates()
            stream.advance(learned.count * stride, learned.state)
            self.meter.add(learned.nats.numpy())
        if learned.error is not None:
            raise learned.error

    def _read_block(self, size: int) -> None:
        """Predict, learn and score; after an exception, the block still waits and the weights are unchanged."""
        stream = self.stream
        nats, state = self.step.read(stream.carried, stream.state, stream.blocks(1, size, self._device))
        self._update(size)
        stream.advance(size, state)
        self.meter.add(nats.numpy())

    def _update(self, added: int = 0, *, now: bool = False) -> None:
        if self.step.update(self.stream.carried, added, now=now):
            self.training_record.read_rates()

    def _look_at_model(self) -> None:
        """Notice what the caller has changed since the last block."""
        self._device = self.model.device
        if self.step.learning is not None:
            self.step.learning.begin()

    def flush(self) -> PrequentialRecord:
        """Learn from an incomplete block, at the end of a stream."""
        self._look_at_model()
        if self.stream.waiting:
            self._read_block(len(self.stream.waiting))
        self._update(now=True)
        return self.record()

    def learn(self, source: Iterable[bytes], report_every: int = 1000) -> Iterator[PrequentialRecord]:
        """Read a source to its end, or forever.

        Args:
            source: chunks of bytes: a list, a generator, a binary file, or the result of [`open_source`]. An empty
                chunk means that no data has arrived.
            report_every: bytes between two records.

        Yields:
            A record at every multiple of `report_every` bytes, at empty chunks, and at the end. After each, the
            learner may be saved, used or abandoned: no byte is read ahead. (An interrupt during a step leaves that
            step half done; `hf-recurrent learn` stops between steps.)

        Raises:
            ValueError: `report_every` is below 1, or an error of [`read`]. Exceptions of the source pass through.
        """
        if report_every < 1:
            raise ValueError(f"`report_every` is {report_every}; it must be at least 1.")
        if isinstance(source, bytes | bytearray | memoryview):
            source = [source]
        begin, first = time.perf_counter(), self.bytes_read

        def report() -> PrequentialRecord:
            seconds = max(time.perf_counter() - begin, 1e-9)
            return dataclasses.replace(self.record(), bytes_per_second=(self.bytes_read - first) / seconds)

        for piece in self._pieces(source, report_every):
            self.read(piece)
            if not piece or self.bytes_read % report_every == 0:
                yield report()
                begin, first = time.perf_counter(), self.bytes_read
        if self.bytes_read > first:
            yield report()

    def _pieces(self, source: Iterable[bytes], report_every: int) -> Iterator[bytes | memoryview]:
        """The chunks of a source, cut where the bytes read reach a multiple of `report_every`."""
        for chunk in source:
            _check_bytes(chunk)
            if not chunk:
                yield chunk
            rest = memoryview(chunk)  # slices of it are not copies
            while rest:
                size = report_every - self.bytes_read % report_every
                yield rest[:size]
                rest = rest[size:]

    def _encode(self, data: bytes | bytearray | memoryview) -> list[int]:
        tokens = list(data) if self.tokenizer is None else self.tokenizer.encode_bytes(data).tolist()
        vocab_size = self.model.config.vocab_size
        if tokens and max(tokens) >= vocab_size:
            raise ValueError(f"`data` has the token {max(tokens)}; it must be below the vocabulary size {vocab_size}.")
        return tokens

    # ---- Looking ----

    @property
    def updates(self) -> int:
        """Optimizer steps."""
        return self.step.updates

    def record(self) -> PrequentialRecord:
        """Bytes read, updates and bits per byte so far."""
        meter = self.meter
        return PrequentialRecord(self.bytes_read, self.updates, meter.bits_per_byte, meter.windowed_bits_per_byte)

    @property
    def slow_because(self) -> str | None:
        """The reason why blocks are learned in plain torch, several times slower than in the compiled kernel; None if
        they are not, or before the first block."""
        return None if self.step.learning is None else self.step.learning.problem

    def learn_in_plain_torch(self) -> None:
        """From now on, do not use the compiled kernel, to compare with it. The results differ by rounding."""
        if self.step.learning is not None:
            self.step.learning.use_plain_torch()

    @property
    def has_context(self) -> bool:
        """True if there is text to continue, False at the beginning of an episode."""
        return self.stream.last is not None

    def context(self) -> dict[str, Any]:
        """Arguments for `model.generate` to continue the stream; the learner is unchanged.

        Raises:
            ValueError: nothing was read since the beginning of the episode.
        """
        stream, model = self.stream, self.model
        if stream.last is None:
            raise ValueError("There is no text to continue: the stream is at the beginning of an episode.")
        tokens = [(token, begins) for token, _, begins in stream.waiting] + [stream.last]
        begin = max((index for index, (_, begins) in enumerate(tokens) if begins), default=None)
        state = stream.state if begin is None else model.init_state(1)
        input_ids = torch.tensor([[token for token, _ in tokens[begin:]]], device=model.device)
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "state": state}

    def new_stream(self, state: RecurrentState | None = None, last: int | None = None) -> LearnerStream:
        """Another stream to read, with sensitivities of zero.

        Args:
            state: the state before its last byte; zero by default.
            last: the last byte; None at the beginning of an episode.
        """
        state = self.model.init_state(1) if state is None else {name: aligned(part) for name, part in state.items()}
        return LearnerStream(state, self.step.init_carried(), None if last is None else (last, False))

    # ---- Saving ----

    def save(self, directory: str | os.PathLike) -> None:
        """Write model, tokenizer and learner to a directory, atomically, with a checksum of every file.

        Tensors are safetensors and the rest JSON. `from_pretrained` and all commands read it as a model; [`load`]
        continues exactly here.

        Raises:
            ValueError: the directory contains other files.
            OSError: the directory cannot be written, for example on a full disk; what was saved there is unchanged.
        """
        save_learner(self, directory)

    def save_model(self, directory: str | os.PathLike) -> None:
        """Write only the model, its tokenizer and its provenance."""
        self.model.save_pretrained(directory)
        write_provenance(self.record_training(), directory)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)

    def record_training(self) -> Provenance:
        """The provenance of the model's weights, up to date."""
        return self.training_record.update(self.record())

    @classmethod
    def load(
        cls, directory: str | os.PathLike, model: PreTrainedModel | None = None, tokenizer: Any = None, **changes: Any
    ) -> "OnlineLearner":
        """Continue from the files of [`save`], on any device.

        Args:
            directory: the saved learner.
            model: the model saved there, if it is already loaded.
            tokenizer: its tokenizer, in the same case.
            changes: new values of the learning rates, `max_grad_norm` and `learn`. If learning was off, sensitivities
                begin at zero.

        Raises:
            ValueError: there is no saved learner, a file is missing, damaged or from another model, or a setting
                cannot change. The model is unchanged then.
        """
        tree = read_saved_learner(directory)
        settings = dataclasses.asdict(tree["settings"])
        for name, value in changes.items():
            if name not in _CHANGEABLE and value != settings.get(name):
                raise ValueError(
                    f"`{name}` is {value!r}, but the learner was saved with {settings.get(name)!r}; only "
                    f"{', '.join(_CHANGEABLE)} can change."
                )
        if model is None:
            model, tokenizer = load_saved_model(directory)
        else:
            check_weights(model, directory)
        learner = cls(model, tokenizer, **settings | changes)
        try:
            restore_learner(learner, tree)
            learner.training_record.resume(directory, learner.updates)
        except ValueError as error:
            raise ValueError(f"The learner {os.fspath(directory)!r} does not match the model: {error}") from error
        return learner


def _check_bytes(data: Any) -> None:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ValueError(f"The stream has a {type(data).__name__}; it must be bytes (for text, use `.encode()`).")
