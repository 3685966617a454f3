"""Tiny models of every family, built from a configuration."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_recurrent import config_from_preset

FAMILIES = ["memora", "hawk"]
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}

each_family = pytest.mark.parametrize("family", FAMILIES)
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def tiny_config(family: str, **overrides):
    sizes = {"hidden_size": 16, "state_size": 24, "num_hidden_layers": 2} | overrides
    return config_from_preset(f"{family}-tiny", **sizes)


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **overrides) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(family, **overrides)).to(dtype).eval()


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest magnitude of what is expected."""
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-3)).item()
