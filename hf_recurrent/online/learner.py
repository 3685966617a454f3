"""Learning during use: predict every byte of an endless stream, score the prediction and learn from it."""

import dataclasses
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from hf_recurrent.checkpoints.files import new_staging_directory, publish_directory, save_tree, writing_checkpoint
from hf_recurrent.checkpoints.manifest import write_manifest
from hf_recurrent.checkpoints.optimizer_state import load_optimizer_state, optimizer_state
from hf_recurrent.checkpoints.provenance_files import write_provenance
from hf_recurrent.checkpoints.records import Provenance
from hf_recurrent.checkpoints.weights import check_weights
from hf_recurrent.learning_rules.block_learning import BlockLearning
from hf_recurrent.learning_rules.optimizers import apply_learning_rate_factors
from hf_recurrent.learning_rules.rules import NonFiniteLossError, build_learning_rule
from hf_recurrent.modeling.block.recurrent_state import (
    RecurrentState,
    detach_state,
    supports_recurrent_state,
    upcast,
)
from hf_recurrent.online.learner_record import LearnerRecord
from hf_recurrent.online.prequential import PrequentialMeter, PrequentialRecord
from hf_recurrent.online.saved_learner import (
    FORMAT,
    LEARNER_FILES,
    check_tensors,
    is_saved_learner,
    load_saved_model,
    read_saved_learner,
)
from hf_recurrent.online.settings import LearnerSettings

# Bytes that are encoded at a time.
_PIECE = 1 << 16
# Settings that may change when a learner is loaded; the others determine the shape of what it carries.
CHANGEABLE = ("learning_rate", "max_grad_norm", "learn")


