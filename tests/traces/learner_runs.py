"""Runs of the online learner: one stream, read once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fixed_text import BINARY, PASSAGES
from trace_values import Trace, of_bytes, of_directory, of_each, of_json
from trainer_runs import build_model

from hf_recurrent import ByteTokenizer, OnlineLearner

# An episode, and most of another.
STREAM = "\0".join(PASSAGES[4:6]).encode()[:122]
_MEASURED = ("bytes_read", "updates", "bits_per_byte", "windowed_bits_per_byte")
BINARY_STREAM = (BINARY[0] + BINARY[2])[:110]


class LearnerRun:
    """A learner that reads a stream in pieces, is asked for what may come next, and reaches the end.

    Args:
        model: builds the model.
        stream: bytes.
        tokenizer: None, or builds one.
        settings: arguments of [`OnlineLearner`].
    """

    def __init__(
        self,
        model: Callable[[], Any] = build_model,
        stream: bytes = STREAM,
        tokenizer: Callable[[], Any] | None = None,
        **settings: Any,
    ):
        self.model, self.stream, self.tokenizer = model, stream, tokenizer
        self.settings = {"learning_rate": 3e-3, "window": 50} | settings

    def __call__(self, folder: Path) -> Trace:
        learner = OnlineLearner(self.model(), self.tokenizer and self.tokenizer(), **self.settings)
        place = self._middle()
        trace = self._read(learner, self.stream[:place])
        learner.save(folder / "middle")
        return trace | self._finish(learner, folder)

    def resumed(self, folder: Path, whole: Path) -> Trace:
        """Loaded from where the whole run was saved in the middle; only the second part is there."""
        return self._finish(OnlineLearner.load(whole / "middle"), folder)

    def _middle(self) -> int:
        return len(self.stream) // 2 + 3

    def _finish(self, learner: OnlineLearner, folder: Path) -> Trace:
        trace = self._read(learner, self.stream[self._middle() :])
        learner.save(folder / "end")
        trace |= of_directory("end/", folder / "end")
        if learner.has_context:
            context = learner.context()
            context |= {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
            trace["generated"] = of_bytes(bytes(learner.model.generate(**context)[0].tolist()))
        trace |= of_json("flushed", _numbers(learner.flush()))
        return trace | of_each("model/", learner.model.state_dict())

    def _read(self, learner: OnlineLearner, data: bytes) -> Trace:
        trace: Trace = {}
        for record in learner.learn([data[:20], data[20:]], report_every=16):
            trace |= of_json(f"byte {record.bytes_read}", _numbers(record))
        return trace


def _numbers(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _MEASURED}


def _one_layer() -> Any:
    return build_model(num_hidden_layers=1)


LEARNER_RUNS: dict[str, LearnerRun] = {
    "learner rtrl": LearnerRun(),
    "learner stride 4": LearnerRun(_one_layer, tokenizer=ByteTokenizer, stride=4, update_every=2),
    "learner rmsprop": LearnerRun(optimizer="rmsprop", learning_rate=3e-5, max_grad_norm=0.2, stride=2),
    "learner hawk": LearnerRun(lambda: build_model("hawk-tiny"), max_grad_norm=0.0, stride=3),
    "learner lru": LearnerRun(lambda: build_model("lru-tiny"), stride=2),
    "learner snap1": LearnerRun(lambda: build_model(recurrent_unit="gru"), rule="snap1", stride=3),
    "learner truncated": LearnerRun(rule="truncated", stride=8),
    "learner spatial": LearnerRun(rule="spatial", stride=4, update_every=3),
    "learner without learning": LearnerRun(learn=False, stride=8),
    "learner binary": LearnerRun(stream=BINARY_STREAM, binary=True, stride=2),
    "learner float64": LearnerRun(lambda: build_model().double(), stride=5),
}
RESUMED_LEARNERS = ("learner rtrl", "learner stride 4", "learner rmsprop", "learner snap1", "learner without learning")
