"""A count memory learns in the pass that trains the network, the same however streams are divided."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import COUNT_SIZES, logged, tiny_model, tiny_trainer

from hf_recurrent.data.streams import unreached_documents


def counting_trainer(output_dir, **arguments):
    return tiny_trainer(output_dir, tiny_model(**COUNT_SIZES), **arguments)


def memory_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.model.count_memory.named_buffers()}


def same_memory(trainer, other):
    pairs = zip(memory_of(trainer).values(), memory_of(other).values(), strict=True)
    return all(torch.equal(one, two) for one, two in pairs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    trainer = counting_trainer(tmp_path_factory.mktemp("whole"))
    trainer.train()
    return trainer


def test_the_memory_learns_and_helps(whole):
    memory = whole.model.count_memory
    assert memory.counters[0] > 0 and memory.slots.any()
    bits = whole.evaluate()
    assert bits["eval_bits_per_byte"] < bits["eval_network_bits_per_byte"]
    mixed, network = logged(whole, "mixed_bits_per_byte"), logged(whole, "bits_per_byte")
    assert mixed.keys() == network.keys() and mixed[12] < network[12]


def test_all_documents_that_were_read_are_in_the_text(whole):
    text = bytes(whole.model.count_memory.text.tolist())
    documents = [bytes(whole.train_dataset[index]) for index in range(len(whole.train_dataset))]
    found = sum(document + b"\0" in text for document in documents)
    assert found >= 8  # 8 streams × 192 bytes, in documents of up to 300 bytes


def test_the_network_learns_as_without_a_memory(whole, tmp_path):
    plain = tiny_trainer(tmp_path)
    plain.train()
    assert logged(plain) == logged(whole)
    weights = dict(whole.model.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in plain.model.named_parameters())


def test_accumulation_changes_nothing(whole, tmp_path):
    trainer = counting_trainer(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    trainer.train()
    text = whole.model.count_memory.text
    assert torch.equal(trainer.model.count_memory.text, text)
    # The network's logits of 4 rows are rounded otherwise than of 8.
    assert logged(trainer, "mixed_bits_per_byte")[12] == pytest.approx(logged(whole, "mixed_bits_per_byte")[12], 1e-3)


def test_resume_is_bit_for_bit(whole, tmp_path):
    trainer = counting_trainer(tmp_path)
    trainer.train(str(Path(whole.args.output_dir, "checkpoint-5")))
    assert same_memory(trainer, whole)
    for key in ("loss", "mixed_bits_per_byte"):
        assert logged(trainer, key) == logged(whole, key)
    files = [Path(part.args.output_dir, "checkpoint-12", "count_learning.safetensors") for part in (trainer, whole)]
    first, second = map(load_file, files)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("arguments", [{"regime": "iid"}, {"online": True, "method": "rtrl", "stride": 4}])
def test_other_methods_fill_the_memory_too(tmp_path, arguments):
    trainer = counting_trainer(tmp_path, max_steps=6, **arguments)
    trainer.train()
    assert trainer.model.count_memory.counters[0] > 0
    assert logged(trainer, "mixed_bits_per_byte")[6] > 0


# ---- A loss weighted by what counts do not know ----


@pytest.fixture(scope="module")
def discounted(tmp_path_factory):
    trainer = counting_trainer(tmp_path_factory.mktemp("discounted"), count_discount=0.7)
    trainer.train()
    return trainer


def test_weights_are_what_the_memory_alone_leaves(tmp_path, monkeypatch):
    """Of every step, from what has been read before: computed again in one piece after the run."""
    seen, trainer = [], counting_trainer(tmp_path, count_discount=0.7)
    learning, memory = trainer.count_learning, trainer.model.count_memory
    weights_of = learning.target_weights

    def note(batch):
        found = weights_of(batch)["target_weights"]
        state = memory.init_state(8) if not seen else learning._documents.tensors["state"].clone()
        nats, _, _ = memory.read(
            batch["input_ids"], state, None, batch["reset_mask"], targets=batch["shift_labels"], in_place=True
        )
        seen.append((found, 1 - 0.7 * (-nats).exp()))
        return {"target_weights": found}

    monkeypatch.setattr(learning, "target_weights", note)
    trainer.train()
    assert len(seen) == 12 and all(torch.equal(found, expected) for found, expected in seen)
    assert seen[-1][0].min() < 0.7 and seen[-1][0].max() > 0.99


def test_a_discount_weighs_the_loss_and_logs_whole_bits(discounted, whole):
    loss, bits = logged(discounted), logged(discounted, "bits_per_byte")
    assert all(loss[step] < 0.999 * bits[step] * math.log(2) for step in loss)
    assert bits[3] == pytest.approx(logged(whole, "bits_per_byte")[3], rel=0.05)
    assert not torch.equal(discounted.model.lm_head.weight, whole.model.lm_head.weight)


def test_a_discount_is_the_same_in_micro_batches(discounted, tmp_path):
    trainer = counting_trainer(
        tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, count_discount=0.7
    )
    trainer.train()
    for key in ("loss", "bits_per_byte", "mixed_bits_per_byte"):
        assert list(logged(trainer, key).values()) == pytest.approx(list(logged(discounted, key).values()), rel=1e-3)


def test_a_run_with_a_discount_resumes_bit_for_bit(discounted, tmp_path):
    trainer = counting_trainer(tmp_path, count_discount=0.7)
    trainer.train(str(Path(discounted.args.output_dir, "checkpoint-5")))
    assert same_memory(trainer, discounted)
    for key in ("loss", "bits_per_byte", "mixed_bits_per_byte"):
        assert logged(trainer, key) == logged(discounted, key)


@pytest.mark.parametrize("arguments", [{"regime": "iid"}, {"online": True, "method": "rtrl", "stride": 4}])
def test_other_methods_take_the_discount(tmp_path, arguments):
    trainer = counting_trainer(tmp_path, max_steps=6, count_discount=0.7, **arguments)
    trainer.train()
    assert logged(trainer)[6] < 0.999 * logged(trainer, "bits_per_byte")[6] * math.log(2)


def test_without_a_memory_a_discount_changes_nothing(tmp_path, whole):
    trainer = tiny_trainer(tmp_path, count_discount=0.7)
    trainer.train()
    assert logged(trainer) == logged(whole)


@pytest.mark.parametrize("discount", [-0.1, 1.5])
def test_a_discount_is_a_share(tmp_path, discount):
    with pytest.raises(ValueError, match="`count_discount`"):
        counting_trainer(tmp_path, count_discount=discount)


# ---- Documents that are counted before training ----


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    trainer = counting_trainer(tmp_path_factory.mktemp("ahead"), count_bytes=900)
    trainer.train()
    return trainer


def test_documents_that_no_stream_reaches_are_counted_first(ahead, whole):
    corpus, size = ahead.train_dataset, ahead.args.num_streams
    length = ahead.num_training_steps * ahead.args.block_size
    indices = unreached_documents(corpus, size, length, ahead.args.stream_seed, 900)
    first = b"".join(corpus[index].tobytes() + b"\0" for index in indices)
    assert 500 < len(first) - len(indices) <= 900
    text, before = (bytes(each.model.count_memory.text.tolist()) for each in (ahead, whole))
    assert text.startswith(first + before[:1000])
    assert logged(ahead) == logged(whole)  # the network learns the same
    assert logged(ahead, "mixed_bits_per_byte") != logged(whole, "mixed_bits_per_byte")


def test_a_run_that_has_read_ahead_resumes_bit_for_bit(ahead, tmp_path):
    trainer = counting_trainer(tmp_path, count_bytes=900)
    trainer.train(str(Path(ahead.args.output_dir, "checkpoint-5")))
    assert same_memory(trainer, ahead)
    assert trainer.record().phases[-1].segments[-1].settings == ahead.record().phases[-1].segments[-1].settings
    with pytest.raises(ValueError, match="`count_bytes`"):
        counting_trainer(tmp_path, count_bytes=800).train(str(Path(ahead.args.output_dir, "checkpoint-5")))


def test_without_a_memory_or_streams_nothing_is_read_ahead(tmp_path, whole):
    trainer = tiny_trainer(tmp_path / "plain", count_bytes=900)
    trainer.train()
    assert logged(trainer) == logged(whole)
    trainer = counting_trainer(tmp_path / "iid", count_bytes=900, regime="iid", max_steps=6)
    trainer.train()
    assert "count_bytes" not in trainer.record().phases[-1].segments[-1].settings
