"""Tiny models of every family, built from a configuration."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_recurrent import config_from_preset
from hf_recurrent.modeling.contexts.ngram_embedding import NgramEmbedding
from hf_recurrent.modeling.units.recurrent_units import RECURRENT_UNITS

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import leaky_unit  # noqa: F401 (a user's own unit, registered as "leaky", passes the tests of all units)

FAMILIES = ["memora", "hawk", "mgrade", "lru", "smt-rnn"]
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}

# A family, or a family with another unit in its block, or SMT's RNN with another update, or a family with n-grams.
SIGNED = ["memora+glru+signed", "memora+mingru+signed"]
UNITS = [f"memora+{unit}" for unit in RECURRENT_UNITS if unit not in ("glru", "rg_lru")]
NGRAMS = [f"{family}+ngrams" for family in FAMILIES]
VARIANTS = [*FAMILIES, *UNITS, *SIGNED, "smt-rnn+mlp", "smt-rnn+gru", *NGRAMS]

each_variant = pytest.mark.parametrize("variant", VARIANTS)
each_family = pytest.mark.parametrize("family", FAMILIES)
each_family_and_own_unit = pytest.mark.parametrize("family", [*FAMILIES, "memora+leaky"])
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def tiny_config(variant: str, **overrides):
    family, *options = variant.split("+")
    if "ngrams" in options:
        options.remove("ngrams")
        overrides = {"ngram_orders": [2, 3, 5], "ngram_rows": 64, "ngram_output": True} | overrides
    if family == "smt-rnn":
        return tiny_smt_config(*options, **overrides)
    sizes = {"hidden_size": 16, "state_size": 24, "num_hidden_layers": 2}
    if options:
        sizes |= {"recurrent_unit": options[0], "allow_negative_eigenvalues": "signed" in options}
    sizes |= overrides
    if family == "mgrade":
        # Its state is as wide as the model, and its embedding is tied only on request.
        sizes = {"tie_word_embeddings": True} | sizes | {"hidden_size": sizes["state_size"]}
    return config_from_preset(f"{family}-tiny", **sizes)


def tiny_smt_config(backbone: str = "transformer", **overrides):
    """One layer each, as it runs step by step; its state has no width, and its embedding is tied on request only."""
    overrides.pop("state_size", None)
    sizes = {"hidden_size": 16, "num_memory_tokens": 3, "num_attention_heads": 2, "tie_word_embeddings": True}
    sizes |= {"backbone": backbone, "num_hidden_layers": 1, "num_readout_layers": 1}
    return config_from_preset("smt-rnn-tiny", **sizes | overrides)


def tiny_model(variant: str, dtype: torch.dtype = torch.float32, **overrides) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(variant, **overrides)).to(dtype).eval()
    for module in model.modules():
        if isinstance(module, NgramEmbedding):  # zero at first
            torch.nn.init.normal_(module.weight)
    return model


def read_bytes(model: PreTrainedModel, input_ids: torch.Tensor) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
    """Logits (B, T, V), byte by byte, and the states before the first and after every byte."""
    states, logits = [model.init_state(len(input_ids))], []
    for byte in input_ids.split(1, dim=1):
        output = model(byte, state=states[-1])
        states.append(output.state)
        logits.append(output.logits)
    return torch.cat(logits, 1), states


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest expected magnitude."""
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-3)).item()
