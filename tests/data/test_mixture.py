"""Mixtures: which bytes the streams read, in which shares, from any position; and a resumed run."""

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import tiny_corpora, tiny_trainer
from torch.utils.data import DataLoader

from hf_recurrent import Corpus, Mixture, config_from_preset
from hf_recurrent.cli.data_arguments import DataArguments, load_evaluation_source, load_training_sources
from hf_recurrent.data.episode_source import EvaluationShare
from hf_recurrent.modeling.memora.modeling_memora import MemoraForCausalLM

KEYS = ("input_ids", "shift_labels", "reset_mask", "stream_indices", "stream_positions")


def letters(letter, name, count=9):
    return Corpus.from_documents([letter * (3 + 5 * number % 17) for number in range(count)], name=name)


@pytest.fixture
def mixture():
    return Mixture([letters("a", "first"), letters("b", "second", 40)], [0.7, 0.3])


@given(
    st.lists(st.integers(1, 20), min_size=2, max_size=5),
    st.integers(1, 40),
)
def test_streams_are_divided_in_the_ratio_or_refused(weights, num_streams):
    shares = np.array(weights) / sum(weights)
    mixed = Mixture([letters("a", str(number)) for number in range(len(weights))], shares)
    nearest = np.abs(np.round(shares * num_streams) / num_streams - shares)
    try:
        counts = np.bincount(mixed.source_of_streams(num_streams), minlength=len(weights))
    except ValueError as error:
        assert "use more streams" in str(error)
        # Counts have to add up, so one may be off by up to one stream.
        assert (nearest + 1 / num_streams > 0.25 * shares).any()
        return
    assert counts.sum() == num_streams and (np.abs(counts / num_streams - shares) <= 0.25 * shares).all()
    assert (np.abs(counts - shares * num_streams) < 1).all()


def test_every_part_of_the_streams_has_the_mixture(mixture):
    sources = mixture.source_of_streams(40)
    assert all(abs(sources[begin : begin + 10].sum() - 3) <= 1 for begin in range(0, 40, 10))


@pytest.mark.parametrize("regime", ["multi_stream", "iid"])
def test_a_stream_reads_what_its_source_alone_gives_it(mixture, regime):
    sources = mixture.source_of_streams(10)
    mixed = list(islice(mixture.blocks(10, 8, 5, regime=regime), 6))
    for number, corpus in enumerate(mixture.sources):
        rows = np.flatnonzero(sources == number)
        for batch, alone in zip(mixed, corpus.blocks(len(rows), 8, 5, regime=regime), strict=False):
            assert all(torch.equal(batch[key][rows], alone[key]) for key in KEYS if key != "stream_indices")


@pytest.mark.parametrize("regime", ["multi_stream", "iid"])
@pytest.mark.parametrize("workers", [0, 2])
def test_groups_workers_processes_and_positions_change_nothing(mixture, regime, workers):
    whole = list(islice(mixture.blocks(10, 8, regime=regime), 9))
    positions = whole[3]["stream_positions"].numpy()
    for streams in ([0, 1, 4, 5, 8, 9], [2, 3, 6, 7]):
        blocks = mixture.blocks(
            10, 8, regime=regime, stream_indices=streams, accumulation_groups=2, positions=positions
        )
        for count, batch in enumerate(islice(DataLoader(blocks, batch_size=None, num_workers=workers), 10)):
            index, group = divmod(count, 2)
            rows = streams[: len(streams) // 2] if group == 0 else streams[len(streams) // 2 :]
            assert batch["stream_indices"].tolist() == rows
            assert all(torch.equal(batch[key], whole[4 + index][key][rows]) for key in KEYS)


def test_evaluation_is_of_each_source(mixture):
    model = MemoraForCausalLM(config_from_preset("memora-tiny", hidden_size=16, num_hidden_layers=1)).eval()
    metrics = mixture.evaluation_metrics(mixture.evaluate(model, EvaluationShare()))
    own = [c.evaluation_metrics(c.evaluate(model, EvaluationShare()))["bits_per_byte"] for c in mixture.sources]
    assert [metrics["bits_per_byte_1"], metrics["bits_per_byte_2"]] == own
    assert metrics["bits_per_byte"] == pytest.approx(0.7 * own[0] + 0.3 * own[1])
    assert metrics["num_bytes"] == sum(corpus.num_bytes for corpus in mixture.sources)
    assert "on first" in mixture.describe_result(metrics)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    train, held_out = tiny_corpora()
    corpora = Mixture([train, letters("b", "second", 40)], [0.75, 0.25]), held_out
    whole = tiny_trainer(tmp_path / "whole", corpora=corpora)
    whole.train()
    cut = tiny_trainer(tmp_path / "whole", corpora=corpora)
    cut.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    for name, weight in whole.trained_model.state_dict().items():
        assert torch.equal(weight, cut.trained_model.state_dict()[name]), name
    other = tiny_trainer(tmp_path / "whole", corpora=(Mixture(corpora[0].sources, [0.5, 0.5]), held_out))
    with pytest.raises(ValueError, match="they must be the same"):
        other.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))


def test_the_length_of_a_run_in_bytes_or_in_epochs(tmp_path):
    train, held_out = tiny_corpora()
    mixed = Mixture([train, letters("b", "second", 40)], [0.75, 0.25])
    for options in ({"train_bytes": 1e3}, {"num_train_epochs": 0.1}):
        trainer = tiny_trainer(tmp_path, corpora=(mixed, held_out), max_steps=-1, **options)
        expected = options.get("train_bytes") or 0.1 * mixed.tokens_per_epoch
        trainer.train()
        assert trainer.state.global_step == -(-expected // trainer.args.step_bytes)


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        ([0.7], "for 2 sources; it needs one for each"),
        ([0.7, 0.2], "is 0.7 0.2; the numbers must be above 0"),
        ([1.0, 0.0], "must be above 0"),
        ([float("nan"), 0.5], "must be above 0"),
    ],
)
def test_wrong_probabilities(probabilities, message):
    with pytest.raises(ValueError, match=message):
        Mixture([letters("a", "first"), letters("b", "second")], probabilities)


def test_sources_of_different_tokens():
    dna = Corpus(np.zeros(3, np.uint8), np.array([0, 3]), vocab_size=7, name="dna")
    with pytest.raises(ValueError, match=r"256 bytes \('first'\) and 7 bytes \('dna'\)"):
        Mixture([letters("a", "first"), dna], [0.5, 0.5])


def test_flags(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name * 9}{i}"}}\n' for i in range(20)))
    names = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    arguments = DataArguments(corpus=names, corpus_probabilities=[0.7, 0.3], validation_fraction=0.1)
    train, held_out = load_training_sources(arguments, None)
    assert [len(part) for part in train.sources + held_out.sources] == [18, 18, 2, 2]
    assert load_evaluation_source(arguments, None, "validation").fingerprint == held_out.fingerprint
    assert [len(part) for part in load_evaluation_source(arguments, None, "all").sources] == [20, 20]
    with pytest.raises(ValueError, match="`--corpus_probabilities` is 1, for 2 sources"):
        DataArguments(corpus=names, corpus_probabilities=[1.0])
