"""Trainers with the layers of a block as CUDA graphs, here a stand-in on the CPU, train as without."""

import pytest
import torch
from captured_on_cpu import capture_on_cpu
from test_rolling_window_trainer import rolling_trainer
from tiny_run import logged, table_model, tiny_trainer

TRAINERS = {
    "micro-batches": lambda folder, **options: tiny_trainer(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, **options
    ),
    "tables": lambda folder, **options: tiny_trainer(folder, table_model(), **options),
    "windows": rolling_trainer,
}


@pytest.mark.parametrize("case", TRAINERS)
def test_losses_and_weights_are_the_same(case, tmp_path, monkeypatch):
    capture_on_cpu(monkeypatch)
    trainers = {on: TRAINERS[case](tmp_path / str(on), save_strategy="no", cuda_graphs=on) for on in (True, False)}
    blocks = []
    finish = trainers[True].method.captured.clear
    monkeypatch.setattr(
        trainers[True].method.captured,
        "clear",
        lambda: (blocks.append(trainers[True].method.captured.block), finish()),
    )
    for trainer in trainers.values():
        trainer.train()
    assert trainers[False].method.captured is None
    assert blocks[-1].recording is not None and trainers[True].method.captured.block is None
    assert logged(trainers[True]) == pytest.approx(logged(trainers[False]), rel=1e-6)
    weights, expected = (trainer.model.state_dict() for trainer in trainers.values())
    for name, tensor in expected.items():
        assert torch.allclose(weights[name], tensor, atol=1e-6), name
