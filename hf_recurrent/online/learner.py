"""Learning during use: predict every byte of an endless stream, score the prediction, learn from it, in one pass."""

import dataclasses
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_recurrent.checkpoint_files import STAGING_PREFIX, load_tree, publish_directory, save_tree
from hf_recurrent.learning_rules.optimizers import RMSPROP_ALPHA, apply_learning_rate_factors
from hf_recurrent.learning_rules.rules import RULES, NonFiniteLossError, build_learning_rule
from hf_recurrent.modeling.recurrent_state import (
    RecurrentState,
    check_state,
    detach_state,
    state_dtype,
    supports_recurrent_state,
)
from hf_recurrent.online.prequential import PrequentialMeter, PrequentialRecord

_FILES = "learner"
# So much of a chunk is decoded at once, however long it is.
_PIECE = 1 << 16
_OPTIMIZERS = ("adamw", "rmsprop")
# What may be different when a learner goes on; everything else belongs to what it carries.
CHANGEABLE = ("learning_rate", "max_grad_norm", "learn")


@dataclass(frozen=True)
class LearnerSettings:
    """How a stream is read.

    Args:
        rule: `rtrl`, `snap1`, `truncated` or `spatial` ([`build_learning_rule`]).
        stride: T, bytes that are predicted and backpropagated through at once. A block waits until it is full.
        update_every: blocks between two updates of the weights; their gradients add up to the mean over all bytes.
        learning_rate: constant.
        optimizer: `adamw` (β 0.9 and 0.999) or `rmsprop` (α 0.9999), both without weight decay.
        max_grad_norm: longer gradients are cut to this norm; 0 for never.
        window: bytes of the windowed bits per byte.
        binary: whether byte 0 is data. Otherwise it ends an episode: state and sensitivities are zero after it.
        learn: False reads and scores only.

    Raises:
        ValueError: a value is not allowed.
    """

    rule: str = "rtrl"
    stride: int = 1
    update_every: int = 1
    learning_rate: float = 3e-5
    optimizer: str = "adamw"
    max_grad_norm: float = 1.0
    window: int = 10_000
    binary: bool = False
    learn: bool = True

    def __post_init__(self):
        for name, allowed in (("rule", RULES), ("optimizer", _OPTIMIZERS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}.")
        for name in ("stride", "update_every", "window"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` is {value!r}; it must be a whole number of at least 1.")
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"`learning_rate` is {self.learning_rate!r}; it must be more than 0.")
        if not self.max_grad_norm >= 0:
            raise ValueError(f"`max_grad_norm` is {self.max_grad_norm!r}; it must be at least 0.")


class OnlineLearner:
    """Reads one stream of bytes, without end if need be: every byte is predicted, scored and learned from.

    State, sensitivities and optimizer are inside, memory is bounded, and where the stream is cut into chunks, saved
    and loaded changes nothing, bit for bit. The model is the caller's: it learns in place, in evaluation mode, and can
    be asked, saved and pushed like any other.

    Example:
        ```python
        learner = OnlineLearner(model, rule="rtrl", learning_rate=1e-4)
        learner.read(b"any bytes, as they come")
        for record in learner.learn(open("log.txt", "rb")):  # anything that iterates over bytes
            print(record.windowed_bits_per_byte)
        learner.save("checkpoint")
        learner = OnlineLearner.load("checkpoint")
        model.generate(**learner.context(), max_new_tokens=100)  # what may come next
        ```

    Args:
        model: a recurrent language model; for `rtrl`, with units whose channels do not mix.
        tokenizer: encodes bytes, one id each; None for the bytes themselves.
        settings: fields of [`LearnerSettings`].

    Attributes:
        bytes_read: bytes taken from the stream.
        updates: steps of the optimizer.
        metadata: JSON values of the caller's own, saved with the rest.

    Raises:
        ValueError: the model carries no state or cannot learn by this rule, the tokenizer does not encode single
            bytes, or a setting is not allowed.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, **settings: Any):
        if not supports_recurrent_state(model):
            raise ValueError(
                f"`model` is a {type(model).__name__}, which carries no state; learning while reading needs one."
            )
        if tokenizer is not None and not hasattr(tokenizer, "encode_bytes"):
            raise ValueError(f"`tokenizer` is a {type(tokenizer).__name__}, which does not encode single bytes.")
        self.settings = LearnerSettings(**settings)
        self.model, self.tokenizer = model.eval(), tokenizer
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = _aligned(tensor.data)
        self.bytes_read, self.updates, self.metadata = 0, 0, {}
        self._meter = PrequentialMeter(self.settings.window)
        self._end = None if self.settings.binary else 0 if tokenizer is None else tokenizer.eos_token_id
        # The last byte, which nothing has followed yet, and whether it begins an episode.
        self._last: tuple[int, bool] | None = None
        # (byte, the one after it, whether the first begins an episode) of a block that is not full yet.
        self._waiting: list[tuple[int, int, bool]] = []
        self._state = model.init_state(1)
        self._carried: RecurrentState = {}
        self._summed_blocks, self._summed_bytes = 0, 0  # whose gradients wait for an update
        if self.settings.learn:
            self._rule = build_learning_rule(self.settings.rule, model)
            self._carried = self._rule.init_carried(1)
            self._parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
            self._optimizer = _build_optimizer(self._parameters.values(), self.settings)
            apply_learning_rate_factors(self._optimizer, model, self._parameters)
            self._optimizer.zero_grad()

    # ---- Reading ----

    def read(self, data: bytes | bytearray | memoryview) -> PrequentialRecord:
        """Read some bytes; those that do not fill a block wait for the next ones.

        Raises:
            ValueError: `data` is no bytes, or holds what the model's vocabulary does not; nothing of it was read.
            NonFiniteLossError: loss or gradient is not finite. The block was not learned from, the weights are as they
                were before it, and `bytes_read` says how far the stream was read.
        """
        _check_bytes(data)
        for begin in range(0, len(data), _PIECE):
            for token in self._encode(data[begin : begin + _PIECE]):
                self._take(token)
        return self.record()

    def learn(self, source: Iterable[bytes], report_every: int = 1000) -> Iterator[PrequentialRecord]:
        """Read a source to its end, if it has one.

        Args:
            source: chunks of bytes: a list, a generator, a binary file, what [`open_source`] returns. An empty chunk
                says that there is nothing for now.
            report_every: bytes between two records.

        Yields:
            A record at every multiple of `report_every` bytes, at empty chunks, and at the end. Between two of them
            the learner may be saved, asked or left: what was read has been learned, and no byte is read ahead. (An
            interrupt in the middle of a step leaves that step half done; `hf-recurrent learn` stops between steps.)

        Raises:
            ValueError: `report_every` is below 1, and what [`read`] raises. What the source raises is passed on.
        """
        if report_every < 1:
            raise ValueError(f"`report_every` is {report_every}; it must be at least 1.")
        if isinstance(source, bytes | bytearray | memoryview):
            source = [source]
        begin, first = time.perf_counter(), self.bytes_read

        def report() -> PrequentialRecord:
            seconds = max(time.perf_counter() - begin, 1e-9)
            return dataclasses.replace(self.record(), bytes_per_second=(self.bytes_read - first) / seconds)

        for chunk in source:
            _check_bytes(chunk)
            if not len(chunk):
                yield report()
                begin, first = time.perf_counter(), self.bytes_read
            place = 0
            while place < len(chunk):
                size = min(report_every - self.bytes_read % report_every, len(chunk) - place)
                self.read(chunk[place : place + size])
                place += size
                if self.bytes_read % report_every == 0:
                    yield report()
                    begin, first = time.perf_counter(), self.bytes_read
        if self.bytes_read > first:
            yield report()

    def flush(self) -> PrequentialRecord:
        """Learn from what waits, though it is less than a block: where a stream ends."""
        if self._waiting:
            self._read_block(len(self._waiting))
        if self._summed_blocks:
            self._update()
        return self.record()

    def record(self) -> PrequentialRecord:
        """Where the learner stands."""
        meter = self._meter
        return PrequentialRecord(self.bytes_read, self.updates, meter.bits_per_byte, meter.windowed_bits_per_byte)

    @property
    def has_context(self) -> bool:
        """Whether there is text to continue; not at the beginning of an episode."""
        return self._last is not None

    def context(self) -> dict[str, Any]:
        """What `model.generate` needs to go on with the stream as read so far; the stream itself stays where it is.

        Raises:
            ValueError: an episode has ended, or nothing was read yet.
        """
        if not self.has_context:
            raise ValueError("There is no text to continue: the stream is at the beginning of an episode.")
        tokens = [(token, begins) for token, _, begins in self._waiting] + [self._last]
        begin = max((place for place, (_, begins) in enumerate(tokens) if begins), default=None)
        state = self._state if begin is None else self.model.init_state(1)
        input_ids = torch.tensor([[token for token, _ in tokens[begin:]]], device=self.model.device)
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "state": state}

    def _encode(self, data: bytes | bytearray | memoryview) -> list[int]:
        tokens = list(data) if self.tokenizer is None else self.tokenizer.encode_bytes(data).tolist()
        vocab_size = self.model.config.vocab_size
        if tokens and max(tokens) >= vocab_size:
            raise ValueError(f"A source gave the token {max(tokens)}, but the model's vocabulary has {vocab_size}.")
        return tokens

    def _take(self, token: int) -> None:
        last, self._last = self._last, None if token == self._end else (token, self._last is None)
        self.bytes_read += 1
        if last is not None:
            self._waiting.append((last[0], token, last[1]))
        if len(self._waiting) >= self.settings.stride:
            self._read_block(self.settings.stride)

    def _read_block(self, size: int) -> None:
        """Predict, score and learn; where that raises, the block waits on and the weights are as they were."""
        columns = zip(*self._waiting[:size], strict=True)
        input_ids, labels, begins = (torch.tensor([column], device=self.model.device) for column in columns)
        reset_mask = begins if bool(begins.any()) else None
        if self.settings.learn:
            targets = self.settings.stride * self.settings.update_every
            output = self._rule.learn(self._carried, self._state, input_ids, labels, reset_mask, targets)
        else:
            with torch.no_grad():
                output = self.model(input_ids, reset_mask=reset_mask, state=self._state, use_cache=True)
        logits = output.logits.detach()[0]
        nats = F.cross_entropy(logits.to(state_dtype(logits.dtype)), labels[0], reduction="none").double().cpu()
        if not bool(nats.isfinite().all()):
            raise NonFiniteLossError("The loss is not finite; the model cannot predict this stream.")
        if self.settings.learn:
            self._summed_blocks += 1
            self._summed_bytes += size
            if self._summed_blocks == self.settings.update_every:
                self._update()
        self._state = {name: _aligned(tensor) for name, tensor in detach_state(output.state).items()}
        del self._waiting[:size]
        self._meter.add(nats.numpy())

    def _update(self) -> None:
        parameters = list(self._parameters.values())
        asked = self.settings.stride * self.settings.update_every
        if self._summed_bytes != asked:  # the last block of a stream
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(asked / self._summed_bytes)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm or float("inf"))
        finite = bool(norm.isfinite())
        if finite:
            self._optimizer.step()
            self.updates += 1
        self._optimizer.zero_grad()
        self._summed_blocks, self._summed_bytes = 0, 0
        if not finite:
            for sensitivity in self._carried.values():  # what has become too large, if anything carried has
                sensitivity.zero_()
            raise NonFiniteLossError(f"The norm of the gradient is {norm.item()}: nothing was learned from it.")

    # ---- Saving ----

    def save(self, directory: str | os.PathLike) -> None:
        """Write everything to a directory that holds the model too, beside the old one and then renamed.

        Tensors are safetensors and the rest JSON. `from_pretrained` and all commands read it as a model; [`load`] goes
        on exactly here.

        Raises:
            ValueError: the directory holds something else.
        """
        directory = Path(directory).absolute()
        if directory.is_file() or (
            directory.is_dir() and any(directory.iterdir()) and not is_saved_learner(directory)
        ):
            raise ValueError(f"`directory` is `{directory}`, which holds something else; it would be replaced.")
        staging = directory.with_name(STAGING_PREFIX + directory.name)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        self.model.save_pretrained(staging)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(staging)
        save_tree(self._tree(), staging, _FILES)
        publish_directory(staging, directory)

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
            gradients = {name: parameter.grad for name, parameter in self._parameters.items()}
            tree["gradients"] = {name: gradient for name, gradient in gradients.items() if gradient is not None}
            tree["optimizer"] = self._optimizer.state_dict()
        return tree

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike,
        model: PreTrainedModel | None = None,
        tokenizer: Any = None,
        **changes: Any,
    ) -> "OnlineLearner":
        """Go on from what [`save`] wrote, on any device.

        Args:
            directory: where it was saved.
            model: the model saved there, if it is loaded already.
            tokenizer: its tokenizer, in the same case.
            changes: other values of `learning_rate`, `max_grad_norm` and `learn`. Learning that was off begins with
                sensitivities of zero.

        Raises:
            ValueError: nothing was saved there, a file is damaged or of another model, or a setting cannot change.
        """
        if not is_saved_learner(directory):
            raise ValueError(f"`directory` is `{os.fspath(directory)}`, where no learner was saved.")
        tree = load_tree(directory, _FILES)
        for name, value in changes.items():
            if name not in CHANGEABLE and value != tree["settings"].get(name):
                raise ValueError(
                    f"`{name}` is {value!r}, but the learner was saved with {tree['settings'].get(name)!r}; only "
                    f"{', '.join(CHANGEABLE)} can change."
                )
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
            if os.path.isfile(os.path.join(directory, "tokenizer_config.json")):
                tokenizer = AutoTokenizer.from_pretrained(directory)
        learner = cls(model, tokenizer, **tree["settings"] | changes)
        try:
            learner._restore(tree)
        except (KeyError, ValueError) as error:
            raise ValueError(f"`{os.fspath(directory)}` does not fit the model: {error}") from error
        return learner

    def _restore(self, tree: dict[str, Any]) -> None:
        self.bytes_read, self.updates, self.metadata = tree["bytes_read"], tree["updates"], tree["metadata"]
        self._meter.load_state_dict(tree["meter"])
        self._last, self._waiting = tree["last"], tree["waiting"]
        self._state = _like(tree["state"], self._state)
        if not (self.settings.learn and tree["settings"]["learn"]):
            return
        self._carried = _like(tree["carried"], self._carried)
        self._summed_blocks, self._summed_bytes = tree["summed"]
        for name, gradient in tree["gradients"].items():
            self._parameters[name].grad = gradient.to(self._parameters[name])
        rates = [group["lr"] for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict(tree["optimizer"])
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def is_saved_learner(directory: str | os.PathLike) -> bool:
    """Whether [`OnlineLearner.save`] wrote this directory."""
    return all(os.path.isfile(os.path.join(directory, f"{_FILES}.{kind}")) for kind in ("json", "safetensors"))


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as an allocation gives them: where a tensor begins decides how sums over it are rounded, and
    neither views nor what is mapped from files begin where tensors of a run that was never stopped do."""
    aligned = tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
    return tensor if aligned else tensor.clone(memory_format=torch.contiguous_format)


def _check_bytes(data: Any) -> None:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ValueError(f"A source gave a {type(data).__name__}; it must give bytes (text has `.encode()`).")


def _like(stored: RecurrentState, own: RecurrentState) -> RecurrentState:
    """What was stored, checked, with type and place of what is there."""
    check_state(stored, {name: tensor.shape for name, tensor in own.items()})
    return {name: _aligned(stored[name].to(tensor)) for name, tensor in own.items()}


def _build_optimizer(parameters: Iterable[torch.nn.Parameter], settings: LearnerSettings) -> torch.optim.Optimizer:
    parameters = list(parameters)
    if settings.optimizer == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=settings.learning_rate, alpha=RMSPROP_ALPHA)
    # One pass over the weights instead of a dozen: at one byte a step that is a good part of the time.
    fused = parameters[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=0.0, fused=fused)
