"""Windows that overlap: T bytes, of which S are new."""

import pytest
import torch
from tiny_run import logged, tiny_corpora, tiny_model, tiny_trainer

from hf_recurrent import ByteTokenizer, MultiStreamDataset, RollingWindowTrainer, RollingWindowTrainingArguments


def rolling_trainer(output_dir, model=None, **arguments):
    defaults = {
        "per_device_train_batch_size": 4, "block_size": 8, "window": 24, "max_steps": 6, "learning_rate": 1e-2,
        "logging_steps": 1, "save_steps": 2, "save_total_limit": None, "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    args = RollingWindowTrainingArguments(output_dir=str(output_dir), **defaults | arguments)
    return RollingWindowTrainer(model or tiny_model(), args, *tiny_corpora(), processing_class=ByteTokenizer())


def test_without_overlap_it_is_multi_stream_training(tmp_path):
    rolling = rolling_trainer(tmp_path / "a", window=8)
    rolling.train()
    plain = tiny_trainer(
        tmp_path / "b", per_device_train_batch_size=4, block_size=8, max_steps=6, logging_steps=1, save_strategy="no"
    )
    plain.train()
    assert logged(rolling) == pytest.approx(logged(plain), rel=1e-6)


def test_losses_are_those_of_a_loop_by_hand(tmp_path):
    trainer = rolling_trainer(tmp_path, save_strategy="no")
    trainer.train()

    model, stride, length = tiny_model().train(), 8, 24
    by_hand = tiny_trainer(tmp_path, model, max_steps=6, per_device_train_batch_size=4)
    optimizer = by_hand.create_optimizer()
    schedule = by_hand.create_scheduler(6, optimizer)
    batches = iter(MultiStreamDataset(tiny_corpora()[0], 4, stride, seed=trainer.args.seed))
    blocks, state, losses = [], model.init_state(4), {}
    for step in range(1, 7):
        blocks = [*blocks, next(batches)]
        window = {name: torch.cat([block[name] for block in blocks], 1) for name in ("input_ids", "reset_mask")}
        targets = torch.cat([block["shift_labels"] for block in blocks], 1)
        output = model(**window, state=state)
        nats = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = nats / (4 * length)  # also while the first windows are shorter
        losses[step] = loss.item()
        if len(blocks) == length // stride:  # the state before the next window, with the present weights
            oldest = blocks.pop(0)
            with torch.no_grad():
                after = model(oldest["input_ids"], reset_mask=oldest["reset_mask"], state=state, use_cache=True)
            state = after.state
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert logged(trainer) == pytest.approx(losses, rel=1e-5)


def test_resuming_is_bit_for_bit(tmp_path):
    whole, resumed = rolling_trainer(tmp_path / "a"), rolling_trainer(tmp_path / "b")
    whole.train()
    resumed.train(str(tmp_path / "a" / "checkpoint-2"))
    assert logged(resumed) == logged(whole)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"window": 20}, "`window` is 20"),
        ({"window": 4}, "`window` is 4"),
        ({"regime": "iid"}, "`regime` is 'iid'"),
        ({"count_discount": 0.5}, "`count_discount` is 0.5"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        RollingWindowTrainingArguments(output_dir="unused", **{"block_size": 8, "window": 24} | arguments)


def test_a_model_without_state_is_refused(tmp_path):
    with pytest.raises(ValueError, match="which has no state"):
        rolling_trainer(tmp_path, tiny_model("llama-s0", num_attention_heads=2, intermediate_size=16))
