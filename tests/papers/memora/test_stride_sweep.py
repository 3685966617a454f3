"""Stride sweep: evaluation with the state carried and from zero states."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent import Corpus, config_from_preset, evaluate_bits_per_byte
from papers import load_experiment
from papers.memora.stride_sweep import NAMES, STATE_CARRIED, STATE_ZERO, measure


@pytest.mark.parametrize(
    ("preset", "widths"),
    [
        ("memora-tiny", {"hidden_size": 16, "state_size": 24}),
        ("mamba2-s0", {"hidden_size": 16, "num_heads": 4, "head_dim": 8, "state_size": 8, "chunk_size": 4}),
    ],
)
def test_iid_is_measured_with_the_state_carried_and_zero_at_each_block(preset, widths):
    torch.manual_seed(0)
    config = config_from_preset(preset, num_hidden_layers=1, **widths)
    model = AutoModelForCausalLM.from_config(config)
    corpus = Corpus.from_documents([bytes(range(1, 120)), b"abc" * 30])
    options = {"num_streams": 1, "progress": False}
    carried = evaluate_bits_per_byte(model, corpus, **options)["bits_per_byte"]
    zero_state = evaluate_bits_per_byte(model, corpus, block_size=4, carry_state=False, **options)["bits_per_byte"]
    assert abs(carried - zero_state) > 1e-3
    measured = measure(model, corpus, "iid", 4)
    assert measured == {STATE_CARRIED: pytest.approx(carried), STATE_ZERO: pytest.approx(zero_state)}
    assert set(measure(model, corpus, "multi_stream", 4)) == {STATE_CARRIED}


def test_every_family_trains_in_both_regimes():
    labels = {row["label"] for row in load_experiment("stride-sweep").rows("small")}
    families = {f"{family}, {regime}" for family in NAMES.values() for regime in ("streams", "IID")}
    assert labels == families | {f"Memora, streams, {share} of the bytes" for share in ("half", "a quarter")}
