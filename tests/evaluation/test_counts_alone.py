"""Training bytes of a run, and count memories without a network or without their short-term part."""

import copy

import numpy as np
import pytest
import torch
from counted_model import counted_model, word_corpus

from hf_recurrent import MultiStreamTrainer, MultiStreamTrainingArguments, evaluate_bits_per_byte
from hf_recurrent.checkpoints.records import Base, Provenance
from hf_recurrent.data.episode_source import EvaluationShare
from hf_recurrent.evaluation.counts_alone import (
    CountsAlone,
    TrainingBytes,
    bytes_read,
    frozen,
    frozen_memory,
    learn_counts,
)
from hf_recurrent.modeling.contexts.count_memory import STATE_PART

STREAMS, BLOCK, STEPS = 3, 8, 40


@pytest.fixture(scope="module")
def corpus():
    return word_corpus((1, 40, 7, 90, 20, 33, 12))


@pytest.fixture(scope="module")
def held_out():
    return word_corpus((50, 3, 120), seed=1)


@pytest.fixture(scope="module")
def trainer(corpus, tmp_path_factory):
    options = {"max_steps": STEPS, "per_device_train_batch_size": STREAMS, "block_size": BLOCK, "report_to": "none"}
    arguments = MultiStreamTrainingArguments(
        str(tmp_path_factory.mktemp("run")), use_cpu=True, disable_tqdm=True, save_strategy="no", **options
    )
    trainer = MultiStreamTrainer(counted_model(corpus, ()), arguments, corpus)
    trainer.train()
    return trainer


def test_the_bytes_are_those_of_the_run(trainer, corpus):
    read = bytes_read(trainer.record(), corpus)
    assert read == TrainingBytes(corpus, STREAMS, BLOCK, trainer.args.stream_seed, STEPS)
    assert read.num_bytes == STREAMS * BLOCK * STEPS
    documents = read.documents()
    assert sum(map(len, documents)) == read.num_bytes
    whole = [episode.tobytes() for episode in corpus]
    assert all(document in whole for document in documents[:-STREAMS])
    assert all(any(each.startswith(document) for each in whole) for document in documents[-STREAMS:])
    # The text that the memory keeps has them in the same order.
    text = trainer.model.count_memory.text.numpy().tobytes()
    assert text.startswith(b"".join(document + b"\0" for document in documents[:-STREAMS]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda provenance: provenance.phases.append(provenance.phases[0]), "single recorded phase"),
        (lambda provenance: setattr(provenance.phases[0], "base", Base("x", "y")), "single recorded phase"),
        (lambda provenance: provenance.phases[0].segments[0].settings.update(regime="iid"), "not trained on streams"),
        (lambda provenance: setattr(provenance.phases[0].data[0], "fingerprint", "x"), "other data"),
    ],
)
def test_bytes_that_are_not_known(trainer, corpus, change, message):
    provenance = copy.deepcopy(trainer.record())
    change(provenance)
    assert message in bytes_read(provenance, corpus)
    assert "single" in bytes_read(Provenance(), corpus)


def test_counts_alone_are_the_counts_of_the_run(trainer, corpus):
    memory = learn_counts(trainer.model.count_memory.shape, bytes_read(trainer.record(), corpus), progress=False)
    for name in ("slots", "text", "index", "counters"):
        assert torch.equal(getattr(memory, name), getattr(trainer.model.count_memory, name)), name
    assert not torch.equal(memory.weights, trainer.model.count_memory.weights)  # mixed without a network


def test_counts_of_a_run_that_has_read_ahead(corpus, tmp_path):
    options = {"max_steps": 3, "per_device_train_batch_size": 2, "block_size": BLOCK, "report_to": "none"}
    arguments = MultiStreamTrainingArguments(
        str(tmp_path), use_cpu=True, disable_tqdm=True, save_strategy="no", count_bytes=600, **options
    )
    trainer = MultiStreamTrainer(counted_model(corpus, ()), arguments, corpus)
    trainer.train()
    read = bytes_read(trainer.record(), corpus)
    assert (read.count_bytes, read.planned_steps, read.num_bytes) == (600, 3, 3 * 2 * BLOCK)
    assert read.ahead and read.num_counted_bytes == read.num_bytes + sum(map(len, read.ahead))
    assert sum(map(len, read.documents())) == read.num_counted_bytes
    assert read.documents()[0] == read.ahead[0].tobytes()
    memory = learn_counts(trainer.model.count_memory.shape, read, progress=False)
    for name in ("slots", "text", "index", "counters"):
        assert torch.equal(getattr(memory, name), getattr(trainer.model.count_memory, name)), name


def bits(model, corpus) -> float:
    return corpus.evaluation_metrics(corpus.evaluate(model, EvaluationShare()))["bits_per_byte"]


def test_adapting_and_frozen(trainer, corpus, held_out):
    read = bytes_read(trainer.record(), corpus)
    memory = learn_counts(trainer.model.count_memory.shape, read, progress=False)
    rigid = frozen_memory(memory)
    assert rigid.slots.data_ptr() == memory.slots.data_ptr()
    assert rigid.state_bytes < memory.state_bytes
    state = torch.zeros(1, rigid.state_bytes, dtype=torch.uint8)
    ids = torch.from_numpy(held_out[0].astype(np.int64))[None]
    expected = -float(rigid.read(ids, state, targets=ids.roll(-1))[0].sum())
    losses = CountsAlone(rigid).token_losses(ids, ids.roll(-1))
    assert -float(losses.nats.sum()) == expected
    assert losses.state[STATE_PART].shape == state.shape
    assert bits(CountsAlone(memory), held_out) < bits(CountsAlone(rigid), held_out)


def test_a_frozen_model_is_the_one_loaded_without_short_term_memory(trainer, held_out, tmp_path):
    model, memory = trainer.model.eval(), trainer.model.count_memory
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, count_memory_window=0, count_memory_rows=0)
    with frozen(model):
        found = evaluate_bits_per_byte(model, held_out, progress=False)
    expected, whole = (evaluate_bits_per_byte(each, held_out, progress=False) for each in (loaded, model))
    assert found == expected
    assert found["network_nats"] == whole["network_nats"] and found["nats"] > whole["nats"]
    assert model.count_memory is memory


def test_a_model_without_counts_cannot_be_frozen(corpus):
    model = counted_model(corpus)
    model.count_memory = None
    with pytest.raises(ValueError, match="no count memory"), frozen(model):
        pass