@dataclass
class LearnerStream:
    """The part of a learner that belongs to one stream; weights, optimizer and scores belong to all.

    Args:
        state: after the bytes that were learned from.
        carried: sensitivities, as the learning rule carries them.
        last: the last byte, whose successor is unknown, and True if it begins an episode; None between episodes.
        waiting: (byte, next byte, True if the first begins an episode) of an incomplete block.
    """

    state: RecurrentState
    carried: RecurrentState
    last: tuple[int, bool] | None = None
    waiting: list[tuple[int, int, bool]] = field(default_factory=list)


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
        updates: optimizer steps.
        metadata: JSON values of the caller, saved with the learner.
        training_record: records the provenance of the weights; `training_record.name_source` names the stream.

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
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = _aligned(tensor.data)
        self.bytes_read, self.updates, self.metadata = 0, 0, {}
        self._meter = PrequentialMeter(self.settings.window)
        self._end = None if self.settings.binary else 0 if tokenizer is None else tokenizer.eos_token_id
        # The last byte, whose successor is unknown, and True if it begins an episode.
        self._last: tuple[int, bool] | None = None
        # (byte, next byte, True if the first begins an episode) of an incomplete block.
        self._waiting: list[tuple[int, int, bool]] = []
        self._state = model.init_state(1)
        self._carried: RecurrentState = {}
        self._summed_blocks, self._summed_bytes = 0, 0  # in the gradients since the last update
        self.training_record = LearnerRecord(model, self.settings)
        if self.settings.learn:
            self._rule = build_learning_rule(self.settings.rule, model)
            self._carried = self._rule.init_carried(1)
            self._parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
            self._optimizer = self.settings.build_optimizer(self._parameters.values())
            apply_learning_rate_factors(self._optimizer, model, self._parameters)
            self._optimizer.zero_grad()
            targets = self.settings.stride * self.settings.update_every
            self._learning = BlockLearning(self._rule, self._optimizer, self.settings.stride, targets)
            self.training_record.watch(self._optimizer)

    # ---- Reading ----

    def read(self, data: bytes | bytearray | memoryview) -> PrequentialRecord:
        """Read some bytes; those that do not fill a block wait for more.

        Raises:
            ValueError: `data` is not bytes, or is outside the model's vocabulary; none of it was read.
            NonFiniteLossError: a NaN or infinite loss or gradient. The weights are unchanged since the block before,
                and `bytes_read` is the position in the stream.
        """
        _check_bytes(data)
        for begin in range(0, len(data), _PIECE):
            piece, before = data[begin : begin + _PIECE], self.bytes_read
            tokens = self._encode(piece)
            if self.settings.learn:
                self._learning.begin()
            try:
                for token in tokens:
                    self._take(token)
            finally:
                self.training_record.add(piece[: self.bytes_read - before])
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

    def flush(self) -> PrequentialRecord:
        """Learn from an incomplete block, at the end of a stream."""
        if self.settings.learn:
            self._learning.begin()
        if self._waiting:
            self._read_block(len(self._waiting))
        if self._summed_blocks:
            self._update()
        return self.record()

    def record(self) -> PrequentialRecord:
        """Bytes read, updates and bits per byte so far."""
        meter = self._meter
        return PrequentialRecord(self.bytes_read, self.updates, meter.bits_per_byte, meter.windowed_bits_per_byte)

    @property
    def slow_because(self) -> str | None:
        """Why blocks are learned in plain torch, several times slower than in the compiled kernel; None if they are
        not, or before the first block."""
        return self._learning.problem if self.settings.learn else None

    def learn_in_plain_torch(self) -> None:
        """From now on, do not use the compiled kernel, to compare with it. The results differ by rounding."""
        if self.settings.learn:
            self._learning.use_plain_torch()

    @property
    def has_context(self) -> bool:
        """True if there is text to continue, False at the beginning of an episode."""
        return self._last is not None

    def context(self) -> dict[str, Any]:
        """Arguments for `model.generate` to continue the stream; the learner is unchanged.

        Raises:
            ValueError: nothing was read since the beginning of the episode.
        """
        if not self.has_context:
            raise ValueError("There is no text to continue: the stream is at the beginning of an episode.")
        tokens = [(token, begins) for token, _, begins in self._waiting] + [self._last]
        begin = max((place for place, (_, begins) in enumerate(tokens) if begins), default=None)
        state = self._state if begin is None else self.model.init_state(1)
        input_ids = torch.tensor([[token for token, _ in tokens[begin:]]], device=self.model.device)
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "state": state}

    def new_stream(self, state: RecurrentState | None = None, last: int | None = None) -> LearnerStream:
        """Another stream for [`exchange_stream`], with sensitivities of zero.

        Args:
            state: of one stream, before its last byte; zero by default.
            last: the last byte; None at the beginning of an episode.
        """
        carried = self._rule.init_carried(1) if self.settings.learn else {}
        state = self.model.init_state(1) if state is None else {name: _aligned(part) for name, part in state.items()}
        return LearnerStream(state, carried, None if last is None else (last, False))

    def exchange_stream(self, stream: LearnerStream) -> LearnerStream:
        """Read `stream` from now on; returns the one that was read so far, to be continued later."""
        before = LearnerStream(self._state, self._carried, self._last, self._waiting)
        self._state, self._carried, self._last, self._waiting = (
            stream.state,
            stream.carried,
            stream.last,
            stream.waiting,
        )
        return before

    def _encode(self, data: bytes | bytearray | memoryview) -> list[int]:
        tokens = list(data) if self.tokenizer is None else self.tokenizer.encode_bytes(data).tolist()
        vocab_size = self.model.config.vocab_size
        if tokens and max(tokens) >= vocab_size:
            raise ValueError(f"`data` has the token {max(tokens)}; it must be below the vocabulary size {vocab_size}.")
        return tokens

    def _take(self, token: int) -> None:
        last, self._last = self._last, None if token == self._end else (token, self._last is None)
        self.bytes_read += 1
        if last is not None:
            self._waiting.append((last[0], token, last[1]))
        if len(self._waiting) >= self.settings.stride:
            self._read_block(self.settings.stride)

    def _read_block(self, size: int) -> None:
        """Predict, score and learn; after an exception, the block still waits and the weights are unchanged."""
        columns = zip(*self._waiting[:size], strict=True)
        device = next(self.model.parameters()).device
        block = tuple(torch.tensor([column], device=device) for column in columns)
        if self.settings.learn:
            nats, state = self._learning.learn(self._carried, self._state, block)
        else:
            nats, state = self._predict(*block)
        nats = nats.double().cpu()
        if not bool(nats.isfinite().all()):
            raise NonFiniteLossError("The loss is NaN or infinite; the model cannot predict this stream.")
        if self.settings.learn:
            self._summed_blocks += 1
            self._summed_bytes += size
            if self._summed_blocks == self.settings.update_every:
                self._update()
        self._state = {name: _aligned(tensor) for name, tensor in detach_state(state).items()}
        del self._waiting[:size]
        self._meter.add(nats.numpy())

    @torch.no_grad()
    def _predict(
        self, input_ids: torch.Tensor, labels: torch.Tensor, resets: torch.Tensor
    ) -> tuple[torch.Tensor, RecurrentState]:
        reset_mask = resets if bool(resets.any()) else None
        output = self.model(input_ids, reset_mask=reset_mask, state=self._state, use_cache=True)
        return F.cross_entropy(upcast(output.logits[0]), labels[0], reduction="none"), output.state

    def _update(self) -> None:
        # Fewer bytes at the end of a stream.
        factor = self.settings.stride * self.settings.update_every / self._summed_bytes
        norm = self._learning.update(factor, self.settings.max_grad_norm)
        self._summed_blocks, self._summed_bytes = 0, 0
        if not math.isfinite(norm):
            for sensitivity in self._carried.values():  # they may have diverged
                sensitivity.zero_()
            raise NonFiniteLossError(f"The norm of the gradient is {norm}: nothing was learned from it.")
        self.updates += 1
        self.training_record.read_rates()

    # ---- Saving ----

    def save(self, directory: str | os.PathLike) -> None:
        """Write model, tokenizer and learner to a directory, atomically, with a checksum of every file.

        Tensors are safetensors and the rest JSON. `from_pretrained` and all commands read it as a model; [`load`]
        continues exactly here.

        Raises:
            ValueError: the directory contains other files.
            OSError: the directory cannot be written, for example on a full disk; what was saved there is unchanged.
        """
        directory = Path(directory).absolute()
        empty = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
        if not empty and not is_saved_learner(directory):
            raise ValueError(f"`directory` is {str(directory)!r}; it must be new, empty or a saved learner.")
        with writing_checkpoint(directory):
            staging = new_staging_directory(directory)
            self.save_model(staging)
            save_tree({"format": FORMAT} | self._tree(), staging, LEARNER_FILES)
            write_manifest(staging)
            publish_directory(staging, directory)

    def save_model(self, directory: str | os.PathLike) -> None:
        """Write only the model, its tokenizer and its provenance."""
        self.model.save_pretrained(directory)
        write_provenance(self.record_training(), directory)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)

    def record_training(self) -> Provenance:
        """The provenance of the model's weights, up to date."""
        meter = self._meter
        return self.training_record.update(self.updates, meter.bits_per_byte, meter.windowed_bits_per_byte)

    def _tree(self) -> dict[str, Any]:
        tree = {
            "settings": dataclasses.asdict(self.settings),
            "bytes_read": self.bytes_read,
            "updates": self.updates,
            "metadata": self.metadata,
            "meter": self._meter.state_dict(),
            "last": self._last,
            "waiting": self._waiting,
            "state": self._state,
            "carried": self._carried,
            "summed": (self._summed_blocks, self._summed_bytes),
            "gradients": {},
            "optimizer": None,
        }
        if self.settings.learn:
            self._learning.write_steps()
            gradients = {name: parameter.grad for name, parameter in self._parameters.items()}
            tree["gradients"] = {name: gradient for name, gradient in gradients.items() if gradient is not None}
            tree["optimizer"] = optimizer_state(self._optimizer)
        return tree

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike,
        model: PreTrainedModel | None = None,
        tokenizer: Any = None,
        **changes: Any,
    ) -> "OnlineLearner":
        """Continue from the files of [`save`], on any device.

        Args:
            directory: the saved learner.
            model: the model saved there, if it is already loaded.
            tokenizer: its tokenizer, in the same case.
            changes: new values of `learning_rate`, `max_grad_norm` and `learn`. If learning was off, sensitivities
                begin at zero.

        Raises:
            ValueError: there is no saved learner, a file is missing, damaged or from another model, or a setting
                cannot change. The model is unchanged then.
        """
        tree = read_saved_learner(directory)
        settings = dataclasses.asdict(tree["settings"])
        for name, value in changes.items():
            if name not in CHANGEABLE and value != settings.get(name):
                raise ValueError(
                    f"`{name}` is {value!r}, but the learner was saved with {settings.get(name)!r}; only "
                    f"{', '.join(CHANGEABLE)} can change."
                )
        if model is None:
            model, tokenizer = load_saved_model(directory)
        else:
            check_weights(model, directory)
        learner = cls(model, tokenizer, **settings | changes)
        try:
            learner._restore(tree)
            learner.training_record.resume(directory, getattr(learner, "_optimizer", None), learner.updates)
        except ValueError as error:
            raise ValueError(f"The learner {os.fspath(directory)!r} does not match the model: {error}") from error
        return learner

    def _restore(self, tree: dict[str, Any]) -> None:
        """Take over checked values; those that depend on the model are checked here."""
        tokens = [token for *item, _ in (*tree["waiting"], tree["last"] or [False]) for token in item]
        if tokens and max(tokens) >= self.model.config.vocab_size:
            raise ValueError(f"it has the token {max(tokens)}; the vocabulary size is {self.model.config.vocab_size}.")
        self.bytes_read, self.updates, self.metadata = tree["bytes_read"], tree["updates"], tree["metadata"]
        self._meter.load_state_dict(tree["meter"])
        self._last, self._waiting = tree["last"], tree["waiting"]
        self._state = _like("state", tree["state"], self._state)
        if not (self.settings.learn and tree["settings"].learn):
            return
        check_tensors("gradients", tree["gradients"], self._parameters)
        self._carried = _like("carried", tree["carried"], self._carried)
        rates = [group["lr"] for group in self._optimizer.param_groups]
        load_optimizer_state(self._optimizer, tree["optimizer"])
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._summed_blocks, self._summed_bytes = tree["summed"]
        for name, gradient in tree["gradients"].items():
            self._parameters[name].grad = gradient.to(self._parameters[name])


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy aligned like a new one: alignment decides how sums are rounded, and a resumed run has to
    round like an uninterrupted one."""
    aligned = tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
    return tensor if aligned else tensor.clone(memory_format=torch.contiguous_format)


def _check_bytes(data: Any) -> None:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ValueError(f"The stream has a {type(data).__name__}; it must be bytes (for text, use `.encode()`).")


def _like(part: str, stored: RecurrentState, own: RecurrentState) -> RecurrentState:
    """A stored state, checked, with the types and device of the learner's own."""
    check_tensors(part, stored, own)
    if missing := sorted(own.keys() - stored.keys()):
        raise ValueError(f"its `{part}` lacks `{missing[0]}`.")
    return {name: _aligned(stored[name].to(tensor)) for name, tensor in own.items()}
