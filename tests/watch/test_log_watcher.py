"""Lines are scored exactly, learned from unless they are flagged, and continued exactly."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, set_seed

from hf_recurrent import HawkConfig, OnlineLearner
from hf_recurrent.watch.log_watcher import DivergedError, LineReport, LogWatcher, WatchSettings, score_line

LINES = [b"12:%02d request %d served in %d ms" % (n // 60, n % 60, 20 + n % 7) for n in range(120)]


def new_learner(**settings):
    set_seed(0)
    config = HawkConfig(hidden_size=32, state_size=32, num_hidden_layers=1, intermediate_size=64)
    model = AutoModelForCausalLM.from_config(config)
    return OnlineLearner(model, stride=32, learning_rate=3e-3, binary=True, **settings)


def test_bits_of_a_line_are_those_after_the_whole_stream():
    """Without learning, they equal the scores of one pass over the text."""
    learner = new_learner(learn=False)
    text = b"\n" + LINES[0] + b"\n" + LINES[1] + b"\n"
    learner.read(text[: -len(LINES[1]) - 1])
    bits = score_line(learner, LINES[1] + b"\n")
    ids = torch.tensor([list(text)])
    with torch.no_grad():
        logits = learner.model(ids).logits[0].double()
    nats = -torch.log_softmax(logits, -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    assert np.allclose(bits, nats[-len(bits) :].numpy() / math.log(2), atol=1e-4)


def test_unusual_lines_are_found_and_not_learned_from():
    watcher = LogWatcher(new_learner(), WatchSettings(0.01, window=100))
    for line in LINES:
        watcher.read(line)
    before = {name: value.clone() for name, value in watcher.learner.model.state_dict().items()}
    read = watcher.learner.bytes_read
    report = watcher.read(b"12:02 kernel panic: \xff\x00 no init")
    assert report.is_unusual and report.score > report.threshold and report.rarity > 6
    assert watcher.learner.bytes_read == read
    assert all(torch.equal(before[name], value) for name, value in watcher.learner.model.state_dict().items())
    begin, end = report.surprising()[0]
    assert 0 <= begin < end <= len(report.bits)
    assert not watcher.read(LINES[-1].replace(b"59", b"58")).is_unusual


def test_flagged_lines_are_learned_from_on_request():
    watcher = LogWatcher(new_learner(), WatchSettings(0.01, learn_flagged=True, window=100))
    for line in LINES[:60]:
        watcher.read(line)
    read = watcher.learner.bytes_read
    assert watcher.read(b"kernel panic: \xff\x00 no init").is_unusual
    assert watcher.learner.bytes_read > read


def test_a_saved_watcher_continues_exactly(tmp_path):
    settings = WatchSettings(0.02, window=60)
    whole = LogWatcher(new_learner(), settings)
    expected = [whole.read(line) for line in LINES[:80]]
    first = LogWatcher(new_learner(), settings)
    for line in LINES[:60]:
        first.read(line)
    first.learner.save(tmp_path / "learner")
    second = LogWatcher(OnlineLearner.load(tmp_path / "learner"), settings)
    second.load(first.state())
    for line, wanted in zip(LINES[60:80], expected[60:], strict=True):
        report = second.read(line)
        assert np.array_equal(report.bits, wanted.bits)
        assert (report.score, report.threshold, report.is_unusual) == (
            wanted.score,
            wanted.threshold,
            wanted.is_unusual,
        )


def test_a_diverged_model_is_noticed():
    watcher = LogWatcher(new_learner(), WatchSettings())
    with torch.no_grad():
        next(iter(watcher.learner.model.parameters())).fill_(float("nan"))
    with pytest.raises(DivergedError):
        watcher.judge(LINES[0])
    watcher.replace_learner(new_learner())
    assert not watcher.judge(LINES[0]).is_unusual


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"false_alarms": 0}, "`false_alarms` is 0; it must be more than 0"),
        ({"false_alarms": 0.001, "window": 100}, "`window` is 100; .* at least 1000"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        WatchSettings(**settings)


def test_stretches_that_surprise():
    bits = np.array([0, 5, 5, 0, 9, 0, 0, 8, 20.0])
    report = LineReport(bits, {"bytes": 1.0}, 1.0, 1.0, 0.0, True)
    assert report.surprising() == [(1, 5), (7, 8)]  # the last byte is the line end
