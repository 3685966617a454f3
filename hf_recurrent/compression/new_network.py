"""The small network that learns from nothing beside the counts, for archives that need no model file."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SEED = 0
# 152,000 weights: on texts up to a megabyte, four times as many save nothing, and take three times as long.
_SIZES = {"hidden_size": 64, "state_size": 96, "num_hidden_layers": 2, "intermediate_size": 192}


def new_network() -> "PreTrainedModel":
    """A `memora-tiny` of half its width with new weights, always the same."""
    import torch
    from transformers import AutoModelForCausalLM

    from hf_recurrent.presets import config_from_preset

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return AutoModelForCausalLM.from_config(config_from_preset("memora-tiny", **_SIZES)).eval()
