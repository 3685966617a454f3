"""Bits per byte: an oracle by plain loop, and that streams and blocks do not matter."""

import bz2
import copy
import gzip
import lzma
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_recurrent import Corpus, config_from_preset, evaluate_bits_per_byte
from hf_recurrent.evaluation.compressors import COMPRESSORS, compressed_bits_per_byte

METRIC = str(Path(__file__).parents[2] / "metrics" / "bits_per_byte")
SIZES = {"hidden_size": 16, "state_size": 24, "num_hidden_layers": 2}


def build(family: str, **overrides):
    torch.manual_seed(0)
    options = SIZES | {"tie_word_embeddings": False} | overrides
    return AutoModelForCausalLM.from_config(config_from_preset(f"{family}-tiny", **options)).double().eval()


@pytest.fixture(scope="module", params=["memora", "hawk"])
def model(request):
    return build(request.param)


@pytest.fixture(scope="module")
def corpus():
    generator = np.random.default_rng(0)
    lengths = [1, 5, 300, 64, 17, 128, 2, 90]
    return Corpus.from_documents([generator.integers(1, 256, length, dtype=np.uint8).tobytes() for length in lengths])


def oracle(model, episodes, end_token_id, window=None) -> tuple[float, list[list[float]]]:
    """Total nats, and the nats of each target of each episode, one episode and one window at a time in float64."""
    every = []
    for episode in episodes:
        inputs = [int(token) for token in episode]
        targets = inputs[1:] + ([] if end_token_id is None else [end_token_id])
        nats = []
        for start in range(0, len(inputs), window or len(inputs)):
            piece = torch.tensor([inputs[start : start + (window or len(inputs))]])
            with torch.no_grad():
                log_p = model(piece, use_cache=False).logits[0].double().log_softmax(-1)
            nats += [-float(log_p[t, target]) for t, target in enumerate(targets[start : start + piece.shape[1]])]
        every.append(nats)
    return math.fsum(map(math.fsum, every)), every


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("num_streams", "block_size"), [(1, 1000), (1, 1), (3, 7), (8, 64), (20, 33)])
def test_any_streams_and_blocks_give_the_oracle(model, corpus, num_streams, block_size):
    nats, _ = oracle(model, corpus, 0)
    result = evaluate_bits_per_byte(model, corpus, num_streams=num_streams, block_size=block_size, progress=False)
    assert result["nats"] == pytest.approx(nats, rel=1e-10)
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / corpus.num_bytes, rel=1e-10)
    assert (result["num_bytes"], result["num_episodes"]) == (corpus.num_bytes, len(corpus))


def test_float32_agrees_with_float64(model, corpus):
    exact = evaluate_bits_per_byte(model, corpus, progress=False)["bits_per_byte"]
    single = copy.deepcopy(model).float()
    for num_streams, block_size in ((1, 50), (4, 8)):
        result = evaluate_bits_per_byte(single, corpus, num_streams=num_streams, block_size=block_size, progress=False)
        assert result["bits_per_byte"] == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("window", [1, 16, 1000])
def test_without_carry_every_window_stands_alone(model, corpus, window):
    nats, _ = oracle(model, corpus, 0, window)
    for num_streams in (1, 5):
        result = evaluate_bits_per_byte(
            model, corpus, num_streams=num_streams, block_size=window, carry_state=False, progress=False
        )
        assert result["nats"] == pytest.approx(nats, rel=1e-10)
    whole = evaluate_bits_per_byte(model, corpus, progress=False)["nats"]
    assert (abs(whole - nats) < 1e-6) == (window == 1000)


def test_stock_llama_is_evaluated_in_windows(corpus):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    nats, _ = oracle(model, corpus, 0, 32)
    for num_streams in (1, 6):
        result = evaluate_bits_per_byte(model, corpus, num_streams=num_streams, block_size=32, progress=False)
        assert result["nats"] == pytest.approx(nats, rel=1e-5)
    with pytest.raises(ValueError, match=r"`block_size` is 65; the model has 64 positions"):
        evaluate_bits_per_byte(model, corpus, block_size=65, progress=False)


