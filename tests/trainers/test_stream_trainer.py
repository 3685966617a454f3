"""`StreamTrainer`: its shape, and training methods of users."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_run import Noise, logged, tiny_corpora, tiny_model, tiny_trainer
from transformers import Trainer

import hf_recurrent as hf
from hf_recurrent import (
    DmtTrainer,
    MultiStreamTrainer,
    OnlineTrainer,
    RollingWindowTrainer,
    SmtTrainer,
    StreamTrainer,
    TrainingMethod,
)
from hf_recurrent.trainers.sharding import Replication, ShardingSettings

GUIDE = Path(__file__).parents[2] / "docs/tasks/extend.md"


@pytest.mark.parametrize("kind", [StreamTrainer, RollingWindowTrainer, OnlineTrainer, SmtTrainer, DmtTrainer])
def test_trainers_are_flat_and_override_few_private_methods(kind):
    own = kind.__mro__[: kind.__mro__.index(Trainer)]
    assert len(own) <= 3 and StreamTrainer in own
    private = {
        name
        for part in own
        for name in vars(part)
        if name in vars(Trainer) and name.startswith("_") and name[1] != "_"
    }
    assert private == {"_save", "_save_checkpoint"}
    assert all(getattr(kind, name).__doc__ for name in private)
    assert issubclass(RollingWindowTrainer, MultiStreamTrainer)


def test_activations_are_recomputed_where_the_launcher_asks_for_it(tmp_path, monkeypatch):
    class Asked(Replication):
        settings = ShardingSettings(activation_checkpointing=True)

    monkeypatch.setattr("hf_recurrent.trainers.stream_trainer.build_sharding", lambda *_: Asked())
    trainer = tiny_trainer(tmp_path, max_steps=1)
    assert not trainer.model.is_gradient_checkpointing
    trainer.train()
    assert trainer.model.is_gradient_checkpointing


class Focal(TrainingMethod):
    """Weighs each byte by (1 - p)², and carries the mean loss of its stream too."""

    name = "focal"

    def zero(self, batch_size, device):
        return super().zero(batch_size, device) | {"mean": torch.zeros(batch_size, device=device)}

    def loss(self, model, batch, carried):
        state = {name: tensor for name, tensor in carried.items() if name != "mean"}
        output = model(batch["input_ids"], reset_mask=batch["reset_mask"], state=state, use_cache=True)
        labels = batch["shift_labels"]
        nats = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        weights = (1 - (-nats).exp()) ** 2 / (1 + carried["mean"][:, None])
        mean = 0.9 * carried["mean"] + 0.1 * nats.mean(1)
        return (weights * nats).sum() / batch["num_targets"], output.state | {"mean": mean}


def focal_trainer(directory, **options):
    args = tiny_trainer(directory, **options).args
    return StreamTrainer(tiny_model(), args, *tiny_corpora(), callbacks=[Noise()], method=Focal())


def test_a_method_of_a_user_is_resumed_bit_for_bit(tmp_path):
    whole, again = focal_trainer(tmp_path / "a"), focal_trainer(tmp_path / "b")
    whole.train()
    assert len(whole.carried.get(0, 8)["mean"]) == 8 and float(whole.carried.get(0, 8)["mean"].min()) > 0
    again.train(str(tmp_path / "a" / "checkpoint-5"))
    assert logged(again) == logged(whole)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], weight), name
    assert [phase.method for phase in again.provenance.phases] == ["focal"]
    assert math.isfinite(again.evaluate()["eval_bits_per_byte"])


def test_accumulation_does_not_change_a_method_of_a_user(tmp_path):
    losses = []
    for size in (8, 2):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
        trainer = focal_trainer(tmp_path / str(size), max_steps=4, save_strategy="no", **options)
        trainer.train()
        losses.append(logged(trainer))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_mean_is_averaged_over_micro_batches(tmp_path):
    class Mean(TrainingMethod):
        name, loss_is_mean = "mean", True

        def loss(self, model, batch, carried):
            output = model(batch["input_ids"], reset_mask=batch["reset_mask"], state=carried, use_cache=True)
            return F.cross_entropy(output.logits.flatten(0, 1), batch["shift_labels"].flatten()), output.state

    args = tiny_trainer(tmp_path, max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2).args
    trainer = StreamTrainer(tiny_model(), args, *tiny_corpora(), method=Mean())
    trainer.train()
    plain = tiny_trainer(tmp_path / "b", max_steps=3, save_strategy="no")
    plain.train()
    assert logged(trainer) == pytest.approx(logged(plain), rel=1e-5)  # every block has as many targets


def test_the_method_of_the_guide_is_short():
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL) if "FocalLoss" in block
    )
    namespace = {}
    exec(compile(code[: code.index("\nmodel = ")], "guide", "exec"), namespace)
    assert issubclass(namespace["FocalLoss"], hf.TrainingMethod)
    body = code[code.index("class FocalLoss") : code.index("\nmodel = ")]
    assert len(body.strip().splitlines()) < 40


def test_training_needs_data(tmp_path):
    args = tiny_trainer(tmp_path).args
    trainer = MultiStreamTrainer(tiny_model(), args, None, tiny_corpora()[1])
    assert trainer.evaluate()["eval_bits_per_byte"] > 0
    with pytest.raises(ValueError, match="`train_corpus` is None"):
        trainer.train()
