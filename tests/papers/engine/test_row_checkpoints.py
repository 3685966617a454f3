"""A row that was cut off continues from its last checkpoint, to the same result."""

import pytest

from hf_recurrent import load_corpus
from papers.engine import row_checkpoints as module
from papers.engine.row_checkpoints import row_checkpoints
from papers.engine.supervised import train_supervised
from papers.engine.training import build_model, split_corpus, train
from papers.online_learning.bit_copier import BitCopier, CopiedBits


def _train_on_text(corpus):
    model = build_model("memora-tiny", 256, 0, hidden_size=8, state_size=8, num_hidden_layers=1)
    settings = {"learning_rate": 1e-2, "seed": 0}
    train(model, load_corpus(corpus), settings, steps=6, per_device_train_batch_size=2, block_size=8)
    return model


def _train_supervised(corpus):
    data = CopiedBits(3, 8, 0)
    model = BitCopier({"state_size": 4, "hidden_size": 4, "num_hidden_layers": 1}, "rtrl")
    settings = {"steps": 6, "batch_size": 2, "learning_rate": 1e-2, "seed": 0}
    train_supervised(model, data, settings, warmup_share=0.0, loss=lambda out, labels, **_: data.loss(out, labels))
    return model


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "text.txt").write_text("once upon a time. " * 60)
    return str(tmp_path / "text.txt")


@pytest.mark.parametrize("run", [_train_on_text, _train_supervised])
def test_a_row_continues(run, corpus, tmp_path, monkeypatch):
    import torch

    torch.manual_seed(0)
    whole = run(corpus)
    monkeypatch.setattr(module, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    save, steps = module.TimedCheckpoints.on_save, []

    def cut_off(self, args, state, control, **kwargs):
        save(self, args, state, control, **kwargs)
        steps.append(state.global_step)
        if steps == [1, 2, 3]:
            raise KeyboardInterrupt

    monkeypatch.setattr(module.TimedCheckpoints, "on_save", cut_off)
    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt), row_checkpoints(tmp_path / "row", "row"):
        run(corpus)
    torch.manual_seed(0)
    with row_checkpoints(tmp_path / "row", "row"):
        continued = run(corpus)
    assert steps == [1, 2, 3, 4, 5, 6]
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, continued.state_dict()[name]), name
    assert not (tmp_path / "row").exists() and not (tmp_path / "row.lock").exists()


def test_texts_of_tuning_do_not_judge(tmp_path):
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(f"story {number}" * 3)
    settings = {"corpus": str(tmp_path), "eval_bytes": 10_000}
    judged = {bytes(document) for document in split_corpus(settings)[1]}
    train_part, held_out = split_corpus({**settings, "is_tuning": True})
    assert judged.isdisjoint(map(bytes, [*train_part, *held_out]))
    assert {bytes(document) for document in held_out}.isdisjoint(map(bytes, train_part))