@pytest.mark.parametrize("carry_state", [True, False])
def test_binary_episodes_have_no_end_to_predict(model, carry_state):
    corpus = Corpus.from_documents([bytes([0, 1, 0, 7] * 9), b"\x00", b"\xff\x00\x00"], binary=True)
    nats, _ = oracle(model, corpus, None, None if carry_state else 8)
    result = evaluate_bits_per_byte(
        model, corpus, num_streams=2, block_size=8, carry_state=carry_state, progress=False
    )
    assert result["nats"] == pytest.approx(nats, rel=1e-10)
    assert result["num_bytes"] == 40


def test_training_mode_comes_back(model, corpus):
    model.train()
    try:
        evaluate_bits_per_byte(model, corpus, progress=False)
        assert model.training
    finally:
        model.eval()


@pytest.mark.parametrize("options", [{"num_streams": 0}, {"block_size": 0}])
def test_too_small_numbers_are_named(model, corpus, options):
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"`{name}` is 0; it must be at least 1"):
        evaluate_bits_per_byte(model, corpus, progress=False, **options)


def test_corpus_of_a_larger_alphabet_is_refused(corpus):
    small = build("memora", vocab_size=7)
    with pytest.raises(ValueError, match="256 token ids"):
        evaluate_bits_per_byte(small, corpus, progress=False)


def test_compressors_are_those_of_the_command_line(corpus):
    source = [path.read_bytes() for path in sorted(Path(np.__file__).parent.glob("*.py"))[:5]]
    for data in [
        *source,
        Path(__file__).read_bytes(),
        b"x",
        bytes(70_000),
        *(episode.tobytes() for episode in corpus),
    ]:
        assert COMPRESSORS["gzip -9"](data) == len(gzip.compress(data, 9))
        assert COMPRESSORS["bz2 -9"](data) == len(bz2.compress(data, 9))
        assert COMPRESSORS["xz -9"](data) == len(lzma.compress(data, preset=9))


def test_compressed_sizes_are_summed_over_episodes(corpus):
    result = compressed_bits_per_byte(corpus, progress=False)
    expected = 8 * sum(len(lzma.compress(episode.tobytes(), preset=9)) for episode in corpus) / corpus.num_bytes
    assert result["xz -9"] == expected
    assert list(result) == ["gzip -9", "bz2 -9", "xz -9"]


@pytest.fixture(scope="module")
def metric(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr("evaluate.config.HF_EVALUATE_OFFLINE", True)
    evaluate = pytest.importorskip("evaluate")
    yield evaluate.load(METRIC, cache_dir=str(tmp_path_factory.mktemp("metrics")))
    patch.undo()


def test_metric_agrees_with_the_evaluation(metric, model, corpus):
    _, nats = oracle(model, corpus, 0)
    result = metric.compute(predictions=nats, references=[episode.tolist() for episode in corpus], byte_level=True)
    expected = evaluate_bits_per_byte(model, corpus, progress=False)
    assert result["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=1e-10)
    assert result["num_bytes"] == expected["num_bytes"]


def test_metric_counts_utf8_bytes_of_text_in_batches(metric):
    metric.add_batch(predictions=[[math.log(2)] * 3, []], references=["né", ""])
    metric.add(prediction=[math.log(2)], reference="€")
    result = metric.compute()
    assert result["num_bytes"] == 6
    assert result["bits_per_byte"] == pytest.approx(4 / 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"predictions": [[-0.5]], "references": ["a"]}, "negate log-probabilities"),
        ({"predictions": [[math.nan]], "references": ["a"]}, "holds a NaN"),
        ({"predictions": [[0.5]], "references": [[256]]}, "holds 256; byte values are 0 to 255"),
        ({"predictions": [[]], "references": [""]}, "holds no bytes"),
        ({"predictions": [[0.5] * 9], "references": ["abc"], "byte_level": True}, "must be 2, 3 or 4"),
    ],
)
def test_metric_names_what_is_wrong(metric, arguments, message):
    with pytest.raises(ValueError, match=message):
        metric.compute(**arguments)
