"""Online learning of Memora: the curves of its log."""

from types import SimpleNamespace

from papers import load_experiment
from papers.engine.training import logged


def test_curves():
    history = [{"step": 2, "bits_per_byte": 5.0}, {"step": 2, "eval_bits_per_byte": 4.0}, {"step": 3, "loss": 1.0}]
    trainer = SimpleNamespace(state=SimpleNamespace(log_history=history))
    assert [logged(trainer, name) for name in ("eval_bits_per_byte", "bits_per_byte")] == [{2: 4.0}, {2: 5.0}]
    row = {"label": "RTRL, B = 1", "value": {"0.5": 4.0}, "while reading": {"0.5": 5.0}}
    lines = load_experiment("online-memora").curves([row])
    assert lines == {"RTRL, B = 1": {0.5: [4.0]}, "RTRL, B = 1, while reading": {0.5: [5.0]}}
